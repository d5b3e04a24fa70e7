"""PID 1 of an episode: makes the namespaces' inside, hands out descriptors of them, and becomes a tiny pause program.

Runs in the process that `clone3` made, between the fork and the exec; nothing here returns to the caller.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
from dataclasses import dataclass
from typing import NoReturn

from tbench2_env.isolation import mounts, userns
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import HOSTNAME, Rung, SandboxSpec

#: Where the worktree is mounted until it becomes the root. /tmp exists everywhere, and the 0700 scratch folder would
#: be EACCES for the episode's root.
STAGE = "/tmp"
#: What `run` hands out, in this order, as descriptors.
HANDED_OUT = ("user", "proc")

_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
_PAUSE_CODE = {
    # again: mov $34, %eax (pause); syscall; jmp again
    "x86_64": bytes.fromhex("b8220000000f05ebf7"),
    # again: x0..x3 = 0; x8 = 73 (ppoll); svc 0; b again
    "aarch64": struct.pack("<7I", 0xD2800000, 0xD2800001, 0xD2800002, 0xD2800003, 0xD2800928, 0xD4000001, 0x17FFFFFA),
}


def pause_program(machine: str) -> bytes:
    """A static ELF executable that sleeps for ever: one header, one segment, a loop of one system call.

    A Python PID 1 would keep 1.2 MB per episode; this one keeps a few pages. Zombies need no code: SIGCHLD stays
    ignored across exec, and children of a process that ignores it are reaped by the kernel.

    Raises: KeyError for a machine with no code above.
    """
    code = _PAUSE_CODE[machine]
    base, header_size = 0x400000, 64 + 56
    size = header_size + len(code)
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = identity + struct.pack(
        "<HHIQQQIHHHHHH", 2, _ELF_MACHINE[machine], 1, base + header_size, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return header + segment + code


def pause_descriptor() -> int:
    """The pause program in memory, ready for `os.execve`."""
    fd = os.memfd_create("pause", os.MFD_CLOEXEC)
    os.write(fd, pause_program(os.uname().machine))
    # A descriptor open for writing cannot be executed (ETXTBSY).
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return read_only


@dataclass(frozen=True)
class Inside:
    """What PID 1 needs from outside: descriptors of detached mounts, of the pause program and of the channel."""

    channel: socket.socket
    worktree: int
    sysfs: int
    pause: int


def run(spec: SandboxSpec, rung: Rung, inside: Inside) -> NoReturn:
    """Become PID 1 of the episode; answer over the channel with the descriptors of HANDED_OUT, or with an error."""
    try:
        _become_first(inside.channel, rung)
        _mount_everything(rung, inside)
        descriptors = _namespaces_of_agent(spec, rung)
        _enter_root()
        socket.send_fds(inside.channel, [b"ok"], descriptors)
        os.execve(inside.pause, ["init"], {})
    except BaseException as error:
        with contextlib.suppress(BaseException):
            inside.channel.send(f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        # Whatever happened: a fork must never go on as a second spawner.
        os._exit(1)


def _become_first(channel: socket.socket, rung: Rung) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.setsid()
    # Before the ids change: /proc/self belongs to real root afterwards.
    prefer_for_oom_killer()
    if channel.recv(16) != b"mapped":
        os._exit(1)
    userns.become_root(supplementary_groups=rung.has_id_range)
    # After the ids change, which clears it.
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)


def prefer_for_oom_killer() -> None:
    """An episode is the first thing that the kernel's OOM killer takes, so that it never takes the trainer."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"1000")
    os.close(fd)


def _mount_everything(rung: Rung, inside: Inside) -> None:
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    sc.move_mount(inside.worktree, STAGE)
    sc.move_mount(inside.sysfs, STAGE + "/sys")
    plan = mounts.sandbox_plan(protect_proc_sys=rung.protect_proc_sys, own_tty_group=rung.has_id_range)
    mounts.apply(plan, STAGE)


def _namespaces_of_agent(spec: SandboxSpec, rung: Rung) -> list[int]:
    """Make the agent's user namespace below the episode's own, and open it and the episode's /proc.

    The process that makes it exits at once: nothing of the agent's is left running.
    """
    if spec.processes_max is not None:
        # Set before the inner namespace exists, it caps all of the episode's users together.
        resource.setrlimit(resource.RLIMIT_NPROC, (spec.processes_max, spec.processes_max))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _make_user_namespace(theirs)
    theirs.close()
    answer = ours.recv(4000).decode()
    if answer != "ready":
        raise OSError(answer)
    proc = STAGE + "/proc"
    userns.write_maps(proc, pid, rung.inner_map_line)
    agent = os.open(f"{proc}/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    ours.close()
    return [agent, os.open(proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]


def _make_user_namespace(channel: socket.socket) -> NoReturn:
    try:
        sc.unshare(sc.CLONE_NEWUSER)
        # The spawner is not dumpable and neither are its forks: their /proc files would belong to real root.
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        channel.send(b"ready")
        channel.recv(1)
    except OSError as error:
        channel.send(str(error).encode())
    os._exit(0)


def _enter_root() -> None:
    os.chdir(STAGE)
    sc.pivot_root(".", ".")
    sc.umount(".")
    os.chdir("/")
    socket.sethostname(HOSTNAME)
