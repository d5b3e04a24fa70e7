"""What all episodes of one server share, started and stopped together."""

import asyncio
from typing import Any, Self

from tbench2_env.isolation.sandbox import IsolationUnavailable, Sandbox, Spawner
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS, CommandSpec, SandboxSpec
from tbench2_env.server.pool import Pool
from tbench2_env.server.runs import Runs
from tbench2_env.server.settings import Settings
from tbench2_env.server.shell import BASH, Runner, environment
from tbench2_env.server.snapshots import Ground, Snapshots
from tbench2_env.server.tasks import DefaultCatalogue

#: Processes of one episode, all its users together: enough for a wide build, too few for a fork bomb to hurt.
PROCESSES_MAX = 4096
_TRIAL_TIMEOUT_S = 20.0


class Services:
    """The settings and everything that is made from them."""

    def __init__(self, settings: Settings, spawner: Spawner) -> None:
        self.settings, self.spawner = settings, spawner
        self.loop = asyncio.get_running_loop()
        self.pool = Pool(settings.max_concurrent_envs)
        self.catalogue = DefaultCatalogue(settings)
        self.runs = Runs(settings.output_dir, settings.keep_runs)
        hide = tuple(hidden_paths(settings))
        self.snapshots = Snapshots(Ground(spawner.layers, spawner.rung, hide), settings.task_workdir)

    @classmethod
    async def start(cls, settings: Settings) -> Self:
        """Start the spawner and prove with a trial episode that this host isolates. Raises: SandboxError, OSError."""
        settings.output_dir.mkdir(parents=True, exist_ok=True)
        spawner = await Spawner.start(scratch=settings.scratch_candidates, hide=hidden_paths(settings))
        try:
            await _trial(spawner)
        except BaseException:
            await spawner.stop()
            raise
        return cls(settings, spawner)

    async def stop(self) -> None:
        await self.spawner.stop()

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


def hidden_paths(settings: Settings) -> list[str]:
    """Host paths that an episode must not see even if they lie in a system folder."""
    paths = [settings.output_dir, settings.cache_dir, settings.tasks_dir]
    return [str(path.resolve()) for path in paths if path is not None]


async def _trial(spawner: Spawner) -> None:
    """One command in one sandbox. Raises: SandboxError."""
    sandbox = await spawner.create(SandboxSpec("trial-episode"))
    try:
        await _run_true(sandbox)
    finally:
        await sandbox.destroy()


async def _run_true(sandbox: Sandbox) -> None:
    runner = Runner(4096)
    try:
        command = CommandSpec(BASH, ("bash", "-c", ": >/etc/trial"), "/", environment())
        result = await runner.run(lambda fds: sandbox.start(command, fds), _TRIAL_TIMEOUT_S)
    finally:
        runner.close()
    if result.exit_code != 0:
        raise IsolationUnavailable(f"the trial episode could not write to its worktree: {result.output.strip()}")
