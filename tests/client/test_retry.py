import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tbench2_env import CapacityReached, ConnectionClosed, ServerGone, Tbench2Env, Tbench2Error
from tbench2_env.retry import NOT_NOW, retried

Serve = Callable[..., Any]

LONG_S = 30.0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The longest each pause might have been; they are all 0 instead."""
    seen: list[float] = []

    def shortest(low: float, high: float) -> float:
        seen.append(high)
        return low

    monkeypatch.setattr("tbench2_env.retry.random.uniform", shortest)
    return seen


def pause_long(monkeypatch: pytest.MonkeyPatch, begun: Callable[[], None]) -> None:
    """After a failed attempt, call `begun` and pause for longer than any test takes."""

    def longest(low: float, high: float) -> float:
        begun()
        return LONG_S

    monkeypatch.setattr("tbench2_env.retry.random.uniform", longest)


class Failing:
    """Fails with these errors in turn, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


async def test_pauses_double_from_a_fifth_of_a_second_to_five(pauses: list[float]) -> None:
    attempt = Failing(*(CapacityReached("full") for _ in range(7)))
    assert await retried(attempt, NOT_NOW, for_s=LONG_S, stop=asyncio.Event()) == "done"
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_no_time_means_one_attempt(pauses: list[float]) -> None:
    attempt = Failing(CapacityReached("full"))
    with pytest.raises(CapacityReached):
        await retried(attempt, NOT_NOW, for_s=0, stop=asyncio.Event())
    assert (attempt.calls, pauses) == (1, [])


async def test_other_errors_end_it_at_once(pauses: list[float]) -> None:
    attempt = Failing(ServerGone("gone"), Tbench2Error("nonsense"))
    with pytest.raises(Tbench2Error, match="nonsense"):
        await retried(attempt, NOT_NOW, for_s=LONG_S, stop=asyncio.Event())
    assert attempt.calls == 2


@pytest.mark.usefixtures("pauses")
async def test_a_server_that_names_a_time_is_given_it() -> None:
    began = time.monotonic()
    await retried(Failing(CapacityReached("full", retry_after_s=0.3)), NOT_NOW, for_s=LONG_S, stop=asyncio.Event())
    assert 0.29 < time.monotonic() - began < 5


async def test_the_last_attempt_is_made_when_the_time_is_over() -> None:
    attempt, began = Failing(*(CapacityReached(str(n), retry_after_s=0.15) for n in range(9))), time.monotonic()
    with pytest.raises(CapacityReached, match=r"^[1-3]$"):
        await retried(attempt, NOT_NOW, for_s=0.4, stop=asyncio.Event())
    assert 0.39 < time.monotonic() - began < 5


async def test_a_stop_ends_the_pause() -> None:
    stop, attempt = asyncio.Event(), Failing(*(CapacityReached("full", retry_after_s=LONG_S) for _ in range(9)))
    asyncio.get_running_loop().call_later(0.1, stop.set)
    began = time.monotonic()
    with pytest.raises(CapacityReached):
        await retried(attempt, NOT_NOW, for_s=2 * LONG_S, stop=stop)
    assert time.monotonic() - began < 5
    assert attempt.calls == 2


def full_at_first(times: int) -> Callable[[Any], None]:
    def script(peer: Any) -> None:
        if len(peer.server.headers) <= times:
            peer.fail("no slot", "CAPACITY_REACHED", active_sessions=8, max_sessions=8)
        else:
            peer.serve_episode()

    return script


async def connected(server: Any, how: str) -> Tbench2Env:
    env = Tbench2Env(base_url=server.url, retry_capacity_s=0 if how == "connect" else LONG_S)
    if how == "connect":
        await env.connect(retry_capacity_s=LONG_S)
    elif how == "block":
        await env.__aenter__()
    return env


@pytest.mark.parametrize("how", ["connect", "block", "first call"])
async def test_a_full_server_is_asked_until_a_slot_is_free(serve: Serve, pauses: list[float], how: str) -> None:
    server = serve(full_at_first(3))
    env = await connected(server, how)
    assert (await env.reset(task_id="hello")).observation.instruction == "do hello"
    await env.close()
    assert len(server.headers) == 4
    assert len(pauses) == 3
    assert server.wait_ended(4)
    assert [request["type"] for request in server.requests] == ["state", "reset", "close"]


@pytest.mark.parametrize("status", [500, 503])
async def test_a_refused_handshake_is_tried_again(serve: Serve, pauses: list[float], status: int) -> None:
    async with Tbench2Env(base_url=serve(statuses=(status, status)).url, retry_capacity_s=LONG_S) as env:
        assert (await env.exec("pwd")).output == "pwd"
    assert len(pauses) == 2


async def test_a_connection_closed_before_anything_was_said_is_tried_again(serve: Serve, pauses: list[float]) -> None:
    def leave_at_first(peer: Any) -> None:
        if len(peer.server.headers) > 2:
            peer.serve_episode()

    async with Tbench2Env(base_url=serve(leave_at_first).url, retry_capacity_s=LONG_S) as env:
        assert (await env.exec("pwd")).output == "pwd"
    assert len(pauses) == 2


async def test_a_server_that_is_not_there_yet(serve: Serve, pauses: list[float]) -> None:
    with pytest.raises(ServerGone, match="Failed to connect"):
        await Tbench2Env(base_url="http://127.0.0.1:1").connect(retry_capacity_s=0.05)
    assert pauses


async def test_the_last_error_is_raised_when_the_time_is_over(serve: Serve) -> None:
    server = serve(full_at_first(99))
    began = time.monotonic()
    with pytest.raises(CapacityReached) as caught:
        await Tbench2Env(base_url=server.url).connect(retry_capacity_s=0.5)
    assert 0.49 < time.monotonic() - began < 5
    assert caught.value.max_sessions == 8
    assert len(server.headers) >= 2


async def test_a_plain_connect_asks_nothing_and_connect_can_switch_trying_off(serve: Serve) -> None:
    server = serve(full_at_first(1))
    env = Tbench2Env(base_url=server.url, retry_capacity_s=LONG_S)
    await env.connect(retry_capacity_s=0)
    with pytest.raises(CapacityReached):
        await env.reset()
    await env.close()
    assert server.requests == []


async def test_a_server_that_accepts_and_is_silent(serve: Serve) -> None:
    server = serve(lambda peer: peer.wait_until_lost())
    env = Tbench2Env(base_url=server.url, connect_timeout_s=0.3)
    with pytest.raises(ServerGone, match=r"no reply within 0\.3 s"):
        await env.connect(retry_capacity_s=0.01)
    assert await asyncio.to_thread(server.wait_ended)


@pytest.mark.parametrize("how", ["full", "absent"])
async def test_closing_ends_the_trying(serve: Serve, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pausing = asyncio.Event()
    pause_long(monkeypatch, pausing.set)
    env = Tbench2Env(base_url=serve(full_at_first(99)).url if how == "full" else "http://127.0.0.1:1")
    trying = asyncio.create_task(env.connect(retry_capacity_s=LONG_S))
    await pausing.wait()  # closed in the middle of an attempt, it would raise what the attempt does
    began = time.monotonic()
    await env.close()
    with pytest.raises(ConnectionClosed, match="closed"):
        await trying
    assert time.monotonic() - began < 5


async def test_cancelling_ends_the_trying(serve: Serve) -> None:
    server = serve(full_at_first(99))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Tbench2Env(base_url=server.url).connect(retry_capacity_s=LONG_S), 0.3)
    seen = len(server.headers)
    assert await asyncio.to_thread(server.wait_ended, seen)
    await asyncio.sleep(0.3)
    assert len(server.headers) == seen


async def test_cancelling_while_making_sure_hangs_up(serve: Serve) -> None:
    server = serve(lambda peer: peer.wait_until_lost())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Tbench2Env(base_url=server.url).connect(retry_capacity_s=LONG_S), 0.3)
    assert await asyncio.to_thread(server.wait_ended)


def test_the_blocking_client_tries_again_too(serve: Serve, pauses: list[float]) -> None:
    with Tbench2Env(base_url=serve(full_at_first(2)).url, retry_capacity_s=LONG_S).sync() as env:
        assert env.exec("pwd").output == "pwd"
    env = Tbench2Env(base_url=serve(full_at_first(2)).url).sync()
    assert env.connect(retry_capacity_s=LONG_S).exec("pwd").output == "pwd"
    env.close()
    assert len(pauses) == 4


def test_closing_the_blocking_client_from_another_thread_ends_the_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        env = Tbench2Env(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}").sync()
        closer = threading.Timer(0.1, env.close)
        pause_long(monkeypatch, closer.start)
        with pytest.raises(ConnectionClosed):
            env.connect(retry_capacity_s=LONG_S)
        closer.join()
