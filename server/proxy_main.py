"""The egress proxy's process: accepts what episodes connect to, and connects them from the host's network.

An episode's listener was made in its network namespace and came here as a descriptor, so its connections are accepted
here, while what this process opens leaves from the host's namespace. `proxy.py` does the HTTP (parsing, rewriting,
CONNECT, error answers) through `HttpProtocolHandler` and the plugins below; what is ours is the accepting, the event
loop and the policy. The library's own loops were not usable: one polls every 25 ms in a thread per connection, the
other stops all connections while it resolves and connects one.

    server -> proxy    {"id", "op": "add", "name", "allowed_hosts"} and the listener; {"id", "op": "remove", "name"}
    proxy -> server    {"id"}

Started by `proxy.EgressProxy`; ends when the server closes its end of the channel, as the kernel does if it is killed.
"""

import argparse
import asyncio
import concurrent.futures
import logging
import os
import resource
import selectors
import socket
import sys
from typing import Any

from proxy.common.flag import flags as library_flags
from proxy.http.connection import HttpClientConnection
from proxy.http.exception import HttpRequestRejected
from proxy.http.handler import HttpProtocolHandler
from proxy.http.parser import HttpParser, httpParserStates, httpParserTypes
from proxy.http.proxy import HttpProxyBasePlugin, HttpProxyPlugin

from tbench2_env.isolation.channel import Channel, ChannelClosed
from tbench2_env.server.proxy_policy import Policy, Refused

#: Connections of one episode at once; more are closed.
CONNECTIONS_MAX = 64
#: Names that one episode resolves and hosts that it connects to at once; more wait.
CONNECTING_MAX = 16
#: Seconds without a byte in either direction after which a connection is closed.
IDLE_TIMEOUT_S = 300.0
#: Bytes of a request up to its empty line.
HEAD_MAX = 64 << 10
#: Bytes of one read or write, and the number of reads that are kept for a side that is slower than the other.
_CHUNK, _CHUNKS_KEPT = 256 << 10, 4
#: Seconds to stop accepting when there is no descriptor left.
_NO_DESCRIPTORS_S = 1.0


class RequestHead(HttpParser):
    """A request that is complete without its body, which is streamed."""

    def parse(self, raw: memoryview, allowed_url_schemes: list[bytes] | None = None) -> None:
        super().parse(raw, allowed_url_schemes)
        if self.state == httpParserStates.HEADERS_COMPLETE:
            self.state = httpParserStates.COMPLETE


class Gate(HttpProxyBasePlugin):
    """Checks the destination, and has the library connect to the very address that was checked."""

    _address: str

    def before_upstream_connection(self, request: HttpParser) -> HttpParser:
        if not request.host or not request.port:
            raise HttpRequestRejected(400, b"Bad Request")
        try:
            self._address = self.flags.policy.address_of(request.host.decode(), request.port)
        except Refused as refusal:
            raise _rejected(403, f"Forbidden: {refusal}") from None
        except (OSError, UnicodeError) as error:
            raise _rejected(502, f"Bad Gateway: {request.host.decode(errors='replace')}: {error}") from None
        return request

    def resolve_dns(self, host: str, port: int) -> tuple[str, None]:
        return self._address, None

    def handle_client_request(self, request: HttpParser) -> HttpParser:
        # The next request may be for another host, so each has a connection of its own.
        if not request.is_https_tunnel:
            request.add_header(b"Connection", b"close")
        return request

    def handle_upstream_chunk(self, chunk: memoryview) -> None:
        # Passed on here, because the library would otherwise keep the whole answer.
        self.client.queue(chunk)


def _rejected(status: int, sentence: str) -> HttpRequestRejected:
    """The sentence is the reason, too: that is all of a refused CONNECT which clients show."""
    text = sentence.encode("ascii", "backslashreplace")
    return HttpRequestRejected(status, text, {b"Content-Type": b"text/plain"}, text + b"\n")


class Forwarding(HttpProxyPlugin):
    """The library's proxying, with request bodies passed on as they come, and without its access log."""

    def on_client_data(self, raw: memoryview) -> None:
        if self.upstream is not None:
            self.upstream.queue(raw)

    def on_client_connection_close(self) -> None:
        if self.upstream is not None:
            self.upstream.close()


class Connection(HttpProtocolHandler):
    """One connection of an episode. Reading waits for the side that is slower."""

    def __init__(self, sock: socket.socket, flags: argparse.Namespace) -> None:
        super().__init__(HttpClientConnection(sock), flags=flags)
        self.request = RequestHead(httpParserTypes.REQUEST_PARSER)

    async def get_events(self) -> dict[int, int]:
        events: dict[int, int] = await super().get_events()
        upstream = getattr(self.plugin, "upstream", None)
        client_fd = self.work.connection.fileno()
        for fd in events:
            reader = upstream if fd == client_fd else self.work
            if self.reads_teared or (reader is not None and len(reader.buffer) >= _CHUNKS_KEPT):
                events[fd] &= ~selectors.EVENT_READ
        return events

    @property
    def finished(self) -> bool:
        return self.reads_teared and not self.work.has_buffer()

    async def serve(self, connecting: concurrent.futures.Executor) -> None:
        """Serve the request, then pass bytes until either side is done. Raises: OSError, TimeoutError."""
        self.initialize()
        head, rest = await self._receive_head()
        loop = asyncio.get_running_loop()
        self.reads_teared = bool(await loop.run_in_executor(connecting, self.handle_data, memoryview(head)))
        if rest and not self.reads_teared:
            self.handle_data(memoryview(rest))
        while not self.finished:
            if await self.handle_events(*await _ready(await self.get_events())):
                return

    async def _receive_head(self) -> tuple[bytes, bytes]:
        """The request up to its empty line, and what followed it already."""
        received = bytearray()
        while (end := received.find(b"\r\n\r\n") + 4) < 4:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                data = await asyncio.get_running_loop().sock_recv(self.work.connection, HEAD_MAX)
            received += data
            if not data or len(received) > HEAD_MAX:
                raise ConnectionError("no request")
        return bytes(received[:end]), bytes(received[end:])


async def _ready(events: dict[int, int]) -> tuple[list[int], list[int]]:
    """Wait until one of the descriptors is ready; answers with the readable and the writable. Raises: TimeoutError."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    readable: list[int] = []
    writable: list[int] = []

    def mark(ready: list[int], fd: int) -> None:
        ready.append(fd)
        woken.set()

    try:
        for fd, mask in events.items():
            if mask & selectors.EVENT_READ:
                loop.add_reader(fd, mark, readable, fd)
            if mask & selectors.EVENT_WRITE:
                loop.add_writer(fd, mark, writable, fd)
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            await woken.wait()
    finally:
        for fd in events:
            loop.remove_reader(fd)
            loop.remove_writer(fd)
    return readable, writable


def library_settings() -> argparse.Namespace:
    """The library's settings. Its `FlagParser.initialize` is not used because it makes folders in HOME."""
    settings = library_flags.parse_args([])
    vars(settings).update(
        threadless=True, certfile=None, keyfile=None, disable_headers=[], server_recvbuf_size=_CHUNK,
        client_recvbuf_size=_CHUNK, max_sendbuf_size=_CHUNK,
        plugins={b"HttpProtocolHandlerPlugin": [Forwarding], b"HttpProxyBasePlugin": [Gate]},
    )  # fmt: skip
    return settings


class Episode:
    """An episode's listener and its connections."""

    def __init__(self, listener: socket.socket, flags: argparse.Namespace) -> None:
        self._listener, self._flags = listener, flags
        self._connections: set[asyncio.Task[None]] = set()
        self._connecting = concurrent.futures.ThreadPoolExecutor(CONNECTING_MAX)
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            asyncio.get_running_loop().remove_reader(self._listener)
            asyncio.get_running_loop().call_later(_NO_DESCRIPTORS_S, self._listen)
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(Connection(sock, self._flags)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.serve(self._connecting)
        except OSError:
            pass  # reset, or idle for too long
        finally:
            connection.shutdown()

    def close(self) -> None:
        """Close the listener and every connection."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        self._connecting.shutdown(wait=False, cancel_futures=True)


class Proxy:
    """All episodes by name, and the server's requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._episodes: dict[str, Episode] = {}
        self._settings = library_settings()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message, fds = self._channel.receive()
            getattr(self, "_" + message["op"])(message, fds)
            self._channel.send({"id": message["id"]})
        except ChannelClosed:
            os._exit(0)  # at once: a thread may be waiting for a name service

    def _add(self, message: dict[str, Any], fds: list[int]) -> None:
        hosts = message["allowed_hosts"]
        settings = argparse.Namespace(**vars(self._settings), policy=Policy(None if hosts is None else tuple(hosts)))
        self._episodes[message["name"]] = Episode(socket.socket(fileno=fds[0]), settings)

    def _remove(self, message: dict[str, Any], fds: list[int]) -> None:
        episode = self._episodes.pop(message["name"], None)
        if episode is not None:  # it may have been added to a process before this one
            episode.close()


async def run(channel_fd: int) -> None:
    """Serve until the server is gone."""
    Proxy(Channel(socket.socket(fileno=channel_fd)))
    await asyncio.Event().wait()


def main(channel_fd: int) -> None:
    logging.getLogger("proxy").setLevel(logging.CRITICAL + 1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(run(channel_fd))


if __name__ == "__main__":
    main(int(sys.argv[1]))
