"""Starting processes that carry out programs, from a helper that neither waits for them nor lends them its memory.

A child shares the helper's memory (CLONE_VM) for two microseconds' worth of steps: it lets go of close-on-exec for what
it passes on and executes its program. Unlike a vfork, the helper runs on meanwhile, for an agent may be able to stop
the child there; and once the child is where the episode's memory limit holds, it shares memory with nobody, or that
limit's OOM killer would take the helper along.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.machine import STEP_WORDS, this
from tbench2_env.isolation.program import NOT_STARTED, REPORT_MAX, SPARE_FDS, Program, executable

#: The helpers keep their own descriptors at or above this, so that a command's can take the low numbers.
FIRST_PRIVATE_FD = 64

_CLONE_PARENT_SETTID = 0x10_0000  # linux/sched.h
_MFD_EXEC = 0x10  # linux/memfd.h
_SIG_SETMASK, SIGSET_BYTES = 2, 8  # of the kernel
#: Memory for the steps of a child that still has ours, at most, with each descriptor's step, and, before them, for the
#: number of one that is started aside.
_FIRST_BYTES, _STEP_BYTES, _PID_BYTES = 1024, 8 * (STEP_WORDS + 1), 8


class Room:
    """Memory for the first steps of a child, which must stay as it is until that has ended, and then is another's."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(0)
        self._wanted: tuple[int, Sequence[int], int] | None = None
        self.first: Program

    def lay_out(self, file: int, passed: Sequence[int], aside_into: int) -> Program:
        """The first steps; most are those of the child before."""
        if self._wanted != (file, passed, aside_into):
            self._wanted = file, passed, aside_into
            if (size := _FIRST_BYTES + _STEP_BYTES * len(passed)) > len(self.memory):
                self.memory = ctypes.create_string_buffer(size)
            self.first = _first_steps(ctypes.addressof(self.memory), file, passed, aside_into)
        return self.first


@dataclass(frozen=True)
class Started:
    """A process that was started; `Starter.ended` is to be told of its end."""

    pid: int
    number: int
    program: Program
    room: Room


class Starter:
    """What a helper starts programs with, made while it has few descriptors. Raises: OSError on a machine or host that
    cannot.
    """

    def __init__(self) -> None:
        self._machine = this()
        self.numbers = self._machine.numbers
        code = _executable_memory(self._machine.start + self._machine.loop)
        words = (ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._clone = ctypes.PYFUNCTYPE(ctypes.c_long, *words)(code)
        self._number = 0
        self._rooms: list[Room] = []
        self._reports: dict[int, bytes] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening, self._report_to = (move_up(end.detach()) for end in (ours, theirs))
        for fd in (self._listening, self._report_to):
            os.set_blocking(fd, False)
        for fd in SPARE_FDS:  # held, so that the helper is given them for nothing else
            os.dup2(self._listening, fd, inheritable=False)

    def start(self, program: Program, passed: Sequence[int], aside_into: int = -1) -> Started:
        """Start a process with the descriptors `passed`, where our children go, or in the PID namespace `aside_into`:
        it is our child all the same. Raises: OSError, ValueError for a program that is too long."""
        self._number += 2
        file = self.executable(program, self._report_to, self._number)
        try:
            started = self._start(program, file, passed, aside_into)
        finally:
            os.close(file)
        if aside_into < 0:
            return started
        _, status = os.waitpid(started.pid, 0)
        aside = replace(started, pid=struct.unpack_from("<i", started.room.memory)[0])
        if aside.pid == 0:
            raise self.ended(started, os.waitstatus_to_exitcode(status)) or OSError("the intermediate process died")
        return aside

    def _start(self, program: Program, file: int, passed: Sequence[int], aside_into: int) -> Started:
        room = self._rooms.pop() if self._rooms else Room()
        first = room.lay_out(file, [*passed, self._report_to], aside_into)
        image, first_step = first.image(self.numbers, self._report_to, self._number + 1)
        assert _PID_BYTES + len(image) <= len(room.memory)
        ctypes.memset(room.memory, 0, _PID_BYTES)
        ctypes.memmove(ctypes.addressof(room.memory) + _PID_BYTES, image, len(image))
        return Started(self.clone(0, first_step), self._number, program, room)

    def clone(self, flags: int, first_step: int, pidfd: int | None = None) -> int:
        """A child that goes on with the steps in our memory; with CLONE_PIDFD, the address for it. Raises: OSError."""
        with sc.signals_blocked():  # a handler of ours would take the child, which has our memory, for us
            pid = int(self._clone(flags | sc.CLONE_VM | signal.SIGCHLD, None, pidfd, None, first_step))
        return sc.cloned(pid, flags)

    def executable(self, program: Program, report_to: int, number: int) -> int:
        """A descriptor of the program as a file that can be executed."""
        image, first_step = program.image(self.numbers, report_to, number)
        return _executable_file(executable(self._machine, image, first_step))

    def ended(self, started: Started, status: int) -> OSError | None:
        """Why the process that ended with `status` came to nothing; None if its program was carried out."""
        assert started.room not in self._rooms, "it has ended already, and another may be in its room"
        self._rooms.append(started.room)
        if status != NOT_STARTED:
            return None
        with contextlib.suppress(BlockingIOError):
            while report := os.read(self._listening, REPORT_MAX):
                self._reports[struct.unpack_from("<Q", report)[0]] = report
        for program, number in ((started.program, started.number), (started.room.first, started.number + 1)):
            if number in self._reports:
                return program.explain(self._reports.pop(number))
        return None


def unblock_signals(program: Program) -> None:
    """Children begin with all signals blocked: what they become is not to."""
    program.call("rt_sigprocmask", _SIG_SETMASK, program.data(bytes(SIGSET_BYTES)), 0, SIGSET_BYTES)


def execute(program: Program, file: int, name: bytes) -> None:
    """Go on as the program in the descriptor `file`. With a name: the kernel logs of programs that have none."""
    empty, arguments, environment = program.text(b""), program.vector([name]), program.vector([])
    program.call("execveat", file, empty, arguments, environment, sc.AT_EMPTY_PATH)


def _first_steps(address: int, file: int, passed: Sequence[int], aside_into: int) -> Program:
    program = Program(address + _PID_BYTES)
    if aside_into >= 0:
        program.call("setns", aside_into, sc.CLONE_NEWPID)
        # With us for its parent; the kernel puts its number, as we see it, at `address`.
        flags = sc.CLONE_VM | sc.CLONE_PARENT | _CLONE_PARENT_SETTID | signal.SIGCHLD
        aside = program.call("clone", flags, 0, address)
        program.call("exit_group", 0)
        aside.zero = program.here()
    for fd in passed:
        program.call("fcntl", fd, fcntl.F_SETFD, 0)
    execute(program, file, b"start")
    return program


def move_up(fd: int) -> int:
    """The descriptor out of the low numbers that commands take."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_PRIVATE_FD)
    os.close(fd)
    return high


def move_all_up(fds: list[int]) -> None:
    for index, fd in enumerate(fds):
        fds[index] = move_up(fd)


def _memory_file(name: str) -> int:
    """That may be executed, also where the sysctl vm.memfd_noexec is 1."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC)  # before Linux 6.3


def _executable_file(content: bytes) -> int:
    """In memory, open for reading: a file that is open for writing cannot be executed (ETXTBSY)."""
    fd = _memory_file("start")
    try:
        os.write(fd, content)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _executable_memory(code: bytes) -> int:
    """Its address. Mapped from a file: memory that was ever writable may be refused (SELinux, execmem)."""
    fd = _memory_file("code")
    try:
        os.write(fd, code)
        return sc.map_code(fd, len(code))
    finally:
        os.close(fd)
