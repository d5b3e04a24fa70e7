"""The isolation engine of a server: the spawner and the snapshots made on it, replaced when the spawner dies."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tbench2_env.isolation import bare, probe, trial
from tbench2_env.isolation.sandbox import IsolationUnavailable, Spawner
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS, SpawnerConfig
from tbench2_env.server import networks
from tbench2_env.server.images.environments import Environments
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.settings import Settings
from tbench2_env.server.snapshots import Ground, Snapshots
from tbench2_env.server.toolchain.uv_cache import UvCache

log = structlog.get_logger()


@dataclass(frozen=True)
class Engine:
    """One spawner's life. Snapshots live in its memory and end with it. Without isolation there is no uv cache."""

    spawner: Spawner
    environments: Environments
    snapshots: Snapshots
    settings: Settings
    uv_cache: UvCache | None

    async def stop(self) -> None:
        await self.snapshots.stop()
        await self.spawner.stop()

    def describe_isolation(self) -> dict[str, Any]:
        """What `info.isolation` of a reset says of this host; an episode adds its limits."""
        rung, host = self.spawner.rung, self.spawner.host
        return {
            "rung": rung.name,
            "title": rung.title,
            "worktree": _worktree() if rung.isolated else "none: the node's own files",
            "private": _private() if rung.isolated else [],
            "scratch": f"{self.spawner.folder.parent} ({'memory' if host.in_memory else 'disk'})",
            "network": networks.describe(self.settings, host),
            "verifier": {
                "user_namespace": "its own, outside the agent's" if rung.user_namespaces else None,
                "signals_scoped": host.signals_scoped,
            },
            "lacks": self.lacks(),
        }

    def lacks(self) -> list[str]:
        """What this host cannot give, a sentence each."""
        host, found = self.spawner.host, list(self.spawner.rung.lacks)
        if not self.spawner.rung.isolated:
            found += bare.obstacles()
        elif not host.signals_scoped:
            found.append("an agent may signal a verifier: landlock's scopes are missing (Linux 6.12, landlock in lsm=)")
        found += [f"what is mounted on {path} is not in worktrees" for path in host.hidden_mounts]
        if self.settings.network == "host":
            why = networks.why_host(self.settings)
            found.append(f"ports are shared with the host, and its services are within reach ({why})")
        return found


def _worktree() -> str:
    return "copy-on-write over " + ", ".join(sorted(f"/{name}" for name in SYSTEM_FOLDERS))


def _private() -> list[str]:
    return ["/" + path for path in PRIVATE_FOLDERS] + ["processes", "ipc", "hostname", "/dev/shm"]


class Engines:
    """The current engine. When its spawner dies, running episodes fail; the next reset gets a new one."""

    def __init__(self, settings: Settings, proxy: EgressProxy) -> None:
        self._settings, self._proxy = settings, proxy
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
            self._engine, refusals = await start_engine(self._settings, self._proxy)
            _tell(self._engine, refusals)
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
            await engine.stop()


async def start_engine(settings: Settings, proxy: EgressProxy) -> tuple[Engine, dict[str, str]]:
    """Start a spawner on the best rung of the ladder that a trial episode proves; answers also with why not on better.

    Raises: IsolationUnavailable.
    """
    spawner, refusals = await trial.start_best(configs(settings))
    if settings.network == "egress" and spawner.host.egress is None:
        refused = "; ".join(f"{name}: {reason}" for name, reason in spawner.host.egress_refusals.items())
        await spawner.stop()
        raise IsolationUnavailable(f"TB2_NETWORK=egress: no way out but a proxy (TB2_NETWORK=auto takes it): {refused}")
    environments = Environments(spawner, settings, proxy)
    ground = Ground(spawner.layers, spawner.rung, tuple(hidden_paths(settings)))
    snapshots = Snapshots(ground, environments, settings.task_workdir)
    uv_cache = UvCache(settings.cache_dir, environments.store) if spawner.rung.isolated else None
    return Engine(spawner, environments, snapshots, settings, uv_cache), refusals


def _tell(engine: Engine, refusals: dict[str, str]) -> None:
    for refused, reason in refusals.items():
        log.warning("a better rung is not to be had", rung=refused, reason=reason)
    spawner = engine.spawner
    found = "isolation works" if spawner.rung.isolated else "nothing is isolated, as TB2_ISOLATION=none wants it"
    log.info(found, rung=spawner.rung.name, title=spawner.rung.title, scratch=str(spawner.folder))
    for lack in engine.lacks():
        log.warning("this host lacks something", lack=lack)


def configs(settings: Settings) -> list[SpawnerConfig]:
    """What to try to start the spawner with, best first."""
    rungs = probe.candidate_rungs() if settings.isolation == "auto" else [settings.isolation]
    scratch, hide = tuple(settings.scratch_candidates), tuple(hidden_paths(settings))
    ways_out = networks.egress_candidates(settings)
    return [SpawnerConfig(rung, scratch, hide, ways_out, settings.nice) for rung in rungs]


def hidden_paths(settings: Settings) -> list[str]:
    """Host paths that an episode must not see even if they lie in a system folder."""
    paths = [settings.output_dir, settings.cache_dir, settings.tasks_dir]
    return [str(Path(path).resolve()) for path in paths if path is not None]
