"""PID 1 of an episode: a program of system calls that makes the namespaces' inside, hands out descriptors of it, and
sleeps for ever.

No interpreter runs in it: it is an executable of a few KiB that episodes alike share. Zombies need no code, since
children of a process that ignores SIGCHLD are reaped by the kernel.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tbench2_env.isolation import capabilities as cap
from tbench2_env.isolation import egress, entering, mounts
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.machine import STEP_WORDS
from tbench2_env.isolation.program import Label, Program, Step
from tbench2_env.isolation.spec import HOSTNAME, PROXY_PORT, Network, Rung, SandboxSpec
from tbench2_env.isolation.start import (
    FIRST_PRIVATE_FD,
    SIGSET_BYTES,
    Starter,
    execute,
    move_up,
    unblock_signals,
)  # fmt: skip

#: Its first word.
READY = b"ready"
#: Where the worktree is mounted until it becomes the root. /tmp exists everywhere, and the 0700 scratch folder would
#: be EACCES for the episode's root.
STAGE = "/tmp"
#: Descriptors of PID 1: its channel, from `_PASSED` on what else it is given, a listening socket,
#: its /proc, the agents' user namespace.
_CHANNEL, _PASSED, _LISTENER, _PROC, _AGENTS = 3, 4, 58, 59, 60
#: The number of whoever makes the agents' user namespace: the first process after PID 1 (pid_namespaces(7)).
_SECOND = 2
_BACKLOG = 128
_MADV_DONTNEED = 4  # asm-generic/mman-common.h
_SIG_IGN = 1  # asm-generic/signal-defs.h
#: A multiple of every machine's pages, with room for the program's data.
_PAGES = 0x1_0000
#: Memory for its steps before it has its own.
_FIRST_BYTES = 16 << 10
#: What its program needs over its own namespaces; the last is asked of who maps root (user_namespaces(7)).
_CAPABILITIES = frozenset({cap.DAC_OVERRIDE, cap.SETGID, cap.SETUID, cap.NET_ADMIN, cap.SYS_ADMIN, cap.SETFCAP})
#: Numbers of the programs in reports: what it carries out in our memory, and its own.
_FIRST, _OWN = 1, 2
#: Executables that are kept; there are as many kinds of episodes as tasks have limits.
_KINDS_MAX = 32


@dataclass(frozen=True)
class Kind:
    """What the program of PID 1 depends on, but for the rung. `places` are those of the worktree's mounts."""

    network: Network
    unreachable: tuple[str, ...]
    shm_bytes: int
    processes_max: int | None
    places: tuple[str, ...]
    joins: int

    @property
    def given(self) -> int:
        """How many descriptors: the channel, the joins, the host's /sys, the worktree's mounts."""
        return 2 + self.joins + len(self.places)


@dataclass(frozen=True)
class Inside:
    """What PID 1 needs from outside: its channel, the cgroup's `joins`, detached mounts of worktree and host's /sys.

    `channel` is a number that `start.move_up` made. `worktree` are mounts and their places, the root first.
    """

    channel: int
    joins: list[int]
    worktree: list[tuple[int, str]]
    sysfs: int

    @property
    def fds(self) -> list[int]:
        """In the order of their numbers in PID 1."""
        return [self.channel, *self.joins, self.sysfs, *(fd for fd, _ in self.worktree)]


def prefer_for_oom_killer() -> None:
    """An episode is the first thing that the kernel's OOM killer takes, so that it never takes the trainer."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"1000")
    os.close(fd)


class Inits:
    """Starts the first processes of episodes. Raises: OSError on a machine or host that cannot."""

    def __init__(self, rung: Rung) -> None:
        self._rung, self._starter = rung, Starter()
        self._made: dict[Kind, _Made] = {}

    def start(
        self, flags: int, spec: SandboxSpec, unreachable: tuple[str, ...], inside: Inside
    ) -> tuple[int, int, Program]:
        """Clone it into new namespaces: its pid, its pidfd, and what its answer is understood with.

        It says on its channel that it is `READY`, waits for a byte there, and answers with `ok` and the names of the
        descriptors that come along, or with what `why_not` understands. Raises: OSError.

        Until it is ready it may have our memory, and nobody can stop it there: that is to be waited for in any case.
        Only then are its /proc files those of its user: in the middle of an exec they are real root's.
        """
        kind = Kind(
            spec.network, unreachable, mounts.shm_bytes(spec.limits), spec.limits.processes_max,
            tuple(place for _, place in inside.worktree), len(inside.joins),
        )  # fmt: skip
        made = self._made.get(kind) or self._make(kind)
        made.first.give([*inside.fds, inside.channel])
        pidfd = ctypes.c_int(-1)
        pid = self._starter.clone(flags | sc.CLONE_PIDFD, made.first.step, ctypes.addressof(pidfd))
        return pid, pidfd.value, made.program

    def _make(self, kind: Kind) -> "_Made":
        if len(self._made) >= _KINDS_MAX:
            for made in self._made.values():
                os.close(made.file)
            self._made.clear()
        program = _program(kind, self._rung)
        file = move_up(self._starter.executable(program, _CHANNEL, _OWN))
        made = self._made[kind] = _Made(file, program, _FirstSteps(file, kind, self._rung, self._starter.numbers))
        return made


class _FirstSteps:
    """What PID 1 does in our memory: it takes what it is given, out of each other's way first, from `_CHANNEL` on, and
    executes the program in `file`. Laid out once; for each PID 1 only the numbers of what is given are put in.
    """

    def __init__(self, file: int, kind: Kind, rung: Rung, numbers: dict[str, int]) -> None:
        self._memory = ctypes.create_string_buffer(_FIRST_BYTES)
        address = ctypes.addressof(self._memory)
        program = Program(address)
        given = [program.call("fcntl", 0, fcntl.F_DUPFD_CLOEXEC, FIRST_PRIVATE_FD) for _ in range(kind.given)]
        for number, moved in enumerate(given, _CHANNEL):
            moved.into = program.here()
            program.call("dup3", 0, number, 0)
        if rung.user_namespaces:
            # Nobody yet in its user namespace, it would lose all of them.
            entering.keep_capabilities(program, _CAPABILITIES)
        execute(program, file, b"init")
        image, self.step = program.image(numbers, _CHANNEL, _FIRST)
        assert len(image) <= _FIRST_BYTES, "there are a dozen mounts at most, and as many hierarchies of cgroups"
        ctypes.memmove(address, image, len(image))
        # The first argument of each of the first steps, and of the one that reports a failure, the last but one.
        indexes = [*range(kind.given), len(program.steps)]
        self._places = [self.step - address + 8 * (STEP_WORDS * index + 1) for index in indexes]

    def give(self, fds: Sequence[int]) -> None:
        """The descriptors, and where a failure is reported."""
        for place, fd in zip(self._places, fds, strict=True):
            struct.pack_into("<Q", self._memory, place, fd)


@dataclass(frozen=True)
class _Made:
    """What the PID 1 of one kind of episodes is made with."""

    file: int
    program: Program
    first: _FirstSteps


def why_not(program: Program, answer: bytes) -> OSError:
    """Why PID 1 came to nothing, by its answer."""
    step = program.failed(answer) if answer[:8] == _OWN.to_bytes(8, "little") else None
    if step is None:
        return OSError("PID 1 could not execute its program" if answer else "PID 1 died")
    number, what = step
    topic = "mount proc" if what.startswith("mount(proc, ") else what.partition("(")[0]
    return OSError(number, f"{what}: {os.strerror(number)}{sc.advice(topic, number)}")


# ---------------------------------------------------------------- the program
def _program(kind: Kind, rung: Rung) -> Program:
    program = Program()
    unblock_signals(program)
    program.call("write", _CHANNEL, program.data(READY), len(READY))
    go = program.call("read", _CHANNEL, program.data(bytes(8)), 1)
    _become_first(program, kind, rung)
    _set_up_network(program, kind)
    _mount_everything(program, kind, rung)
    path, flags = program.text(f"{STAGE}/proc".encode()), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    program.keep(_PROC, program.call("openat", sc.AT_FDCWD, path, flags, what=f"open({STAGE}/proc)"))
    if kind.processes_max is not None:
        # Set before the agents' user namespace exists, it caps all of the episode's users together.
        limit = program.data(struct.pack("2Q", kind.processes_max, kind.processes_max))
        program.call("prlimit64", 0, resource.RLIMIT_NPROC, limit, 0, what="setrlimit(RLIMIT_NPROC)")
    makes = _user_namespace_of_agents(program, rung) if rung.user_namespaces else None
    _enter_root(program)
    handed_out = {"proc": _PROC}
    if kind.network is Network.PROXY:
        handed_out["listener"] = _LISTENER
    if makes is not None:
        handed_out["user"] = _AGENTS
    answer = " ".join(["ok", *handed_out]).encode()
    message = sc.message_with_descriptors(program.data, answer, list(handed_out.values()))
    program.call("sendmsg", _CHANNEL, message, socket.MSG_NOSIGNAL)
    sleep = _sleep(program)
    if makes is not None:
        makes.zero = sleep
    go.zero = program.here()
    program.call("exit_group", 0)
    return program


def _become_first(program: Program, kind: Kind, rung: Rung) -> None:
    entering.take_place(program, range(_PASSED, _PASSED + kind.joins), (), 0)
    ignore = program.data(struct.pack("4Q", _SIG_IGN, 0, 0, 0))  # struct sigaction of the kernel
    program.call("rt_sigaction", signal.SIGCHLD, ignore, 0, SIGSET_BYTES)
    program.call("setsid")
    # Before the ids change: /proc/self belongs to real root afterwards.
    entering.prefer_for_oom_killer(program)
    entering.become(program, 0, 0, () if rung.has_id_range else None)
    # After the ids change, which clears it.
    program.call("prctl", sc.PR_SET_PDEATHSIG, signal.SIGKILL)


def _set_up_network(program: Program, kind: Kind) -> None:
    if kind.network is not Network.HOST:
        egress.inside(kind.unreachable).add(program)
    if kind.network is Network.PROXY:
        _listen(program)


def _listen(program: Program) -> None:
    """For a proxy outside to accept from.

    A socket belongs to the network that it was made in, whoever accepts from it: so the proxy needs no process here.
    """
    program.keep(_LISTENER, program.call("socket", socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0))
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", PROXY_PORT, socket.inet_aton("127.0.0.1"))
    program.call("bind", _LISTENER, program.data(address), len(address), what=f"bind(127.0.0.1:{PROXY_PORT})")
    program.call("listen", _LISTENER, _BACKLOG)


def _mount_everything(program: Program, kind: Kind, rung: Rung) -> None:
    sysfs = _PASSED + kind.joins
    mounts.mount(program, "", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    for fd, place in enumerate(kind.places, sysfs + 1):
        entering.attach(program, fd, STAGE + place)
    if kind.network is Network.HOST:
        entering.attach(program, sysfs, STAGE + "/sys")
    else:
        # A fresh one shows the interfaces of our own network; where /sys is masked there is only the host's.
        flags = sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC
        fresh = mounts.mount(program, "sysfs", STAGE + "/sys", "sysfs", flags)
        fresh.error = program.here()
        entering.attach(program, sysfs, STAGE + "/sys")
        fresh.then = program.here()
    mounts.apply(program, mounts.sandbox_plan(rung, kind.shm_bytes, host_network=kind.network is Network.HOST), STAGE)


def _user_namespace_of_agents(program: Program, rung: Rung) -> Step:
    """Make the agents' user namespace below the episode's own, and open it. Answers with the step that makes it.

    The process that makes it ends at once: nothing of the agents' is left running.
    """
    # The change of ids took that away, and the /proc files of both would belong to real root.
    program.call("prctl", sc.PR_SET_DUMPABLE, 1)
    makes = program.call("clone", sc.CLONE_VM | sc.CLONE_NEWUSER | signal.SIGCHLD, 0, what="new user namespace")
    second = f"{STAGE}/proc/{_SECOND}"
    for name in ("uid_map", "gid_map"):
        program.write_file(f"{second}/{name}", rung.inner_map_line)
    path = program.text(f"{second}/ns/user".encode())
    opened = program.call("openat", sc.AT_FDCWD, path, os.O_RDONLY | os.O_CLOEXEC, what=f"open({second}/ns/user)")
    program.keep(_AGENTS, opened)
    program.call("kill", _SECOND, signal.SIGKILL)
    # Its end is awaited, or it would be among the episode's processes for a moment; ignored, it leaves no zombie.
    program.call("wait4", _SECOND, 0, 0, 0, optional=True)
    return makes


def _enter_root(program: Program) -> None:
    here, name = program.text(b"."), HOSTNAME.encode()
    program.call("chdir", program.text(STAGE.encode()), what=f"chdir({STAGE})")
    program.call("pivot_root", here, here, what="pivot_root(., .)")
    program.call("umount2", here, sc.MNT_DETACH, what="umount2(.)")
    program.call("chdir", program.text(b"/"), what="chdir(/)")
    program.call("sethostname", program.data(name), len(name))


def _sleep(program: Program) -> Label:
    """Let go of what it was given and of the pages that it wrote to, and sleep for ever."""
    program.call("close_range", _CHANNEL, 0xFFFF_FFFF, 0)
    start = program.base & -_PAGES
    program.call("madvise", start, _PAGES, _MADV_DONTNEED, optional=True)  # ENOMEM: there is not as much
    label = program.here()
    sleep = program.call("ppoll", 0, 0, 0, 0)
    sleep.then = sleep.zero = sleep.error = label
    return label
