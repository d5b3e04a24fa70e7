"""A real server process on a free port, and what must be true of it when nothing runs in it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tbench2_env import Tbench2Env

#: The server itself has three helpers: spawner, launcher and warden.
HELPERS = 3
#: The egress proxy, started for the first episode that needs it.
PROXY = "tbench2_env.server.proxy_main"
DESCRIPTOR_SLACK = 10
#: Gradio alone takes 5 s to import on a quiet machine, and took 30 s on a busy one.
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


class Server:
    """`python -m tbench2_env.server.app`, with a secret in its environment that no episode may ever see."""

    SECRET = "zzzSECRETzzz"

    def __init__(self, folder: Path, tasks: Path, env: Mapping[str, str] = {}, wrap: Sequence[str] = ()) -> None:
        self.folder, self.tasks = folder, tasks
        self.scratch, self.runs = folder / "scratch", folder / "runs"
        self.port = free_port()
        self.log = folder / "server.log"
        self._argv = [*wrap, sys.executable, "-m", "tbench2_env.server.app", "--host", "127.0.0.1"]
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/root"),
            "HF_TOKEN": self.SECRET,
            "TB2_TASKS_DIR": str(tasks),
            "TB2_OUTPUT_DIR": str(self.runs),
            "TB2_SCRATCH_DIR": str(self.scratch),
            "TB2_REGISTRY": "none",  # no test asks a registry of the internet
            "MAX_CONCURRENT_ENVS": "64",
            **env,
        }
        self.process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._argv, "--port", str(self.port)], env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def start(self) -> Self:
        self.launch()
        try:
            eventually(self._healthy, _START_TIMEOUT_S)
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def _healthy(self) -> bool:
        assert self.process.poll() is None, f"the server exited: {self.log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server and wait for it; answers with its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(_STOP_TIMEOUT_S)

    def client(self, message_timeout_s: float = 60.0) -> Tbench2Env:
        return Tbench2Env(self.url, message_timeout_s=message_timeout_s)

    # ------------------------------------------------------------ what is left
    def descendants(self) -> dict[int, str]:
        """Every process below the server, zombies too: pid -> command line. But for its proxy, which the first episode
        that has no other way out starts for all."""
        return {pid: line for pid, line in descendants(self.pid).items() if "server.proxy_main" not in line}

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def worktrees(self) -> list[str]:
        """Folders of episodes, live or in the trash."""
        return [str(path) for kind in ("episodes", "trash") for path in self.scratch.glob(f"tbench2-*/{kind}/*")]

    def warm(self) -> int:
        """Sandboxes that it keeps ready for resets to come."""
        headers = {"authorization": f"Bearer {self._env.get('TB2_AUTH_TOKEN')}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/metrics", headers=headers)) as response:
            lines = response.read().decode().splitlines()
        return next(int(float(line.split()[1])) for line in lines if line.startswith("tbench2_warm "))

    def rss_bytes(self) -> int:
        return rss_bytes(self.pid)

    def assert_idle(self, within_s: float = 3.0) -> None:
        """No process, worktree or mount of an episode is left. The egress proxy stays for the next, and for half a
        second warm sandboxes: a process and a worktree each."""

        def left() -> list[str]:
            return [line for line in self.descendants().values() if PROXY not in line]

        def only_warm(count: int) -> bool:
            return count == 0 or count == self.warm()

        eventually(lambda: only_warm(len(left()) - HELPERS), within_s, lambda: f"processes left: {left()}")
        eventually(lambda: only_warm(len(self.worktrees())), within_s, lambda: f"worktrees left: {self.worktrees()}")
        assert str(self.scratch) not in Path("/proc/self/mountinfo").read_text(), "a mount leaked into the host"


def rungs_under_test() -> list[str]:
    """Rungs of the isolation ladder to try: TB2_TEST_RUNGS=1,2,4, or the best one here."""
    return os.environ.get("TB2_TEST_RUNGS", "auto").split(",")


#: The fixture `make_server`.
MakeServer = Callable[..., Server]


@contextlib.contextmanager
def idle_again(server: Server) -> Iterator[None]:
    """For one test of a shared server: it must be as idle after it as before."""
    before = server.descriptors()
    yield
    try:
        server.assert_idle()
        # A warm sandbox has one of the server's, where the proxy is the way out.
        eventually(lambda: server.descriptors() <= before + DESCRIPTOR_SLACK, 3.0)
    except (AssertionError, OSError):
        # What one test has left is not to be held against the others.
        server.stop(signal.SIGKILL)
        server.start()
        raise


def rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def descendants(root: int) -> dict[int, str]:
    parents = {pid: parent for pid in processes() if (parent := _parent(pid)) is not None}
    found: set[int] = set()
    while fresh := {pid for pid, parent in parents.items() if parent in found | {root}} - found:
        found |= fresh
    return {pid: command_line(pid) for pid in found}


# Tests ask this many times a second, of a host with many processes: hence `os`, which is five times as fast here.
def processes() -> list[int]:
    """Every process of the host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return int(file.read(1024).rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None


def command_line(pid: int) -> str:
    """The arguments, each with a space after it; '?' when the process is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "?"


def eventually(true: Callable[[], bool], within_s: float, why: Callable[[], str] = lambda: "not in time") -> None:
    """Wait until `true()`; fail with `why()` if that takes longer than `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else gets while the tests run, neither by asking for any nor for an outgoing connection.

    A socket that is bound to it but does not listen reserves it; a server that reuses addresses can still have it.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _reserved.append(sock)
    return int(sock.getsockname()[1])
