"""What all episodes of one server share, started and stopped together."""

import asyncio
from typing import Self

from tbench2_env.server.engine import Engines
from tbench2_env.server.pool import Pool
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.registry import Registry
from tbench2_env.server.runs import Runs
from tbench2_env.server.settings import Settings, SettingsError
from tbench2_env.server.tasks import DefaultCatalogue
from tbench2_env.server.telemetry import Metrics


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
        self.metrics = Metrics(self.pool, self.engines)

    @classmethod
    async def start(cls, settings: Settings) -> Self:
        """Raises: SettingsError, SandboxError when this host cannot isolate."""
        try:
            settings.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"TB2_OUTPUT_DIR: cannot make {settings.output_dir}: {error.strerror}") from None
        services = cls(settings)
        await services.engines.get()
        return services

    async def stop(self) -> None:
        """End every episode, then the engine."""
        await self.registry.end_all()
        await self.proxy.stop()
        await self.engines.stop()
