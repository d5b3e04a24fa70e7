"""PID 1 of an episode: makes the namespaces' inside, hands out descriptors of them, and becomes a tiny pause program.

Runs in the process that `clone` made, between the fork and the exec; nothing here returns to the caller.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from tbench2_env.isolation import egress, mounts, provisions, userns
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import HOSTNAME, PROXY_PORT, Network, Rung, SandboxSpec, decode

#: Where the worktree is mounted until it becomes the root. /tmp exists everywhere, and the 0700 scratch folder would
#: be EACCES for the episode's root.
STAGE = "/tmp"
_BACKLOG = 128
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
    """What PID 1 needs from outside: descriptors of detached mounts, of the pause program and of the channel.

    `worktree` are mounts and their places, the root first; `joins` is for `provisions.take_place`.
    """

    channel: socket.socket
    joins: list[int]
    worktree: list[tuple[int, str]]
    sysfs: int
    pause: int


def run(spec: SandboxSpec, rung: Rung, inside: Inside) -> NoReturn:
    """Become PID 1 of the episode; answer over the channel with named descriptors, or with an error.

    The answer is `ok` and the descriptors' names: `proc`, the episode's own; `user`, the agents' namespace, where the
    rung has those; `listener`, a socket for the proxy's connections, where the spec wants one.
    """
    try:
        settings = _become_first(inside, rung)
        listener = _set_up_network(spec.network, settings)
        _mount_everything(spec, rung, inside)
        handed_out = {"proc": os.open(STAGE + "/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)}
        if listener is not None:
            handed_out["listener"] = listener
        _cap_processes(spec)
        if rung.user_namespaces:
            handed_out["user"] = _user_namespace_of_agents(rung)
        _enter_root()
        socket.send_fds(inside.channel, [" ".join(["ok", *handed_out]).encode()], list(handed_out.values()))
        os.execve(inside.pause, ["init"], {})
    except BaseException as error:
        with contextlib.suppress(BaseException):
            inside.channel.send(f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        # Whatever happened: a fork must never go on as a second spawner.
        os._exit(1)


def _become_first(inside: Inside, rung: Rung) -> dict[str, Any]:
    """Answers with what the spawner decided of our network."""
    provisions.take_place(inside.joins, ())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.setsid()
    # Before the ids change: /proc/self belongs to real root afterwards.
    prefer_for_oom_killer()
    go = inside.channel.recv(1 << 16)
    if not go:
        os._exit(1)
    userns.become_root(supplementary_groups=rung.has_id_range)
    # After the ids change, which clears it.
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    return decode(go)


def _set_up_network(network: Network, settings: dict[str, Any]) -> int | None:
    """Answers with a listening socket, if a proxy outside is to accept from it.

    A socket belongs to the network that it was made in, whoever accepts from it: so the proxy needs no process here.
    """
    if network is Network.HOST:
        return None
    egress.configure_inside(settings)
    if network is not Network.PROXY:
        return None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(("127.0.0.1", PROXY_PORT))
    listener.listen(_BACKLOG)
    return listener.detach()


def prefer_for_oom_killer() -> None:
    """An episode is the first thing that the kernel's OOM killer takes, so that it never takes the trainer."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"1000")
    os.close(fd)


def _mount_everything(spec: SandboxSpec, rung: Rung, inside: Inside) -> None:
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    for fd, place in inside.worktree:
        sc.move_mount(fd, STAGE + place)
    _mount_sysfs(spec, inside.sysfs)
    mounts.apply(mounts.sandbox_plan(rung, spec), STAGE)


def _mount_sysfs(spec: SandboxSpec, of_host: int) -> None:
    """A fresh one shows the interfaces of our own network; where /sys is masked there is only the host's."""
    if spec.network is not Network.HOST:
        with contextlib.suppress(OSError):
            flags = sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC
            sc.mount("sysfs", STAGE + "/sys", "sysfs", flags)
            return
    sc.move_mount(of_host, STAGE + "/sys")


def _cap_processes(spec: SandboxSpec) -> None:
    """Set before the agents' user namespace exists, it caps all of the episode's users together."""
    most = spec.limits.processes_max
    if most is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _user_namespace_of_agents(rung: Rung) -> int:
    """Make the agents' user namespace below the episode's own, and open it.

    The process that makes it exits at once: nothing of the agents' is left running.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _make_user_namespace(theirs)
    theirs.close()
    answer = ours.recv(4000).decode()
    if answer != "ready":
        raise OSError(answer)
    userns.write_maps(STAGE + "/proc", pid, rung.inner_map_line)
    agents = os.open(f"{STAGE}/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    ours.close()
    # Its end is awaited, or it would be among the episode's processes for a moment; ignored, it leaves no zombie.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return agents


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
