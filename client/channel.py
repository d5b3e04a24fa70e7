"""One WebSocket to the server, on which each request gets one reply: connecting, taking turns, giving up.

The protocol numbers nothing, so a reply belongs to a request only because it is that request's turn. Whatever breaks
the turns (a cancelled call, a timeout, a frame that makes no sense) therefore ends the connection: the server notices
at once and frees the slot, and no later call can take a late reply for its own.
"""

import asyncio
import contextlib
import functools
import inspect
import ipaddress
import json
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import ConnectionClosed as WsConnectionClosed
from websockets.exceptions import InvalidStatus

from tbench2_env.auth import ws_logger
from tbench2_env.errors import ConnectionClosed, ReplyTimeout, ServerGone, Tbench2Error, WireCode, error_from_frame

# Pings keep proxies from dropping a quiet connection, but an unanswered one must not end it: the pong waits for the
# peer's event loop and is read by ours, and a trainer's loop is at times busy for minutes. Whether the peer's machine
# is alive is asked of the kernel instead, whose acknowledgements need neither loop. A live but stuck server is left to
# the message timeout.
_PING_INTERVAL_S = 20.0
_UNACKNOWLEDGED_S = 60.0

_GOODBYE_TIMEOUT_S = 5.0
_EXCERPT_CHARS = 200


class _Frame(BaseModel):
    type: str
    data: dict[str, Any]


class Channel:
    """A connection and what has come in on it. Made by `Channel.open`, within a running event loop."""

    def __init__(self, ws: ClientConnection, url: str, *, reply_timeout_s: float) -> None:
        self._ws = ws
        self._url = url
        self._reply_timeout_s = reply_timeout_s
        self._turn = asyncio.Lock()
        self._given_up: str | None = None
        self._inbox: asyncio.Queue[str | bytes | Exception] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_message_bytes: int,
        headers: Mapping[str, str],
    ) -> "Channel":
        """Connect to a ws:// or wss:// URL.

        Raises:
            ServerGone: nothing answers there within `connect_timeout_s`, or not as a WebSocket server.
            Unauthorized: it answers the handshake with HTTP 401 or 403.
        """
        try:
            ws = await ws_connect(
                url,
                open_timeout=connect_timeout_s,
                max_size=max_message_bytes,
                additional_headers=headers,
                ping_interval=_PING_INTERVAL_S,
                ping_timeout=None,
                logger=ws_logger,
                **_proxy_options(url),
            )
        except Exception as exc:  # which ones, for a peer that talks nonsense, differs between versions of websockets
            raise _refusal(url, exc) from exc
        _let_kernel_watch(ws)
        return cls(ws, url, reply_timeout_s=reply_timeout_s)

    @property
    def ended(self) -> bool:
        """The connection is lost or given up: `ask` can only raise."""
        return self._given_up is not None or self._reader.done()

    async def ask(self, request: dict[str, Any], reply_type: str) -> dict[str, Any]:
        """Send `{"type", "data"?}` and return the `data` of the reply. Concurrent calls wait for their turn.

        Raises:
            Tbench2Error: the server's error frame (the connection stays usable), or code BAD_REPLY (it does not).
            ConnectionClosed: the connection is, or was already, lost.
            ReplyTimeout: no reply within the timeout given to `open`, counted from this call's turn.
        """
        text = json.dumps(request)
        async with self._turn:
            if self._given_up is not None:
                raise ConnectionClosed(f"No connection to {self._url} any more: {self._given_up}")
            if not self._inbox.empty():
                # It came unasked: the server's parting word (over capacity, say), or the loss of the connection.
                return self._data_of(self._inbox.get_nowait(), reply_type=None)
            return self._data_of(await self._reply_to(text), reply_type)

    async def make_sure(self, *, within_s: float) -> None:
        """Find out whether the server has taken this connection, and give it up if not.

        A full server says so unasked, but only once it has accepted the handshake: by then `open` has returned, and
        from a server that waits for a request it differs only by what it will say. So ask it something. A state is
        told at any time, before a reset too, and asking for it changes nothing.

        Raises:
            CapacityReached: it has no free slot.
            ServerGone: it hung up, or said nothing within `within_s` seconds.
        """
        try:
            async with asyncio.timeout(within_s):
                await self.ask({"type": "state"}, "state")
        except TimeoutError:
            raise ServerGone(f"Failed to connect to {self._url}: no reply within {within_s:g} s") from None
        except BaseException:
            self._give_up("the server did not take it")
            raise

    async def close(self) -> None:
        """Take leave and close, within 5 s; calls still waiting here end with ConnectionClosed. Never raises."""
        try:
            with contextlib.suppress(TimeoutError, WsConnectionClosed):
                async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                    await self._ws.send(json.dumps({"type": "close"}))
                    await self._ws.close()
        finally:
            self._give_up("this client was closed")
        async with self._turn:
            pass  # Those calls have raised by now; whoever owns the loop may stop it.

    async def _read(self) -> None:
        # Read on from the start, not only within a call: websockets 13 throws away what it has received when the
        # connection closes, and the reason (CAPACITY_REACHED) may come before anything was asked.
        try:
            while True:
                self._inbox.put_nowait(await self._ws.recv())
        except Exception as exc:
            self._inbox.put_nowait(exc)

    async def _reply_to(self, text: str) -> str | bytes | Exception:
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                with contextlib.suppress(WsConnectionClosed):  # the inbox has it too, or better, the reason
                    await self._ws.send(text)
                return await self._inbox.get()
        except TimeoutError:
            self._give_up("an earlier call got no reply in time")
            raise ReplyTimeout(f"No reply from {self._url} within {self._reply_timeout_s:g} s") from None
        except BaseException:
            self._give_up("an earlier call was cancelled before its reply came")
            raise

    def _data_of(self, frame: str | bytes | Exception, reply_type: str | None) -> dict[str, Any]:
        if isinstance(frame, Exception):
            self._give_up(str(frame))
            raise ConnectionClosed(f"Connection to {self._url} closed: {frame}") from frame
        try:
            message = _Frame.model_validate(json.loads(frame))
        except ValueError as exc:
            raise self._bad_reply(frame) from exc
        if message.type == "error":
            raise error_from_frame(message.data)
        if message.type != reply_type:
            raise self._bad_reply(frame)
        return message.data

    def _bad_reply(self, frame: str | bytes) -> Tbench2Error:
        self._give_up("an earlier reply made no sense")
        return Tbench2Error(f"Unexpected reply from {self._url}: {frame[:_EXCERPT_CHARS]!r}", code="BAD_REPLY")

    def _give_up(self, reason: str) -> None:
        self._given_up = self._given_up or reason
        self._ws.transport.abort()


def _refusal(url: str, reason: Exception) -> Tbench2Error:
    if isinstance(reason, InvalidStatus) and reason.response.status_code in (401, 403):
        message = f"HTTP {reason.response.status_code} from {url}"
        return error_from_frame({"code": WireCode.UNAUTHORIZED, "message": message})
    return ServerGone(f"Failed to connect to {url}: {reason}")


def _proxy_options(url: str) -> dict[str, Any]:
    return {"proxy": None} if _knows_proxies() and _is_loopback(urlsplit(url).hostname) else {}


@functools.cache
def _knows_proxies() -> bool:
    # websockets 15 began to obey http_proxy and friends; earlier ones hand unknown options to the socket.
    return "proxy" in inspect.signature(ws_connect).parameters


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _let_kernel_watch(ws: ClientConnection) -> None:
    if sys.platform == "linux":
        sock = ws.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1000))
