"""One client's session: at most one live episode, replaced by reset, ended with the session."""

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tbench2_env.models import Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.server.ending import End, EpisodeEnded
from tbench2_env.server.episode import Episode
from tbench2_env.server.pool import Slot
from tbench2_env.server.services import Services
from tbench2_env.server.tasks import Task

ModelT = TypeVar("ModelT", bound=BaseModel)


class BadRequest(Exception):
    """The client's message is wrong. `errors` are pydantic's, one for each field, or empty."""

    def __init__(self, message: str, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []


class NoEpisode(Exception):
    """The client acts before it has reset, or after it closed its episode."""


class ResetRequest(BaseModel):
    """The data of a reset. Fields that upstream's server ignores are ignored here, too."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"task_id": "hello-note"}]})

    task_id: str | None = None
    task_name: str | None = None
    task_path: str | None = None
    path: str | None = None
    # Becomes part of a folder's name.
    episode_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    seed: int | None = None


class Session:
    """What a connection, or an in-process environment, drives.

    `slot` is the one the connection was admitted with; without it the first reset waits for one.
    """

    def __init__(self, services: Services, slot: Slot | None = None) -> None:
        self._services, self._slot = services, slot
        self._episode: Episode | None = None

    async def reset(self, data: Any) -> Tbench2Observation:
        """Begin an episode in place of the current one, which a wrong request leaves alone.

        Raises: BadRequest, UnknownTask, CapacityReached, TaskError, SandboxError, OSError.
        """
        request = validate(ResetRequest, data)
        task = await find_task(self._services, request)
        if self._slot is None:
            self._slot = await self._services.pool.acquire()
        # The new one is made while the old one ends, unless there may be only one at a time.
        ending = self._end_episode(End.REPLACED)
        if self._services.pool.maximum == 1:
            await asyncio.shield(ending)
        try:
            self._episode = await Episode.begin(self._services, task, request.episode_id, self._slot, own_slot=False)
        finally:
            await asyncio.shield(ending)
        return self._episode.first_observation()

    async def step(self, data: Any) -> Tbench2Observation:
        """Carry out one action. Raises: BadRequest, NoEpisode."""
        action = validate(Tbench2Action, data)
        if self._episode is None:
            raise NoEpisode("there is no episode: reset first")
        try:
            observation = await self._episode.step(action)
        except EpisodeEnded:
            return self._episode.ended_observation(action)
        if action.action_type == "close":
            self._episode = None
        return observation

    @property
    def state(self) -> Tbench2State:
        return self._episode.state if self._episode is not None else Tbench2State()

    async def close(self, end: End) -> None:
        """End the episode, if there is one, and free the slot."""
        if self._slot is not None:
            self._slot.leave()
        try:
            await asyncio.shield(self._end_episode(end))
        finally:
            if self._slot is not None:
                self._slot.release()

    def _end_episode(self, end: End) -> "asyncio.Future[None]":
        """Begin to end it, if there is one; done when that is."""
        episode, self._episode = self._episode, None
        if episode is not None:
            return episode.end(end)
        nothing: asyncio.Future[None] = self._services.loop.create_future()
        nothing.set_result(None)
        return nothing


async def find_task(services: Services, request: ResetRequest) -> Task:
    """The task a reset asks for, by path, id or default. Raises: UnknownTask, TaskError."""
    catalogue = await services.catalogue.get()
    task_id = request.task_id or request.task_name or services.settings.default_task_id
    return catalogue.find(task_id, request.task_path or request.path)


def validate(model: type[ModelT], data: Any) -> ModelT:
    """Raises: BadRequest naming each wrong field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        fields = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'data'}: {each['msg']}" for each in errors)
        raise BadRequest(f"Invalid message: {fields}", [dict(each) for each in errors]) from None
