"""The client to use: `Tbench2Env`, one session with a server and at most one live episode.

It knows the messages and when to connect; the connection itself is `channel`, the calls' meaning `base`, the blocking
variant `sync`. `http` has the same client over plain HTTP.
"""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any, Self

from tbench2_env.auth import request_headers
from tbench2_env.base import BaseTbench2Env, parsed, step_result
from tbench2_env.channel import Channel
from tbench2_env.errors import ConnectionClosed
from tbench2_env.models import StepResult, Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.retry import NOT_NOW, retried

_WS_SCHEMES = {"": "ws", "http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}


class _Session:
    """From one `close` to the next: the connection once there is one, and whether the client was closed since."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.connecting = asyncio.Lock()
        self.closed = asyncio.Event()


class Tbench2Env(BaseTbench2Env):
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
        headers: sent with the opening request. An Authorization here wins over the token.
        token: the server's, sent as `Authorization: Bearer`. None: that of TB2_AUTH_TOKEN, if set. Empty: none.
        retry_capacity_s: seconds for which connecting is tried again while the server is full or cannot be reached.

    Raises:
        ValueError: `base_url` has another scheme, or the token or a header an impossible character.

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
        token: str | None = None,
        retry_capacity_s: float = 0.0,
    ) -> None:
        self._open_channel = functools.partial(
            Channel.open,
            _ws_url(base_url),
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=message_timeout_s,
            max_message_bytes=int(max_message_size_mb * 1024 * 1024),
            headers=request_headers(headers, token),
        )
        self._connect_timeout_s = connect_timeout_s
        self._retry_capacity_s = retry_capacity_s
        self._session = _Session()

    async def connect(self, retry_capacity_s: float | None = None) -> Self:
        """Connect, unless connected. After a lost connection: begin a new session, without an episode.

        A full server says so only after it has accepted the connection, which a plain `connect` therefore does not
        notice: the first call raises CapacityReached. With `retry_capacity_s` above 0, `connect` makes sure.

        Args:
            retry_capacity_s: seconds to go on trying while the server is full or cannot be reached, with growing
                random pauses of up to 5 s; the last attempt may add `connect_timeout_s`. None: the constructor's.

        Raises:
            ServerGone: there is no server at `base_url`.
            Unauthorized: the server wants another token.
            CapacityReached: the server still has no free slot.
        """
        session = self._session
        if session.channel is not None and session.channel.ended:
            session.channel = None
        await self._connected(session, self._retry_capacity_s if retry_capacity_s is None else retry_capacity_s)
        return self

    async def reset(self, **kwargs: Any) -> StepResult[Tbench2Observation]:
        return step_result(await self._ask({"type": "reset", "data": kwargs}, "observation"))

    async def step(self, action: Tbench2Action, **kwargs: Any) -> StepResult[Tbench2Observation]:
        return step_result(await self._ask({"type": "step", "data": action.model_dump(mode="json")}, "observation"))

    async def state(self) -> Tbench2State:
        return parsed(Tbench2State, await self._ask({"type": "state"}, "state"))

    async def close(self) -> None:
        session, self._session = self._session, _Session()
        session.closed.set()
        async with session.connecting:
            if session.channel is not None:
                await session.channel.close()

    async def _ask(self, request: dict[str, Any], reply_type: str) -> dict[str, Any]:
        channel = await self._connected(self._session, self._retry_capacity_s)
        return await channel.ask(request, reply_type)

    async def _connected(self, session: _Session, retry_s: float) -> Channel:
        # The lock is held for one attempt, not for the pauses between them, so that `close` need not wait for those.
        async def attempt() -> Channel:
            async with session.connecting:
                if session.closed.is_set():
                    raise ConnectionClosed("Gave up connecting: this client was closed")
                if session.channel is None:
                    session.channel = await self._opened(make_sure=retry_s > 0)
                return session.channel

        return await retried(attempt, NOT_NOW, for_s=retry_s, stop=session.closed)

    async def _opened(self, *, make_sure: bool) -> Channel:
        channel = await self._open_channel()
        if make_sure:
            await channel.make_sure(within_s=self._connect_timeout_s)
        return channel


def _ws_url(base_url: str) -> str:
    scheme, _, rest = base_url.rstrip("/").rpartition("://")
    if scheme.lower() not in _WS_SCHEMES:
        raise ValueError(f"base_url must begin with http://, https://, ws:// or wss://, not {base_url!r}")
    return f"{_WS_SCHEMES[scheme.lower()]}://{rest}/ws"
