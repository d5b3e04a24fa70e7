"""What all episodes of one server share, started and stopped together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self

from tbench2_env.server.engine import Engines
from tbench2_env.server.pool import Pool
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.registry import Registry
from tbench2_env.server.runs import Runs
from tbench2_env.server.settings import Settings, SettingsError
from tbench2_env.server.tasks import DefaultCatalogue
from tbench2_env.server.telemetry import Metrics
from tbench2_env.server.warm import Warm


class Services:
    """The settings and everything that is made from them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.pool = Pool(settings.max_concurrent_envs, settings.queue_timeout_s)
        self.catalogue = DefaultCatalogue(settings)
        self.runs = Runs(settings.output_dir, settings.keep_runs)
        self.proxy = EgressProxy()
        self.engines = Engines(settings, self.proxy)
        self.registry = Registry()
        self.warm = Warm(self._has_episodes, self.proxy, settings.warm)
        self.metrics = Metrics(self.pool, self.engines, self.warm)
        self._tasks: set[asyncio.Task[None]] = set()

    def _has_episodes(self) -> bool:
        return bool(self.registry.live())

    @classmethod
    async def start(cls, settings: Settings) -> Self:
        """Raises: SettingsError, SandboxError when this host cannot isolate."""
        try:
            settings.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"TB2_OUTPUT_DIR: cannot make {settings.output_dir}: {error.strerror}") from None
        services = cls(settings)
        await services.engines.get()
        services.metrics.watch_loop(services.loop)
        return services

    def see_to(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Do it whoever waits, and before the engine is stopped."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """End every episode, then the engine."""
        await self.registry.end_all()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.warm.stop()
        await asyncio.to_thread(self.runs.close)
        await self.proxy.stop()
        await self.engines.stop()
