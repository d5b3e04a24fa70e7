"""The last steps of a forked child before it becomes a command: descriptors, terminal, folder, exec."""

import contextlib
import fcntl
import os
import socket
import termios
from collections.abc import Callable
from typing import NoReturn

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import CommandSpec

#: Exit status of a child that could not become its command; the reason travels by message.
NOT_STARTED = 125
#: The helpers keep their own descriptors at or above this, so that a command's can take the low numbers.
FIRST_PRIVATE_FD = 64

# asm-generic/ioctls.h; the second opens the other end of a pty whatever /dev/pts shows.
_TIOCSPTLCK, _TIOCGPTPEER = 0x4004_5431, 0x5441


def become(command: CommandSpec, fds: list[int], enter: Callable[[], None], report: Callable[[str], None]) -> NoReturn:
    """Run `enter` (joining namespaces), then exec the command; on failure `report` the reason and exit.

    `fds` become the command's 0, 1, 2, 3, ...; with `command.tty`, the first is a socket on which the new terminal's
    master is sent, and the others become 3, 4, ...
    """
    try:
        sc.leave_session_keyring()
        # Orphans of the command stay below it while it lives, so that a timeout finds its whole tree.
        sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_PRIVATE_FD) for fd in fds]
        enter()
        os.setsid()
        if command.tty:
            parked = [*_open_terminal(parked[0]), *parked[1:]]
        for number, fd in enumerate(parked):
            os.dup2(fd, number)
        _change_folder(command.cwd)
        os.umask(0o022)
        os.execve(command.path, command.argv, command.env)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            report(f"{command.path}: {_explain(error)}")
    finally:
        # Whatever happened: a fork must never go on as a second launcher or spawner.
        os._exit(NOT_STARTED)


def _explain(error: BaseException) -> str:
    if isinstance(error, BlockingIOError):  # EAGAIN, which execve(2) gives for nothing else
        return "the episode has reached its limit of processes: nothing can be started before some of them end"
    return str(error)


def _open_terminal(reply_fd: int) -> list[int]:
    """A pty of the episode's own /dev/pts as controlling terminal; its master goes to whoever holds the socket."""
    # O_NONBLOCK: an agent may have put a FIFO in its place.
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(master, _TIOCSPTLCK, b"\0\0\0\0")
    slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    with socket.socket(fileno=os.dup(reply_fd)) as reply:
        socket.send_fds(reply, [b"tty"], [master])
    return [slave, slave, slave]


def _change_folder(path: str) -> None:
    """The working directory is made again if the agent removed it; in a hopeless case the command starts in /."""
    try:
        os.makedirs(path, exist_ok=True)
        os.chdir(path)
    except OSError:
        os.chdir("/")
