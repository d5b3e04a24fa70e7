"""The server under test: a process of any interpreter that has a tbench2_env, and the processes below it."""

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench import usage
from support.server import Server, descendants

_READY_TIMEOUT_S = 60.0
#: Between two questions whether the server is ready; also what that time is good to.
_POLL_S = 0.01
#: In the order in which they begin.
_HELPERS = ("spawner", "warden", "launcher")
_LEAN = "-I -S"


class BenchError(Exception):
    """Something did not run, or a verdict is wrong: the figures are worth nothing."""


@dataclass(frozen=True)
class Cpu:
    """Seconds by who used them: each process, and `... children` for what it has waited for."""

    seconds: Mapping[str, float]

    def since(self, earlier: "Cpu") -> dict[str, float]:
        return {who: spent - earlier.seconds.get(who, 0.0) for who, spent in self.seconds.items()}


class Subject(Server):
    """A server with `slots`, folders of its own, and the tasks of the bench."""

    def __init__(
        self,
        folder: Path,
        tasks: Path,
        env: Mapping[str, str] = {},
        *,
        python: str = sys.executable,
        upstream: bool = False,
    ) -> None:
        folder.mkdir()
        settings = {"TB2_COMMAND_TIMEOUT_S": "120", "TB2_MODE": "local", **env}
        super().__init__(folder, tasks, settings)
        self._argv = [python, "-m", "tbench2_env.server.app"] + ([] if upstream else ["--host", "127.0.0.1"])
        if upstream:  # its tests run the first python there is
            self._env["PATH"] = f"{Path(python).parent}:{self._env['PATH']}"
        self._ready_path = "/health" if upstream else "/ready"
        self.ready_s = 0.0

    def start(self) -> Self:
        begun = time.perf_counter()
        self.launch()
        while not self._answers():
            if time.perf_counter() - begun > _READY_TIMEOUT_S:
                raise BenchError(f"not ready in {_READY_TIMEOUT_S:g} s: {self.log.read_text()[-2000:]}")
            time.sleep(_POLL_S)
        self.ready_s = time.perf_counter() - begun
        return self

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise BenchError(f"the server exited: {self.log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(self.url + self._ready_path, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # ------------------------------------------------------------ its processes
    def family(self) -> dict[int, str]:
        """What is there whether or not episodes are: pid -> name."""
        below = descendants(self.pid)
        lean = sorted(pid for pid, line in below.items() if _LEAN in line)
        names = _HELPERS if len(lean) == len(_HELPERS) else [f"helper {number}" for number in range(len(lean))]
        proxy = {pid: "proxy" for pid, line in below.items() if "proxy_main" in line}
        return {self.pid: "server", **dict(zip(lean, names, strict=True)), **proxy}

    def episodes(self) -> list[int]:
        """Processes of episodes."""
        return [pid for pid in descendants(self.pid) if pid not in self.family()]

    def cpu(self) -> Cpu:
        seconds = {}
        for pid, name in self.family().items():
            seconds[name], seconds[f"{name} children"] = usage.cpu_s(pid)
        return Cpu(seconds)
