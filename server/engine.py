"""The isolation engine of a server: the spawner and the snapshots made on it, replaced when the spawner dies."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tbench2_env.isolation import probe, trial
from tbench2_env.isolation.sandbox import Spawner
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS
from tbench2_env.server.settings import Settings
from tbench2_env.server.snapshots import Ground, Snapshots

log = structlog.get_logger()

#: Processes of one episode, all its users together: enough for a wide build, too few for a fork bomb to hurt.
PROCESSES_MAX = 4096


@dataclass(frozen=True)
class Engine:
    """One spawner's life. Snapshots live in its memory and end with it."""

    spawner: Spawner
    snapshots: Snapshots

    def describe_isolation(self) -> dict[str, Any]:
        """What `info.isolation` of a reset says."""
        rung = self.spawner.rung
        return {
            "rung": rung.name,
            "title": rung.title,
            "worktree": "copy-on-write over " + ", ".join(sorted(f"/{name}" for name in SYSTEM_FOLDERS)),
            "private": ["/" + path for path in PRIVATE_FOLDERS] + ["processes", "ipc", "hostname", "/dev/shm"],
            "network": "host: ports are shared with the host and with other episodes",
            "verifier": {
                "user_namespace": "its own, outside the agent's",
                "signals_scoped": self.spawner.signals_scoped,
            },
            "processes_max": PROCESSES_MAX if rung.caps_processes else None,
            "lacks": list(rung.lacks),
        }


class Engines:
    """The current engine. When its spawner dies, running episodes fail; the next reset gets a new one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._lock = asyncio.Lock()
        self.restarts = 0

    async def get(self) -> Engine:
        """Raises: SandboxError, OSError."""
        async with self._lock:
            if self._engine is not None and self._engine.spawner.alive:
                return self._engine
            if self._engine is not None:
                log.error("the spawner died; starting another")
                self.restarts += 1
                await self._stop()
            self._engine = await _start(self._settings)
            return self._engine

    @property
    def current(self) -> Engine | None:
        """The engine, if there is a living one."""
        alive = self._engine is not None and self._engine.spawner.alive
        return self._engine if alive else None

    async def stop(self) -> None:
        async with self._lock:
            await self._stop()

    async def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.spawner.stop()


async def _start(settings: Settings) -> Engine:
    """Start a spawner on the best rung of the ladder that a trial episode proves. Raises: IsolationUnavailable."""
    hide = hidden_paths(settings)
    rungs = probe.candidate_rungs() if settings.isolation == "auto" else [settings.isolation]
    spawner, refusals = await trial.start_best(rungs, settings.scratch_candidates, hide)
    for refused, reason in refusals.items():
        log.info("a better rung is not to be had", rung=refused, reason=reason)
    log.info("isolation works", rung=spawner.rung.name, title=spawner.rung.title, scratch=str(spawner.folder))
    return Engine(spawner, Snapshots(Ground(spawner.layers, spawner.rung, tuple(hide)), settings.task_workdir))


def hidden_paths(settings: Settings) -> list[str]:
    """Host paths that an episode must not see even if they lie in a system folder."""
    paths = [settings.output_dir, settings.cache_dir, settings.tasks_dir]
    return [str(Path(path).resolve()) for path in paths if path is not None]
