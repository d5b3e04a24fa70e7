"""openenv's side: `Tbench2Environment`, for in-process use and for OpenEnv's web pages. The only importer of openenv.

Importing this module costs what importing openenv costs (3 to 5 seconds, 130 MB), which is why the server itself only
does so when ENABLE_WEB_INTERFACE asks for it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from fastapi import FastAPI
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from openenv.core.env_server.web_interface import create_web_interface_app

from tbench2_env import models
from tbench2_env.server.ending import End
from tbench2_env.server.http import DESCRIPTION, VERSION
from tbench2_env.server.services import Services
from tbench2_env.server.session import NoEpisode, Session
from tbench2_env.server.settings import Settings
from tbench2_env.server.telemetry import configure_logging

T = TypeVar("T")


class Tbench2Action(models.Tbench2Action, Action):
    """The wire action as openenv's type."""


class Tbench2Observation(models.Tbench2Observation, Observation):
    """The wire observation as openenv's type."""


class Tbench2State(models.Tbench2State, State):
    """The wire state as openenv's type."""


class Tbench2Environment(Environment[Tbench2Action, Tbench2Observation, Tbench2State]):
    """One session, with openenv's methods, asynchronous or blocking.

    With `services` it is one more session of that server. Without, it starts services of its own from the process
    environment at the first reset, on an event loop in a thread, and stops them when closed.

    Raises, from reset and step: what `Session` raises, and `pool.CapacityReached`.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, services: Services | None = None) -> None:
        super().__init__()
        self._services = services
        self._own: _OwnLoop | None = None
        self._session: Session | None = None

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Tbench2Observation:
        return await asyncio.wrap_future(self._submit(self._reset(seed=seed, episode_id=episode_id, **kwargs)))

    async def step_async(
        self, action: Tbench2Action, timeout_s: float | None = None, **kwargs: Any
    ) -> Tbench2Observation:
        return await asyncio.wrap_future(self._submit(self._step(action)))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Tbench2Observation:
        return self._submit(self._reset(seed=seed, episode_id=episode_id, **kwargs)).result()

    def step(self, action: Tbench2Action, timeout_s: float | None = None, **kwargs: Any) -> Tbench2Observation:
        return self._submit(self._step(action)).result()

    @property
    def state(self) -> Tbench2State:
        if self._session is None:
            return Tbench2State()
        return Tbench2State.model_validate(self._session.state.model_dump())

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="tbench2_env", description=DESCRIPTION, version=VERSION)

    def close(self) -> None:
        """End the episode. Called on the services' own loop, where it cannot wait, it only begins to."""
        if self._services is None:
            return
        closing = self._submit(self._close())
        if _running_loop() is not self._services.loop:
            closing.result()
        if self._own is not None:
            self._own.stop(self._services)
            self._own, self._services = None, None

    async def _reset(self, **data: Any) -> Tbench2Observation:
        assert self._services is not None
        if self._session is None:
            self._session = Session(self._services)
        return _as_openenv(await self._session.reset(data))

    async def _step(self, action: Tbench2Action) -> Tbench2Observation:
        if self._session is None:
            raise NoEpisode("there is no episode: reset first")
        return _as_openenv(await self._session.step(action.model_dump()))

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close(End.CLOSED)

    def _submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        if self._services is None:
            try:
                self._own, self._services = _OwnLoop.with_services()
            except BaseException:
                work.close()  # nobody will await it
                raise
        return asyncio.run_coroutine_threadsafe(work, self._services.loop)


class _OwnLoop:
    """An event loop in a thread, for an environment that belongs to no server."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tbench2-env", daemon=True)
        self._thread.start()

    @classmethod
    def with_services(cls) -> "tuple[_OwnLoop, Services]":
        """Raises: SettingsError, SandboxError."""
        settings = Settings.from_environment()
        if not structlog.is_configured():
            configure_logging(settings.log_format)  # to stderr: standard output is the program's
        own = cls()
        try:
            return own, asyncio.run_coroutine_threadsafe(Services.start(settings), own._loop).result()
        except BaseException:
            own._end()
            raise

    def stop(self, services: Services) -> None:
        asyncio.run_coroutine_threadsafe(services.stop(), self._loop).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _as_openenv(observation: models.Tbench2Observation) -> Tbench2Observation:
    return Tbench2Observation.model_validate(observation.model_dump())


def web_interface(services: Services) -> FastAPI:
    """OpenEnv's own application, for its /web pages."""
    return create_web_interface_app(
        lambda: Tbench2Environment(services),  # type: ignore[arg-type]
        Tbench2Action,
        Tbench2Observation,
        "tbench2_env",
        max_concurrent_envs=services.settings.max_concurrent_envs,
    )
