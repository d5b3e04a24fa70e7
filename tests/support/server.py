"""A real server process on a free port, and what must be true of it when nothing runs in it."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tbench2_env import Tbench2Env

#: The server itself has three helpers: spawner, launcher and warden.
HELPERS = 3
_START_TIMEOUT_S = 30.0
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

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._argv, "--port", str(self.port)], env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        eventually(self._healthy, _START_TIMEOUT_S)
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
        """Every process below the server, zombies too: pid -> command line."""
        return descendants(self.pid)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def worktrees(self) -> list[str]:
        """Folders of episodes, live or in the trash."""
        return [str(path) for kind in ("episodes", "trash") for path in self.scratch.glob(f"tbench2-*/{kind}/*")]

    def rss_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def assert_idle(self, within_s: float = 3.0) -> None:
        """No process, worktree or mount of an episode is left."""
        eventually(
            lambda: len(self.descendants()) == HELPERS, within_s, lambda: f"processes left: {self.descendants()}"
        )
        eventually(lambda: not self.worktrees(), within_s, lambda: f"worktrees left: {self.worktrees()}")
        assert str(self.scratch) not in Path("/proc/self/mountinfo").read_text(), "a mount leaked into the host"


def descendants(root: int) -> dict[int, str]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found: set[int] = set()
    while fresh := {pid for pid, parent in parents.items() if parent in found | {root}} - found:
        found |= fresh
    return {pid: _command_line(pid) for pid in found}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "?"


def eventually(true: Callable[[], bool], within_s: float, why: Callable[[], str] = lambda: "not in time") -> None:
    """Wait until `true()`; fail with `why()` if that takes longer than `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
