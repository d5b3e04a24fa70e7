"""The client to use: `Tbench2Env`, one session with a server and at most one live episode.

It knows the messages and the models; the connection itself is `channel`, the blocking variant `sync`.
"""

import asyncio
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ValidationError

from tbench2_env.channel import Channel
from tbench2_env.errors import Tbench2Error
from tbench2_env.models import StepResult, Tbench2Action, Tbench2Observation, Tbench2State

if TYPE_CHECKING:
    from tbench2_env.sync import SyncTbench2Env

_WS_SCHEMES = {"": "ws", "http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}

ModelT = TypeVar("ModelT", bound=BaseModel)


class _Outcome(BaseModel):
    # OpenEnv's server keeps reward and done beside the observation, not in it.
    observation: Tbench2Observation
    reward: bool | int | float | None = None
    done: bool = False


class Tbench2Env:
    """One session with a Terminal-Bench-2 server.

        async with Tbench2Env(base_url="http://localhost:8003") as env:
            instruction = (await env.reset(task_id="hello-world")).observation.instruction
            listing = (await env.exec("ls -la")).output
            verdict = await env.evaluate()

    The first call connects, if `connect` or `async with` has not. Losing the connection loses the episode, so a lost
    one is not replaced behind the caller's back: calls raise ConnectionClosed until `connect` or `close` is called.
    That is also so after a call was cancelled or timed out. Calls made at the same time take turns.

    Args:
        base_url: http(s):// or ws(s):// address of the server, without `/ws`. Local ones are reached without proxy.
        connect_timeout_s: seconds to wait for the connection.
        message_timeout_s: seconds to wait for each reply; more than the longest verifier may take.
        max_message_size_mb: largest reply accepted, in MiB.
        headers: sent with the opening request, for example an Authorization.

    Raises:
        ValueError: `base_url` has another scheme.

    Every call may raise what `errors` lists.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        max_message_size_mb: float = 100.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._open_channel = functools.partial(
            Channel.open,
            _ws_url(base_url),
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=message_timeout_s,
            max_message_bytes=int(max_message_size_mb * 1024 * 1024),
            headers=dict(headers or {}),
        )
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> Self:
        """Connect, unless connected. After a lost connection: begin a new session, without an episode.

        Raises:
            ServerGone: there is no server at `base_url`.
        """
        if self._channel is not None and self._channel.ended:
            self._channel = None
        await self._connected()
        return self

    async def reset(self, **kwargs: Any) -> StepResult[Tbench2Observation]:
        """Begin an episode, ending the session's current one.

        Args:
            kwargs: `task_id` (or `task_name`), `task_path` (or `path`), `episode_id`, `seed`; all optional.

        Returns:
            An observation with `instruction`, `task_id`, and in `info` the server's `verifier_timeout_sec` and
            `command_timeout_s`.

        Raises:
            CapacityReached: no slot is free.
            BadRequest, ExecutionFailed: the server refused, or failed to set the task up.
        """
        return await self._observe({"type": "reset", "data": kwargs})

    async def step(self, action: Tbench2Action, **kwargs: Any) -> StepResult[Tbench2Observation]:
        """Carry out one action. `kwargs` are OpenEnv's signature; as there, they are not sent.

        Returns:
            An observation whose `success` tells whether the action was carried out. `reward` is a number only for an
            `evaluate` with a verdict.

        Raises:
            EpisodeEnded: the server says that the episode is over.
            ConnectionClosed, ReplyTimeout: the connection, and with it the episode, is lost.
        """
        return await self._observe({"type": "step", "data": action.model_dump(mode="json")})

    async def exec(self, command: str, *, session_id: str | None = None, block: bool = True) -> Tbench2Observation:
        """Run a shell command, in the named terminal if one is given; `info["exit_code"]` has its exit status."""
        return (await self.step(Tbench2Action(command=command, session_id=session_id, block=block))).observation

    async def write_file(self, file_path: str, content: str) -> Tbench2Observation:
        """Write a text file inside the sandbox; relative paths are relative to the task's working directory."""
        action = Tbench2Action(action_type="write_file", file_path=file_path, content=content)
        return (await self.step(action)).observation

    async def evaluate(self) -> StepResult[Tbench2Observation]:
        """Run the task's tests. `reward` None means no verdict, for the reason in `observation.error`."""
        return await self.step(Tbench2Action(action_type="evaluate"))

    async def state(self) -> Tbench2State:
        """The server's view of the episode."""
        return _parsed(Tbench2State, await self._ask({"type": "state"}, "state"))

    async def close(self) -> None:
        """End the session and its episode. Never raises; closing twice is fine; the next call connects anew."""
        async with self._connecting:
            channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def sync(self) -> "SyncTbench2Env":
        """The same client with blocking methods: `with Tbench2Env(base_url=...).sync() as env:`."""
        from tbench2_env.sync import SyncTbench2Env

        return SyncTbench2Env(self)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> NoReturn:
        raise TypeError("Tbench2Env is async: write `async with env:`, or `with env.sync() as env:` for blocking calls")

    def __exit__(self, *exc_info: object) -> None:
        """Never reached; without it Python would complain of a missing method instead of `__enter__`'s advice."""

    async def _connected(self) -> Channel:
        async with self._connecting:
            if self._channel is None:
                self._channel = await self._open_channel()
            return self._channel

    async def _ask(self, request: dict[str, Any], reply_type: str) -> dict[str, Any]:
        channel = await self._connected()
        return await channel.ask(request, reply_type)

    async def _observe(self, request: dict[str, Any]) -> StepResult[Tbench2Observation]:
        outcome = _parsed(_Outcome, await self._ask(request, "observation"))
        observation = outcome.observation
        observation.reward, observation.done = outcome.reward, outcome.done
        return StepResult(observation, outcome.reward, outcome.done)


def _ws_url(base_url: str) -> str:
    scheme, _, rest = base_url.rstrip("/").rpartition("://")
    if scheme.lower() not in _WS_SCHEMES:
        raise ValueError(f"base_url must begin with http://, https://, ws:// or wss://, not {base_url!r}")
    return f"{_WS_SCHEMES[scheme.lower()]}://{rest}/ws"


def _parsed(model: type[ModelT], data: dict[str, Any]) -> ModelT:
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise Tbench2Error(f"The server's reply makes no sense: {exc}", code="BAD_REPLY") from exc
