"""One HTTP request and its reply, over a connection of its own and in a thread of its own.

The client has to do with the standard library, whose HTTP blocks. So each request has a thread, which `abort` frees by
shutting the socket down under it: that ends the connection at once, and is what a server notices. A thread each and
not `asyncio.to_thread`, because that has a handful for the whole process, on which name look-ups wait as well, and an
`evaluate` may hold one for a quarter of an hour. A connection each, because one that was kept may turn out closed
just when it is used, and then nobody knows whether the action was carried out.
"""

import asyncio
import contextlib
import functools
import socket
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from tbench2_env.errors import ConnectionClosed, ReplyTimeout, ServerGone, Tbench2Error, error_from_reply

_BLOCK_BYTES = 256 * 1024
# As for the WebSocket: a quiet connection is kept, and one whose peer's machine is gone ends after a minute.
_PROBE_INTERVAL_S = 20
_UNACKNOWLEDGED_S = 60

_SCHEMES = {"": "http", "http": "http", "ws": "http", "https": "https", "wss": "https"}


@dataclass(frozen=True)
class Server:
    """Where to send requests, with what headers, and how long to wait."""

    scheme: str
    host: str
    port: int | None
    prefix: str
    headers: Mapping[str, str]
    connect_timeout_s: float
    reply_timeout_s: float

    @classmethod
    def at(
        cls, base_url: str, *, headers: Mapping[str, str], connect_timeout_s: float, reply_timeout_s: float
    ) -> "Server":
        """Raises: ValueError for a URL that is none, of another scheme, or with a password in it."""
        url = urlsplit(base_url if "://" in base_url else f"//{base_url}")
        if url.scheme not in _SCHEMES or not url.hostname:
            raise ValueError(f"base_url must be like http://host:8003 or https://host/prefix, not {base_url!r}")
        if url.username is not None:
            raise ValueError("base_url must have no user name or password: use token= or headers=")
        scheme, prefix = _SCHEMES[url.scheme], url.path.rstrip("/")
        return cls(scheme, url.hostname, url.port, prefix, headers, connect_timeout_s, reply_timeout_s)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{'' if self.port is None else f':{self.port}'}{self.prefix}"

    def connection(self) -> HTTPConnection:
        if self.scheme == "http":
            return HTTPConnection(self.host, self.port, timeout=self.connect_timeout_s)
        return HTTPSConnection(self.host, self.port, timeout=self.connect_timeout_s, context=_tls())


@dataclass(frozen=True)
class Request:
    """What to ask.

    `target` is path and query below the base URL; `body` the bytes to send, or a file: an open one is sent from where
    it stands to its end; `sink`, if given, gets the body of a successful reply, which is then not returned.
    """

    method: str
    target: str
    body: bytes | BinaryIO | Path | None = None
    content_type: str = "application/json"
    sink: BinaryIO | None = None

    @property
    def can_be_repeated(self) -> bool:
        return self.body is None or isinstance(self.body, bytes | Path)


class Exchange:
    """A request under way: made, awaited once with `reply`, and ended early by `abort`."""

    def __init__(self, server: Server, request: Request) -> None:
        self._server, self._request = server, request
        self._reply: Future[bytes] = Future()
        self._socket: socket.socket | None = None
        self._ended: str | None = None

    async def reply(self) -> bytes:
        """The body of a successful reply; cancelling this aborts the exchange.

        Raises:
            ServerGone: no connection within `connect_timeout_s`; nothing was sent.
            ConnectionClosed: the connection was lost, or `abort` called.
            ReplyTimeout: the server was silent for `reply_timeout_s`.
            Tbench2Error: the server's own, from its reply.
            OSError: the request's file or sink cannot be read or written.
        """
        # A daemon, as it must not keep the interpreter from ending.
        threading.Thread(target=self._run, name="tbench2-env-http", daemon=True).start()
        try:
            return await asyncio.wrap_future(self._reply)
        finally:
            self.abort("it is over")

    def abort(self, reason: str) -> None:
        """End it at once, whatever the thread is waiting for; without effect afterwards."""
        self._ended = self._ended or reason
        with contextlib.suppress(InvalidStateError):
            self._reply.set_exception(ConnectionClosed(f"Connection to {self._server.url} closed: {reason}"))
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket's: that would first take the encryption off, under the feet of the thread that sends.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            body = self._exchange()
        except BaseException as exc:
            with contextlib.suppress(InvalidStateError):  # aborted, or its awaiter cancelled: nobody is interested
                self._reply.set_exception(exc)
        else:
            with contextlib.suppress(InvalidStateError):
                self._reply.set_result(body)

    def _exchange(self) -> bytes:
        with contextlib.ExitStack() as stack:
            body = self._request.body
            if isinstance(body, Path):
                body = stack.enter_context(body.open("rb"))
            connection = stack.enter_context(contextlib.closing(self._connect()))
            self._send(connection, body)
            with self._failures():
                response = stack.enter_context(contextlib.closing(connection.getresponse()))
            return self._read(response)

    def _connect(self) -> HTTPConnection:
        connection = self._server.connection()
        try:
            connection.connect()
        except (OSError, ValueError) as exc:  # ValueError: a host name that cannot be one
            connection.close()
            raise ServerGone(f"Failed to connect to {self._server.url}: {exc}") from exc
        connection.sock.settimeout(self._server.reply_timeout_s)
        _let_kernel_watch(connection.sock)
        # In this order, and `abort` in the other one, so that at least one of the two sees what the other has set.
        self._socket = connection.sock
        if self._ended is not None:
            self._hang_up()
        return connection

    def _send(self, connection: HTTPConnection, body: bytes | BinaryIO | None) -> None:
        with self._failures():
            connection.putrequest(self._request.method, self._server.prefix + self._request.target)
            for name, value in {**self._framing(body), **self._server.headers}.items():
                connection.putheader(name, value)
            connection.endheaders()
        with contextlib.suppress(ConnectionClosed):
            # A server that refuses (too large, say) may hang up before it has read all: the reply has the reason.
            for block in _blocks(body):
                with self._failures():
                    connection.send(block)

    def _framing(self, body: bytes | BinaryIO | None) -> dict[str, str]:
        headers = {"Connection": "close"}
        if body is None:
            return headers
        headers["Content-Type"] = self._request.content_type
        if isinstance(body, bytes):
            return {**headers, "Content-Length": str(len(body))}
        return {**headers, "Transfer-Encoding": "chunked"}

    def _read(self, response: HTTPResponse) -> bytes:
        if not 200 <= response.status < 300:
            with self._failures():
                raise error_from_reply(response.status, dict(response.headers.items()), response.read(_BLOCK_BYTES))
        if self._request.sink is None:
            with self._failures():
                return response.read()
        while block := self._block(response):
            if self._ended is not None:
                break
            self._request.sink.write(block)
        return b""

    def _block(self, response: HTTPResponse) -> bytes:
        with self._failures():
            block = response.read(_BLOCK_BYTES)
            if not block and response.length:  # read() with a size does not complain of a short body
                raise HTTPException(f"{response.length} bytes are missing")
            return block

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        # Around what uses the socket and nothing else: an OSError of the caller's file is the caller's.
        url = self._server.url
        try:
            yield
        except Tbench2Error:
            raise
        except (OSError, HTTPException) as exc:
            if isinstance(exc, TimeoutError) and exc.errno is None:  # ours; the kernel's has ETIMEDOUT: no peer
                raise ReplyTimeout(f"No reply from {url} within {self._server.reply_timeout_s:g} s") from exc
            raise ConnectionClosed(f"Connection to {url} closed: {exc}") from exc


def _blocks(body: bytes | BinaryIO | None) -> Iterator[bytes]:
    if isinstance(body, bytes):
        yield body
    elif body is not None:
        # RFC 9112, 7.1. For files of known length too: that may change while they are read.
        while block := body.read(_BLOCK_BYTES):
            yield b"%x\r\n%b\r\n" % (len(block), block)
        yield b"0\r\n\r\n"


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all certificates: tens of milliseconds


def _let_kernel_watch(sock: socket.socket) -> None:
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_S * 1000)
