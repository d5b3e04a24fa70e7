"""What the WebSocket and the HTTP client have in common: the calls, their meaning, and how replies are read."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ValidationError

from tbench2_env.errors import Tbench2Error
from tbench2_env.models import StepResult, Tbench2Action, Tbench2Observation, Tbench2State

if TYPE_CHECKING:
    from tbench2_env.sync import SyncTbench2Env

ModelT = TypeVar("ModelT", bound=BaseModel)


class BaseTbench2Env(ABC):
    """A user of a Terminal-Bench-2 server, with at most one live episode. Every call may raise what `errors` lists."""

    @abstractmethod
    async def connect(self, retry_capacity_s: float | None = None) -> Self:
        """Make sure that there is a server, which `async with` does, too.

        Args:
            retry_capacity_s: seconds to go on trying while the server is full or cannot be reached, with growing
                random pauses of up to 5 s. None: what the client was made with.

        Raises:
            ServerGone: there is no server at `base_url`.
            Unauthorized: it wants another token.
            CapacityReached: it still has no free slot (only said where it was asked to go on trying).
        """

    @abstractmethod
    async def reset(self, **kwargs: Any) -> StepResult[Tbench2Observation]:
        """Begin an episode, ending the current one.

        Args:
            kwargs: `task_id` (or `task_name`), `task_path` (or `path`), `episode_id`, `seed`; all optional.

        Returns:
            An observation with `instruction`, `task_id`, and in `info` the server's `verifier_timeout_sec` and
            `command_timeout_s`.

        Raises:
            CapacityReached: no slot is free.
            BadRequest, ExecutionFailed: the server refused, or failed to set the task up.
        """

    @abstractmethod
    async def step(self, action: Tbench2Action, **kwargs: Any) -> StepResult[Tbench2Observation]:
        """Carry out one action. `kwargs` are OpenEnv's signature; as there, they are not sent.

        Returns:
            An observation whose `success` tells whether the action was carried out. `reward` is a number only for an
            `evaluate` with a verdict.

        Raises:
            EpisodeEnded: the server says that the episode is over.
            ConnectionClosed, ReplyTimeout: the connection is lost, and a WebSocket's episode with it.
        """

    @abstractmethod
    async def state(self) -> Tbench2State:
        """The server's view of the episode; one without `episode_id` before the first `reset`."""

    @abstractmethod
    async def close(self) -> None:
        """End the episode and the connection. Never raises; closing twice is fine; the next call begins anew."""

    async def exec(self, command: str, *, session_id: str | None = None, block: bool = True) -> Tbench2Observation:
        """Run a shell command, in the named terminal if one is given; `info["exit_code"]` has its exit status."""
        return (await self.step(Tbench2Action(command=command, session_id=session_id, block=block))).observation

    async def write_file(self, file_path: str, content: str) -> Tbench2Observation:
        """Write a text file inside the sandbox; relative paths are relative to the task's working directory."""
        action = Tbench2Action(action_type="write_file", file_path=file_path, content=content)
        return (await self.step(action)).observation

    async def evaluate(self, *, keep: bool = False) -> StepResult[Tbench2Observation]:
        """Run the task's tests. `reward` None means no verdict, for the reason in `observation.error`.

        Args:
            keep: the episode goes on, this is an intermediate reward: `done` is then false.
        """
        return await self.step(Tbench2Action(action_type="evaluate", metadata={"keep": True} if keep else {}))

    def sync(self) -> "SyncTbench2Env":
        """The same client with blocking methods: `with env.sync() as env:`."""
        from tbench2_env.sync import SyncTbench2Env

        return SyncTbench2Env(self)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} is async: write `async with env:`, or `with env.sync() as env:` for blocking calls")

    def __exit__(self, *exc_info: object) -> None:  # noqa: B027
        """Never reached; without it Python would complain of a missing method instead of `__enter__`'s advice."""


class _Outcome(BaseModel):
    # OpenEnv's server keeps reward and done beside the observation, not in it.
    observation: Tbench2Observation
    reward: bool | int | float | None = None
    done: bool = False


def step_result(data: object) -> StepResult[Tbench2Observation]:
    """`{observation, reward, done}` of the wire as a result. Raises: Tbench2Error with code BAD_REPLY."""
    outcome = parsed(_Outcome, data)
    observation = outcome.observation
    observation.reward, observation.done = outcome.reward, outcome.done
    return StepResult(observation, outcome.reward, outcome.done)


def parsed(model: type[ModelT], data: object) -> ModelT:
    """`data` of the wire as a model. Raises: Tbench2Error with code BAD_REPLY."""
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise Tbench2Error(f"The server's reply makes no sense: {exc}", code="BAD_REPLY") from exc
