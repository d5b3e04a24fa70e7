"""A command's program: after it has taken its place, its descriptors, terminal and folder, then exec."""

import errno
import os
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.program import SPARE_FDS, Program
from tbench2_env.isolation.reactor import End
from tbench2_env.isolation.spec import CommandSpec
from tbench2_env.isolation.start import Started, Starter, unblock_signals

# asm-generic/ioctls.h; the second opens the other end of a pty whatever /dev/pts shows.
_TIOCSPTLCK, _TIOCGPTPEER = 0x4004_5431, 0x5441
_CLOSE_RANGE_CLOEXEC = 4  # linux/close_range.h
#: Where a terminal's two ends are for a moment.
_MASTER, _SLAVE = SPARE_FDS[1:]


@dataclass(frozen=True)
class Running:
    """A command that was started at somebody's request."""

    request: int
    command: CommandSpec
    started: Started

    def news(self, starter: Starter, end: End) -> dict[str, Any]:
        """The event of its end, also if it never began."""
        failure = starter.ended(self.started, end.status)
        if failure is None:
            return {"event": "exit", "id": self.request, **end.to_dict()}
        return {"event": "failed", "id": self.request, "error": f"{self.command.path}: {_explain(failure)}"}


def _explain(failure: OSError) -> str:
    if failure.errno == errno.EAGAIN:  # which execve(2) gives for nothing else
        return "the episode has reached its limit of processes: nothing can be started before some of them end"
    return failure.strerror or str(failure)


def program(command: CommandSpec, fds: Sequence[int], enter: Callable[[Program], None]) -> Program:
    """`enter` adds the steps that join namespaces. `fds`, numbers that `start.move_up` made, become the command's
    0, 1, 2, 3, ...; with `command.tty`, the first is a socket on which the new terminal's master is sent, and the
    others become 3, 4, ... Raises: ValueError for what execve cannot take.
    """
    made = Program()
    # Another process of the episode must not look into one that still has descriptors of ours.
    made.call("prctl", sc.PR_SET_DUMPABLE, 0)
    # Keyrings are inherited; see `syscalls.leave_session_keyring`, also for why it may fail.
    made.call("keyctl", sc.KEYCTL_JOIN_SESSION_KEYRING, 0, optional=True)
    # Orphans of the command stay below it while it lives, so that a timeout finds its whole tree.
    made.call("prctl", sc.PR_SET_CHILD_SUBREAPER, 1)
    made.call("setsid")
    enter(made)
    if command.tty:
        _open_terminal(made, fds[0])
        fds = [_SLAVE, _SLAVE, _SLAVE, *fds[1:]]
    for number, fd in enumerate(fds):
        made.call("dup3", fd, number, 0)
    made.call("umask", 0o022)
    _change_folder(made, command.cwd.encode(errors="surrogateescape"))
    made.call("close_range", len(fds), 0xFFFF_FFFF, _CLOSE_RANGE_CLOEXEC)
    unblock_signals(made)
    if any("=" in name for name in command.env):
        raise ValueError("illegal environment variable name")
    environment = [f"{name}={value}" for name, value in command.env.items()]
    path, argv, envp = (_encode(texts) for texts in ([command.path], command.argv, environment))
    made.call("execve", made.text(path[0]), made.vector(argv), made.vector(envp))
    return made


def _encode(texts: Sequence[str]) -> list[bytes]:
    return [text.encode("utf-8", errors="surrogateescape") for text in texts]


def _open_terminal(made: Program, reply: int) -> None:
    """A pty of the episode's own /dev/pts as controlling terminal; its master goes to whoever holds the socket."""
    # O_NONBLOCK: an agent may have put a FIFO in its place.
    flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
    made.keep(_MASTER, made.call("openat", sc.AT_FDCWD, made.text(b"/dev/ptmx"), flags, what="/dev/ptmx"))
    made.call("ioctl", _MASTER, _TIOCSPTLCK, made.data(bytes(4)), what="unlocking /dev/ptmx")
    peer = made.call("ioctl", _MASTER, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC, what="TIOCGPTPEER")
    made.keep(_SLAVE, peer)
    made.call("ioctl", _SLAVE, termios.TIOCSCTTY, 0, what="TIOCSCTTY")
    made.call("sendmsg", reply, sc.message_with_descriptors(made.data, b"tty", [_MASTER]), 0)


def _change_folder(made: Program, path: bytes) -> None:
    """The working directory is made again if the agent removed it; in a hopeless case the command starts in /."""
    there = made.call("chdir", made.text(path), optional=True)
    missing = made.here()
    parts = path.strip(b"/").split(b"/")
    for depth in range(1, len(parts) + 1):
        folder = b"/" + b"/".join(parts[:depth])
        made.call("mkdirat", sc.AT_FDCWD, made.text(folder), 0o777, optional=True)
    again = made.call("chdir", made.text(path), optional=True)
    again.error = made.here()
    made.call("chdir", made.text(b"/"))
    there.error, there.then = missing, made.here()
    again.then = there.then
