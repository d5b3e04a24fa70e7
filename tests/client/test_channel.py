"""What can go wrong on a connection, seen through `Tbench2Env`."""

import asyncio
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed as WsConnectionClosed
from websockets.http11 import Request
from websockets.server import ServerProtocol

from tbench2_env import CapacityReached, ConnectionClosed, ReplyTimeout, ServerGone, Tbench2Env, Tbench2Error, channel
from tbench2_env.channel import Channel

Serve = Callable[..., Any]

AT_ONCE_S = 2.0


def miles_would_retry(error: BaseException) -> bool:
    """`_is_retryable_env_error` of Miles' openenv_agent_function.py."""
    closed = {"ConnectionClosedOK", "ConnectionClosedError", "ConnectionClosed"}
    return "CAPACITY_REACHED" in str(error) or type(error).__name__ in closed


async def noticed_by(server: Any) -> bool:
    return bool(await asyncio.to_thread(server.wait_ended))


def turn_away(peer: Any) -> None:
    peer.fail("no slot", "CAPACITY_REACHED", active_sessions=8, max_sessions=8)


def answer_reset_then_hang(peer: Any) -> None:
    peer.answer(peer.request())
    peer.request()
    peer.wait_until_lost()


@pytest.mark.parametrize("pause_s", [0, 0.3])
async def test_capacity_is_reported_even_if_said_before_the_request(serve: Serve, pause_s: float) -> None:
    async with Tbench2Env(base_url=serve(turn_away).url) as env:
        await asyncio.sleep(pause_s)
        with pytest.raises(CapacityReached) as caught:
            await env.reset(task_id="hello")
        assert (caught.value.active_sessions, caught.value.max_sessions) == (8, 8)
        assert miles_would_retry(caught.value)
        with pytest.raises(ConnectionClosed) as after:
            await env.reset(task_id="hello")
        assert miles_would_retry(after.value)


async def test_capacity_said_after_the_request(serve: Serve) -> None:
    def turn_away_late(peer: Any) -> None:
        peer.request()
        turn_away(peer)

    async with Tbench2Env(base_url=serve(turn_away_late).url) as env:
        with pytest.raises(CapacityReached):
            await env.reset(task_id="hello")


async def test_a_connection_closed_in_mid_call_is_retryable_and_says_why(serve: Serve) -> None:
    def leave(peer: Any) -> None:
        peer.request()
        peer.ws.close(1011, "on fire")

    async with Tbench2Env(base_url=serve(leave).url) as env:
        with pytest.raises(ConnectionClosed, match="on fire") as caught:
            await env.exec("true")
    assert caught.value.code == "CONNECTION_LOST"
    assert isinstance(caught.value.__cause__, WsConnectionClosed)
    assert miles_would_retry(caught.value)


async def test_a_connection_cut_in_mid_call(serve: Serve) -> None:
    def cut(peer: Any) -> None:
        peer.request()
        peer.ws.socket.shutdown(socket.SHUT_RDWR)

    async with Tbench2Env(base_url=serve(cut).url) as env:
        with pytest.raises(ConnectionClosed):
            await env.exec("true")


async def test_a_lost_connection_is_not_replaced_until_asked(serve: Serve) -> None:
    server = serve(lambda peer: peer.answer(peer.request()))
    async with Tbench2Env(base_url=server.url) as env:
        await env.reset(task_id="hello")
        for _ in range(3):
            with pytest.raises(ConnectionClosed):
                await env.exec("true")
        assert len(server.headers) == 1
        await env.connect()
        await env.reset(task_id="hello")
    assert len(server.headers) == 2


async def test_cancelling_a_call_ends_the_session_at_once(serve: Serve) -> None:
    server = serve(answer_reset_then_hang)
    async with Tbench2Env(base_url=server.url) as env:
        await env.reset(task_id="hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.exec("sleep 100"), 0.1)
        assert await noticed_by(server)
        with pytest.raises(ConnectionClosed, match="cancelled"):
            await env.exec("true")
    assert len(server.headers) == 1


async def test_leaving_the_block_by_cancellation_is_quick(serve: Serve) -> None:
    server = serve(answer_reset_then_hang)

    async def episode() -> None:
        async with Tbench2Env(base_url=server.url) as env:
            await env.reset(task_id="hello")
            await env.exec("sleep 100")

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(episode(), 0.5)
    assert time.monotonic() - began < AT_ONCE_S
    assert await noticed_by(server)


async def test_a_late_reply_is_nobody_elses(serve: Serve) -> None:
    def answer_late_at_first(peer: Any) -> None:
        request = peer.request()
        if len(peer.server.headers) == 1:
            time.sleep(0.3)
        peer.answer(request)

    env = Tbench2Env(base_url=serve(answer_late_at_first).url)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.exec("late"), 0.1)
    await env.connect()
    await asyncio.sleep(0.4)
    assert (await env.exec("mine")).output == "mine"
    await env.close()


async def test_no_reply_in_time_ends_the_session(serve: Serve) -> None:
    server = serve(answer_reset_then_hang)
    async with Tbench2Env(base_url=server.url, message_timeout_s=0.2) as env:
        await env.reset(task_id="hello")
        with pytest.raises(ReplyTimeout, match=r"within 0\.2 s") as caught:
            await env.exec("sleep 100")
        assert caught.value.code == "REPLY_TIMEOUT"
        assert await noticed_by(server)
        with pytest.raises(ConnectionClosed):
            await env.exec("true")


async def test_calls_take_turns(serve: Serve) -> None:
    def answer_one_at_a_time(peer: Any) -> None:
        while (request := peer.request())["type"] != "close":
            with pytest.raises(TimeoutError):
                peer.request(timeout_s=0.05)
            peer.answer(request)

    async with Tbench2Env(base_url=serve(answer_one_at_a_time).url) as env:
        replies = await asyncio.gather(*(env.exec(f"echo {n}") for n in range(4)))
    assert [reply.output for reply in replies] == [f"echo {n}" for n in range(4)]


async def test_cancelling_a_call_that_waits_for_its_turn_harms_nobody(serve: Serve) -> None:
    def answer_slowly(peer: Any) -> None:
        while (request := peer.request())["type"] != "close":
            time.sleep(0.3)
            peer.answer(request)

    server = serve(answer_slowly)
    async with Tbench2Env(base_url=server.url) as env:
        first = asyncio.create_task(env.exec("first"))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.exec("second"), 0.1)
        assert (await first).output == "first"
        assert (await env.exec("third")).output == "third"
    assert await noticed_by(server)
    assert [request["data"]["command"] for request in server.requests[:-1]] == ["first", "third"]


async def test_closing_ends_the_calls_under_way(serve: Serve) -> None:
    server = serve(answer_reset_then_hang)
    env = Tbench2Env(base_url=server.url)
    await env.reset(task_id="hello")
    calls = [asyncio.create_task(env.exec("sleep 100")) for _ in range(2)]
    await asyncio.sleep(0.1)
    await env.close()
    assert all(call.done() for call in calls)
    assert [type(result) for result in await asyncio.gather(*calls, return_exceptions=True)] == [ConnectionClosed] * 2
    assert len(server.headers) == 1


async def test_closing_does_not_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_GOODBYE_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted = threading.Thread(target=upgrade_and_hang, args=(listener,))
        accepted.start()
        env = Tbench2Env(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        await env.connect()
        began = time.monotonic()
        await env.close()
        assert time.monotonic() - began < AT_ONCE_S
        await asyncio.to_thread(accepted.join)


def upgrade_and_hang(listener: socket.socket) -> None:
    """Speak just enough to be connected to, then answer nothing until the other side is gone."""
    protocol = ServerProtocol()
    peer, _ = listener.accept()
    with peer:
        protocol.receive_data(peer.recv(65536))
        [request] = protocol.events_received()
        assert isinstance(request, Request)
        protocol.send_response(protocol.accept(request))
        peer.sendall(b"".join(protocol.data_to_send()))
        while peer.recv(65536):
            pass


@pytest.mark.parametrize("reply", ["no json", "[1]", '{"type":"state","data":{}}', '{"type":"observation"}'])
async def test_a_reply_without_sense_ends_the_session(serve: Serve, reply: str) -> None:
    def babble(peer: Any) -> None:
        peer.request()
        peer.ws.send(reply)
        peer.wait_until_lost()

    server = serve(babble)
    async with Tbench2Env(base_url=server.url) as env:
        with pytest.raises(Tbench2Error, match="Unexpected reply") as caught:
            await env.exec("true")
        assert caught.value.code == "BAD_REPLY"
        assert await noticed_by(server)
        with pytest.raises(ConnectionClosed):
            await env.exec("true")


async def test_an_observation_nobody_asked_for_is_no_reply(serve: Serve) -> None:
    def speak_first(peer: Any) -> None:
        peer.observe(output="unasked")
        peer.wait_until_lost()

    async with Tbench2Env(base_url=serve(speak_first).url) as env:
        await asyncio.sleep(0.5)
        with pytest.raises(Tbench2Error, match="unasked"):
            await env.exec("true")


async def test_a_reply_may_be_large_but_not_too_large(serve: Serve) -> None:
    def answer_at_length(peer: Any) -> None:
        peer.request()
        peer.observe(output="x" * 3_000_000)
        peer.request()

    server = serve(answer_at_length)
    async with Tbench2Env(base_url=server.url) as env:
        assert len((await env.exec("true")).output) == 3_000_000
    async with Tbench2Env(base_url=server.url, max_message_size_mb=1) as env:
        with pytest.raises(ConnectionClosed, match="1009"):
            await env.exec("true")


async def test_a_local_server_is_reached_without_the_proxy(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for host in ("127.0.0.1", "localhost"):
        async with Tbench2Env(base_url=serve().url.replace("127.0.0.1", host)) as env:
            assert (await env.exec("pwd")).output == "pwd"


async def test_the_kernel_watches_the_connection_not_the_event_loops(serve: Serve) -> None:
    opened = await Channel.open(
        serve().url.replace("http", "ws"), connect_timeout_s=5, reply_timeout_s=5, max_message_bytes=1000, headers={}
    )
    sock = opened._ws.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
    assert opened._ws.ping_timeout is None
    await opened.close()


async def test_nothing_listens() -> None:
    with pytest.raises(ServerGone, match=r"^Failed to connect to ws://127\.0\.0\.1:1/ws: ") as caught:
        await Tbench2Env(base_url="http://127.0.0.1:1").connect()
    assert isinstance(caught.value, ConnectionError)
    assert not miles_would_retry(caught.value)


async def test_something_else_listens() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with pytest.raises(ServerGone, match="Failed to connect"):
                await Tbench2Env(base_url=f"http://127.0.0.1:{other.server_port}").connect()
        finally:
            other.shutdown()
            thread.join()


async def test_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = Tbench2Env(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.2)
        with pytest.raises(ServerGone, match="timed out"):
            await env.connect()


async def test_a_request_that_is_no_json_is_the_callers_error_and_not_sent(serve: Serve) -> None:
    server = serve()
    async with Tbench2Env(base_url=server.url) as env:
        with pytest.raises(TypeError):
            await env.reset(seed=object())
        assert (await env.exec("pwd")).output == "pwd"
    assert json.dumps(server.requests).count("reset") == 0
