"""The client over plain HTTP: `Tbench2HttpEnv`, for where a WebSocket cannot go, and for files of any size.

It knows the routes and whose episode it is; a request itself is `exchange`, the calls' meaning `base`.
"""

import asyncio
import contextlib
import io
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self
from urllib.parse import quote, urlencode

from tbench2_env.auth import request_headers
from tbench2_env.base import BaseTbench2Env, parsed, step_result
from tbench2_env.errors import (
    ConnectionClosed,
    EpisodeBusy,
    EpisodeEnded,
    ReplyTimeout,
    ServerGone,
    Tbench2Error,
    UnknownEpisode,
)
from tbench2_env.exchange import Exchange, Request, Server
from tbench2_env.models import StepResult, Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.retry import NOT_NOW, retried

if TYPE_CHECKING:
    from tbench2_env.sync import SyncTbench2HttpEnv

_GOODBYE_TIMEOUT_S = 5.0
_SETTLE_S = 5.0
_EXCERPT_BYTES = 200


class _Life:
    """From one `close` to the next: the episode, the requests under way, and whether the client was closed since."""

    def __init__(self) -> None:
        self.episode_id: str | None = None
        self.turn = asyncio.Lock()
        self.under_way: set[Exchange] = set()
        self.closed = asyncio.Event()
        self.busy_until_s = 0.0  # of time.monotonic: until then the server may still be ending an abandoned action

    def check_open(self) -> None:
        if self.closed.is_set():
            raise ConnectionClosed("No request any more: this client was closed")

    def live_episode(self) -> str:
        self.check_open()
        if self.episode_id is None:
            raise UnknownEpisode("There is no episode yet: reset first")
        return self.episode_id


class Tbench2HttpEnv(BaseTbench2Env):
    """The calls of `Tbench2Env` as HTTP requests, and binary files of any size.

        async with Tbench2HttpEnv(base_url="http://localhost:8003") as env:
            await env.reset(task_id="hello-world")
            await env.upload("data.bin", Path("data.bin"))
            verdict = await env.evaluate()
            log = await env.download("/logs/verifier/test-stdout.txt")

    Each call is a request with a connection of its own, so losing one does not lose the episode: a call that was
    cancelled, timed out or cut off ends on the server too, and later calls work again. `close` ends the episode; a
    client that vanishes leaves it to the server's idle limit. Calls made at the same time take turns.

    Args:
        base_url: http(s):// or ws(s):// address of the server. It is reached without proxy.
        connect_timeout_s: seconds to wait for each connection.
        message_timeout_s: seconds the server may be silent before a reply, or in the middle of a file; more than the
            longest verifier may take.
        headers: sent with every request. An Authorization here wins over the token.
        token: the server's, sent as `Authorization: Bearer`. None: that of TB2_AUTH_TOKEN, if set. Empty: none.
        retry_capacity_s: seconds for which `connect` and `reset` try again while the server is full or cannot be
            reached.

    Raises:
        ValueError: `base_url` is of another kind, or the token or a header has an impossible character.

    Every call may raise what `errors` lists.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        retry_capacity_s: float = 0.0,
    ) -> None:
        self._server = Server.at(
            base_url,
            headers=request_headers(headers, token),
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=message_timeout_s,
        )
        self._retry_capacity_s = retry_capacity_s
        self._life = _Life()

    async def connect(self, retry_capacity_s: float | None = None) -> Self:
        """See whether there is a server, by `GET /health`. A slot is taken, and the token looked at, only by `reset`.

        Args:
            retry_capacity_s: seconds to go on trying while it cannot be reached. None: the constructor's.

        Raises:
            ServerGone: there is no server at `base_url`.
        """
        life, for_s = self._life, self._retry_capacity_s if retry_capacity_s is None else retry_capacity_s
        await retried(lambda: self._send(life, Request("GET", "/health")), NOT_NOW, for_s=for_s, stop=life.closed)
        return self

    async def reset(self, **kwargs: Any) -> StepResult[Tbench2Observation]:
        """Begin an episode. The current one is ended first, for its slot, whatever comes of the new one.

        Args and Returns: as for `Tbench2Env`, and the result's `metadata["episode_id"]` is the episode's.

        Raises:
            CapacityReached: no slot is free, nor was within the constructor's `retry_capacity_s`.
            UnknownTask, BadRequest, ExecutionFailed: the server refused, or failed to set the task up.
        """
        # Named by us, so that an episode whose begin was cancelled or lost can be ended all the same.
        asked = {**kwargs, "episode_id": kwargs.get("episode_id") or uuid.uuid4().hex}
        request, life = Request("POST", "/reset", json.dumps(asked).encode()), self._life

        async def attempt() -> StepResult[Tbench2Observation]:
            await self._end_episode(life)
            return await self._begin(life, request, asked["episode_id"])

        async with life.turn:
            return await retried(attempt, NOT_NOW, for_s=self._retry_capacity_s, stop=life.closed)

    async def step(self, action: Tbench2Action, **kwargs: Any) -> StepResult[Tbench2Observation]:
        return await self._step(action, None)

    async def state(self) -> Tbench2State:
        life = self._life
        async with life.turn:
            if life.episode_id is None:
                return Tbench2State()  # as a WebSocket's is before its first reset
            query = urlencode({"episode_id": life.episode_id})
            return parsed(Tbench2State, _decoded(await self._act(life, Request("GET", f"/state?{query}"))))

    async def exec(
        self, command: str, *, session_id: str | None = None, block: bool = True, timeout_s: float | None = None
    ) -> Tbench2Observation:
        """As for `Tbench2Env`; `timeout_s` replaces the server's TB2_COMMAND_TIMEOUT_S for this command."""
        action = Tbench2Action(command=command, session_id=session_id, block=block)
        return (await self._step(action, timeout_s)).observation

    async def upload(self, path: str, data: bytes | BinaryIO | Path) -> None:
        """Write a file inside the sandbox.

        Args:
            path: there; relative ones are relative to the task's working directory.
            data: the content, or a file to send: an open one from where it stands to its end, or the path of one here.

        Raises:
            BadRequest: there can be no such file.
            OSError: `data` cannot be read.
        """
        await self._transfer("PUT", path, body=data)

    async def download(self, path: str) -> bytes:
        """The content of a file inside the sandbox. Raises: BadRequest or another Tbench2Error if it cannot be read."""
        content = io.BytesIO()
        await self.download_to(path, content)
        return content.getvalue()

    async def download_to(self, path: str, file: BinaryIO) -> None:
        """Write the content of a file inside the sandbox to an open binary file, from a thread and block by block.

        Raises:
            ConnectionClosed, ReplyTimeout: it broke off; `file` may have a part of the content.
            OSError: `file` cannot be written.
        """
        await self._transfer("GET", path, sink=file)

    async def close(self) -> None:
        life, self._life = self._life, _Life()
        life.closed.set()
        for exchange in tuple(life.under_way):
            exchange.abort("this client was closed")
        async with life.turn:  # those calls have raised by now
            with contextlib.suppress(Tbench2Error, TimeoutError):
                async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                    await self._end_episode(life)

    def sync(self) -> "SyncTbench2HttpEnv":
        from tbench2_env.sync import SyncTbench2HttpEnv

        return SyncTbench2HttpEnv(self)

    async def _step(self, action: Tbench2Action, timeout_s: float | None) -> StepResult[Tbench2Observation]:
        life = self._life
        async with life.turn:
            data: dict[str, Any] = {"action": action.model_dump(mode="json"), "episode_id": life.live_episode()}
            if timeout_s is not None:
                data["timeout_s"] = timeout_s
            return step_result(_decoded(await self._act(life, Request("POST", "/step", json.dumps(data).encode()))))

    async def _begin(self, life: _Life, request: Request, episode_id: str) -> StepResult[Tbench2Observation]:
        life.check_open()
        life.episode_id = episode_id
        try:
            result = step_result(_decoded(await self._send(life, request)))
        except Tbench2Error as error:
            if not _may_have_begun(error):
                life.episode_id = None
            raise
        life.episode_id = str(result.observation.metadata.get("episode_id") or episode_id)
        return result

    async def _end_episode(self, life: _Life) -> None:
        if life.episode_id is not None:
            with contextlib.suppress(UnknownEpisode, EpisodeEnded):
                await self._send(life, Request("DELETE", _episode_path(life.episode_id)))
            life.episode_id = None

    async def _transfer(self, method: str, path: str, **content: Any) -> None:
        life = self._life
        async with life.turn:
            target = f"{_episode_path(life.live_episode())}/files?{urlencode({'path': path})}"
            await self._act(life, Request(method, target, content_type="application/octet-stream", **content))

    async def _act(self, life: _Life, request: Request) -> bytes:
        # The server needs a moment to end an action whose caller has gone: not a reason to refuse the next one. An open
        # file is sent once only, as it is not where it was any more.
        life.check_open()
        for_s = max(0.0, life.busy_until_s - time.monotonic()) if request.can_be_repeated else 0.0
        return await retried(lambda: self._send(life, request), (EpisodeBusy,), for_s=for_s, stop=life.closed)

    async def _send(self, life: _Life, request: Request) -> bytes:
        exchange = Exchange(self._server, request)
        life.under_way.add(exchange)
        try:
            return await exchange.reply()
        except (asyncio.CancelledError, ServerGone, ReplyTimeout):
            life.busy_until_s = time.monotonic() + _SETTLE_S
            raise
        finally:
            life.under_way.discard(exchange)


def _episode_path(episode_id: str) -> str:
    return f"/episodes/{quote(episode_id, safe='')}"


def _may_have_begun(error: Tbench2Error) -> bool:
    # Without an answer, or with one that makes no sense, nobody knows. A refusal may be for an episode of that name
    # which is somebody else's, and must not be ended by us.
    return isinstance(error, ServerGone | ReplyTimeout) or error.code == "BAD_REPLY"


def _decoded(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as exc:
        raise Tbench2Error(f"Unexpected reply: {body[:_EXCERPT_BYTES]!r}", code="BAD_REPLY") from exc
