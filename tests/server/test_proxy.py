"""The egress proxy: a real process between real network namespaces, none of which leads off this machine.

`node` plays the host: it has addresses on two interfaces. `web` is beyond it, on 198.51.100.2. `Episode` has its own
loopback only, with the proxy's listener on it.
"""

import asyncio
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.netns import NetworkNamespace
from support.server import descendants
from tbench2_env.isolation.spec import PROXY_PORT
from tbench2_env.server.proxy import EgressError, EgressProxy, proxy_env

NODE, NODE_ETH0, WEB, WEB_2 = "198.51.100.1", "203.0.113.7", "198.51.100.2", "198.51.100.3"
HOSTS = f"{WEB} web.test\n{WEB_2} sub.example.test\n{WEB_2} example.test\n{WEB_2} badexample.test\n"
MB = 1 << 20


class Web(http.server.BaseHTTPRequestHandler):
    """Answers GET /N with N bytes, and POST with the body and the headers that it got."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/where":
            return self._answer(f"{self.headers['Host']} at {self.connection.getsockname()[0]}".encode())
        if self.path == "/never":
            time.sleep(20)
        return self._answer(b"x" * int(self.path[1:] or 0))

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class WebServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(("", 0), Web, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()

    def handle_error(self, *arguments: object) -> None:
        pass  # clients that leave


@pytest.fixture(scope="module")
def node() -> Iterator[NetworkNamespace]:
    """The host's namespace, wired to `web`'s, in which web servers answer on port 80."""
    node, web = NetworkNamespace(), NetworkNamespace()
    node.ip(f"link add veth0 type veth peer name eth0 netns /proc/{os.getpid()}/fd/{web.fd}")
    for command in (f"addr add {NODE}/24 dev veth0", "link set veth0 up", "link add eth0 type dummy",
                    f"addr add {NODE_ETH0}/24 dev eth0", "addr add 2001:db8::7/64 dev eth0 nodad",
                    "link set eth0 up"):  # fmt: skip
        node.ip(command)
    for command in (f"addr add {WEB}/24 dev eth0", f"addr add {WEB_2}/24 dev eth0", "link set eth0 up"):
        web.ip(command)
    servers = [WebServer(web.listen("", 80)), WebServer(node.listen("", 80))]
    yield node
    for server in servers:
        server.shutdown()
        server.server_close()
    node.close()
    web.close()


@pytest.fixture
async def proxy(node: NetworkNamespace) -> AsyncIterator[EgressProxy]:
    """A proxy on the node; nothing of it is left after the test."""
    before = set(os.listdir("/proc/self/fd"))
    with node.entered():
        proxy = EgressProxy()
        yield proxy
        await proxy.stop()
    assert not proxy.alive
    assert not [line for line in descendants(os.getpid()).values() if "proxy_main" in line]
    assert set(os.listdir("/proc/self/fd")) == before


class Episode:
    """An episode's network."""

    def __init__(self) -> None:
        self.network = NetworkNamespace()
        with self.network.listen("127.0.0.1", PROXY_PORT) as listener:
            self.listener = os.dup(listener.fileno())

    def close(self) -> None:
        os.close(self.listener)
        self.network.close()

    async def curl(self, *arguments: str, within_s: float = 20.0) -> tuple[int, str]:
        """curl by way of the proxy: (exit status, output with the answer's status in the last line)."""
        argv = ("curl", "-sS", "--proxy", f"http://127.0.0.1:{PROXY_PORT}", "--noproxy", "", *arguments)
        return await self.network.run(*argv, "-w", "\n%{http_connect} %{http_code}", within_s=within_s)

    def connect(self) -> socket.socket:
        return self.network.connect("127.0.0.1", PROXY_PORT)

    def tunnel(self, host: str = WEB) -> socket.socket:
        """A connection to the web server through CONNECT."""
        sock = self.connect()
        sock.sendall(f"CONNECT {host}:80 HTTP/1.1\r\nHost: {host}:80\r\n\r\n".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        return sock


@pytest.fixture
async def make_episode(proxy: EgressProxy) -> AsyncIterator["MakeEpisode"]:
    make = MakeEpisode(proxy)
    yield make
    for name, episode in make.episodes.items():
        await proxy.remove(name)
        episode.close()


class MakeEpisode:
    """`await make_episode("a", "web.test")`: an episode that the proxy serves; without hosts, all are allowed."""

    def __init__(self, proxy: EgressProxy) -> None:
        self._proxy, self.episodes = proxy, dict[str, Episode]()

    async def __call__(self, name: str = "a", *allowed: str) -> Episode:
        episode = self.episodes[name] = Episode()
        await self._proxy.add(name, episode.listener, allowed or None)
        return episode


async def test_get_through_the_proxy(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    assert await a.curl(f"http://{WEB}/where") == (0, f"{WEB} at {WEB}\n000 200")


async def test_connect_through_the_proxy(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    assert await a.curl("--proxytunnel", f"http://{WEB}/where") == (0, f"{WEB} at {WEB}\n200 200")
