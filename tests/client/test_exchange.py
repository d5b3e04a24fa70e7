import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.talk import soon
from tbench2_env import ServerGone
from tbench2_env.exchange import Exchange, Request, Server

Serve = Callable[..., Any]


def server_at(base_url: str, *, connect_timeout_s: float = 5) -> Server:
    return Server.at(base_url, headers={}, connect_timeout_s=connect_timeout_s, reply_timeout_s=5)


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://localhost:8003", "http://localhost:8003"),
        ("http://localhost:8003/", "http://localhost:8003"),
        ("https://host/env/", "https://host/env"),
        ("ws://10.0.0.1:8003", "http://10.0.0.1:8003"),
        ("WSS://host", "https://host"),
        ("localhost:8003", "http://localhost:8003"),
        ("http://[::1]:8003", "http://[::1]:8003"),
    ],
)
def test_base_urls(base_url: str, expected: str) -> None:
    assert server_at(base_url).url == expected


@pytest.mark.parametrize("base_url", ["ftp://host", "http://", "", "http://host:port"])
def test_a_base_url_of_another_kind_is_refused(base_url: str) -> None:
    with pytest.raises(ValueError, match=r"base_url|[Pp]ort"):
        server_at(base_url)


def test_a_password_in_the_base_url_is_refused_but_not_shown() -> None:
    with pytest.raises(ValueError, match="token=") as caught:
        server_at("http://user:secret@host")
    assert "secret" not in str(caught.value)


async def test_a_prefix_comes_before_every_route(serve_http: Serve) -> None:
    site = serve_http(lambda asked: asked.answer(200, b"x"))
    assert await Exchange(server_at(f"{site.url}/env"), Request("GET", "/health")).reply() == b"x"
    assert site.heard == ["GET /env/health"]


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:1", "http://name.invalid", f"http://{'x' * 70}.invalid"])
async def test_nothing_there(base_url: str) -> None:
    with pytest.raises(ServerGone, match="Failed to connect"):
        await Exchange(server_at(base_url), Request("GET", "/")).reply()


async def test_a_peer_that_does_not_speak_tls(serve_http: Serve) -> None:
    site = serve_http(lambda asked: None)
    with pytest.raises(ServerGone, match="Failed to connect to https"):
        await Exchange(server_at(site.url.replace("http", "https")), Request("GET", "/")).reply()


async def test_aborting_while_it_connects_does_not_wait_and_sends_nothing() -> None:
    # A full backlog: the kernel leaves further connections unanswered.
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        server = server_at(f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Exchange(server, Request("GET", "/")).reply(), 0.2)
    await asyncio.to_thread(join_threads)


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "tbench2-env-http":
            thread.join(10)
            assert not thread.is_alive()


async def test_the_kernel_watches_the_connection(serve_http: Serve) -> None:
    exchange = Exchange(server_at(serve_http(lambda asked: asked.wait_until_lost()).url), Request("GET", "/"))
    waiting = asyncio.create_task(exchange.reply())
    await soon(lambda: exchange._socket is not None, 5)
    assert exchange._socket is not None
    assert exchange._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert exchange._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
