import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tbench2_env import ExecutionFailed, ServerGone, Tbench2Action, Tbench2Env, Tbench2Error
from tbench2_env.client import _ws_url

Serve = Callable[..., Any]


async def test_an_episode_from_reset_to_verdict(serve: Serve) -> None:
    async with Tbench2Env(base_url=serve().url) as env:
        first = await env.reset(task_id="hello", seed=1)
        assert (first.observation.instruction, first.reward, first.done) == ("do hello", None, False)
        assert (await env.step(Tbench2Action(command="pwd"))).observation.output == "pwd"
        verdict = await env.evaluate()
    assert (verdict.reward, verdict.done) == (1.0, True)
    assert (verdict.observation.reward, verdict.observation.done) == (1.0, True)
    assert verdict.observation.info["harness"] == "tests/test.sh"


async def test_what_goes_over_the_wire(serve: Serve) -> None:
    server = serve()
    async with Tbench2Env(base_url=server.url) as env:
        await env.reset(task_id="hello", seed=1)
        await env.exec("make", session_id="build", block=False)
        await env.write_file("a.txt", "EOF\n'")
        await env.state()
    assert server.wait_ended()
    reset, exec_, write, state, close = server.requests
    assert reset == {"type": "reset", "data": {"task_id": "hello", "seed": 1}}
    action = Tbench2Action(command="make", session_id="build", block=False)
    assert exec_ == {"type": "step", "data": action.model_dump()}
    assert (write["data"]["action_type"], write["data"]["file_path"]) == ("write_file", "a.txt")
    assert write["data"]["content"] == "EOF\n'"
    assert state == {"type": "state"}
    assert close == {"type": "close"}


async def test_state_has_further_fields_too(serve: Serve) -> None:
    async with Tbench2Env(base_url=serve().url) as env:
        state = await env.state()
    assert (state.episode_id, state.step_count) == ("e1", 1)
    assert state.model_dump()["queue"] == 3


async def test_headers_are_sent_with_the_opening_request(serve: Serve) -> None:
    server = serve()
    async with Tbench2Env(base_url=server.url, headers={"Authorization": "Bearer t"}) as env:
        await env.state()
    assert server.headers[0]["authorization"] == "Bearer t"


async def test_the_first_call_connects_and_so_does_the_first_after_close(serve: Serve) -> None:
    server = serve()
    env = Tbench2Env(base_url=server.url)
    await env.close()
    for _ in range(2):
        await env.reset(task_id="hello")
        await env.close()
        await env.close()
        assert server.wait_ended()
    assert [request["type"] for request in server.requests] == ["reset", "close"] * 2


async def test_connecting_twice_keeps_the_session(serve: Serve) -> None:
    server = serve()
    async with Tbench2Env(base_url=server.url) as env:
        assert await env.connect() is env
        await asyncio.gather(env.connect(), env.state(), env.state())
    assert len(server.headers) == 1


async def test_first_calls_at_the_same_time_share_one_session(serve: Serve) -> None:
    server = serve()
    env = Tbench2Env(base_url=server.url)
    replies = await asyncio.gather(*(env.exec(f"echo {n}") for n in range(5)))
    await env.close()
    assert [reply.output for reply in replies] == [f"echo {n}" for n in range(5)]
    assert len(server.headers) == 1


async def test_an_error_frame_leaves_the_session_usable(serve: Serve) -> None:
    def fail_once(peer: Any) -> None:
        peer.request()
        peer.fail("boom", "EXECUTION_ERROR")
        peer.serve_episode()

    async with Tbench2Env(base_url=serve(fail_once).url) as env:
        with pytest.raises(ExecutionFailed, match=r"^Server error: boom \(code: EXECUTION_ERROR\)$"):
            await env.reset()
        assert (await env.exec("pwd")).output == "pwd"


@pytest.mark.parametrize("data", [{}, {"observation": None}, {"observation": {"output": [1]}}])
async def test_an_observation_of_the_wrong_shape_is_an_error_of_ours(serve: Serve, data: dict[str, Any]) -> None:
    def misshape(peer: Any) -> None:
        peer.request()
        peer.send("observation", data)
        peer.serve_episode()

    async with Tbench2Env(base_url=serve(misshape).url) as env:
        with pytest.raises(Tbench2Error, match="observation") as caught:
            await env.exec("pwd")
        assert caught.value.code == "BAD_REPLY"
        assert (await env.exec("pwd")).output == "pwd"


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://localhost:8003", "ws://localhost:8003/ws"),
        ("http://localhost:8003/", "ws://localhost:8003/ws"),
        ("https://host/env", "wss://host/env/ws"),
        ("ws://10.0.0.1:8003", "ws://10.0.0.1:8003/ws"),
        ("WSS://host", "wss://host/ws"),
        ("localhost:8003", "ws://localhost:8003/ws"),
    ],
)
def test_base_urls(base_url: str, expected: str) -> None:
    assert _ws_url(base_url) == expected


def test_a_base_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="ftp://host"):
        Tbench2Env(base_url="ftp://host")


async def test_a_ws_url_connects(serve: Serve) -> None:
    async with Tbench2Env(base_url=serve().url.replace("http", "ws")) as env:
        assert (await env.exec("pwd")).output == "pwd"


async def test_a_failed_connect_is_tried_again_by_the_next_call() -> None:
    env = Tbench2Env(base_url="http://127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(ServerGone, match=r"ws://127\.0\.0\.1:1/ws"):
            await env.reset()


def test_a_plain_with_tells_of_sync() -> None:
    with pytest.raises(TypeError, match=r"\.sync\(\)"), Tbench2Env(base_url="http://localhost:8003"):
        pass
