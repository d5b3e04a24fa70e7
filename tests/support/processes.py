"""A server's processes by role, as seen from the host."""

import contextlib
import os
import signal
from pathlib import Path

from support.server import PROXY, Server, command_line, eventually, processes


def running(server: Server, text: str) -> list[int]:
    """Processes below the server that have `text` in their command line."""
    return [pid for pid, line in server.descendants().items() if text in line]


def spawner(server: Server) -> int:
    """The helper that makes sandboxes: the server's only child but for the egress proxy."""
    (pid,) = [pid for pid in children(server.pid) if PROXY not in command_line(pid)]
    return pid


def launcher(server: Server) -> int:
    """The helper that starts commands: a fork of the spawner, in no namespace of an episode, born after the warden."""
    _, pid = [pid for pid in children(spawner(server)) if len(_numbers(pid)) == len(_numbers(server.pid))]
    return pid


def inits(server: Server) -> set[int]:
    """The first process of each sandbox."""
    depth = len(_numbers(server.pid))
    return {pid for pid in children(spawner(server)) if _numbers(pid)[depth:] == ["1"]}


def children(parent: int) -> list[int]:
    text = "".join(path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children"))
    return [int(pid) for pid in text.split()]


def kill_init(server: Server) -> None:
    """SIGKILL the first process of the only sandbox."""
    (pid,) = inits(server)
    os.kill(pid, signal.SIGKILL)


class Stopped:
    """`with Stopped(pid):` the process does nothing, as on a node that is overloaded."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: _state(self.pid) == "T", 5)

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            os.kill(self.pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of one that nobody has waited for yet."""
    with contextlib.suppress(OSError):
        return _state(pid) not in "ZX"
    return False


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _numbers(pid: int) -> list[str]:
    """The process id in each namespace that it has one in, outermost first; none when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return next(line.split()[1:] for line in lines if line.startswith("NSpid:"))


def matching(text: str) -> list[int]:
    """Processes of the whole host with `text` in their command line."""
    return [pid for pid in processes() if text in command_line(pid)]
