"""A client that is lost in mid-command: noticed at once, and nothing of its episode is left. CASE 19."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.processes import Stopped, launcher, running, spawner
from support.server import DESCRIPTOR_SLACK, HELPERS, MakeServer, Server
from support.talk import (
    Wire,
    async_http,
    bare_websocket,
    begin,
    http,
    message,
    metric,
    slots_active,
    soon,
    text_frame,
    wire,
)
from tbench2_env import Tbench2Env

#: The promise is one second; the machine that tests may be slow.
GONE_WITHIN_S = 2.0
BATCH, BATCHES = 40, 5

#: The server, with a ping each 0.3 s and two seconds to answer it in place of 20 s and 60 s.
_SHORT_PINGS = """
import sys
from tbench2_env.server import app
app._PING_INTERVAL_S, app._PING_TIMEOUT_S = 0.3, 2.0
sys.argv[1:] = sys.argv[4:]
app.main()
"""


async def _nothing_left(server: Server) -> None:
    """Within the promised time: no process, worktree or slot."""

    def left() -> tuple[dict[int, str], list[str], int]:
        return server.descendants(), server.worktrees(), slots_active(server)

    def none() -> bool:
        processes, worktrees, slots = left()
        return len(processes) == HELPERS and not worktrees and slots == 0

    await soon(none, GONE_WITHIN_S, lambda: f"left: {left()}")


async def test_200_dropped_sockets_leave_nothing_twice(server: Server) -> None:
    async def lost_in_mid_command(ready: asyncio.Semaphore, drop: asyncio.Event) -> None:
        async with wire(server) as session:
            await session.reset()
            await session.tell("step", {"command": "sleep 999"})
            ready.release()
            await drop.wait()
            session.drop()

    before = server.descriptors()
    for _ in range(2):
        for _ in range(BATCHES):
            ready, drop = asyncio.Semaphore(0), asyncio.Event()
            sessions = [asyncio.create_task(lost_in_mid_command(ready, drop)) for _ in range(BATCH)]
            for _ in range(BATCH):
                async with asyncio.timeout(60):
                    await ready.acquire()
            await soon(lambda: len(running(server, "sleep 999")) == BATCH, 20)
            drop.set()
            await asyncio.gather(*sessions)
            await _nothing_left(server)
        assert server.descriptors() <= before + DESCRIPTOR_SLACK


async def _in_exec(session: Wire) -> None:
    await session.tell("step", {"command": "sleep 999"})


async def _in_evaluate(session: Wire) -> None:
    await session.reset("hang")
    await session.tell("step", {"action_type": "evaluate"})


async def _in_terminal_wait(session: Wire) -> None:
    await session.step(command="sleep 999", session_id="t", block=False)
    await session.tell("step", {"action_type": "wait", "session_id": "t", "wait_seconds": 600})


async def _in_terminal_write(session: Wire) -> None:
    await session.step(command="sleep 999", session_id="t", block=False)
    await session.tell("step", {"action_type": "write", "session_id": "t", "command": "x" * 100_000})


async def _with_background_jobs(session: Wire) -> None:
    await session.step(command="setsid sleep 999 & nohup sleep 999 & (trap '' TERM HUP; sleep 999)& echo")


async def _with_messages_ahead(session: Wire) -> None:
    await session.tell("step", {"command": "sleep 999"})
    for _ in range(20):
        await session.tell("state")


MOMENTS: list[Callable[[Wire], Awaitable[None]]] = [
    _in_exec,
    _in_evaluate,
    _in_terminal_wait,
    _in_terminal_write,
    _with_background_jobs,
    _with_messages_ahead,
]


@pytest.mark.parametrize("farewell", ["reset", "close frame"])
@pytest.mark.parametrize("begin_to", MOMENTS, ids=lambda moment: moment.__name__.strip("_"))
async def test_lost(server: Server, begin_to: Callable[[Wire], Awaitable[None]], farewell: str) -> None:
    ends = metric(server, "tbench2_ends_total", reason="disconnected")
    async with wire(server) as session:
        await session.reset()
        await begin_to(session)
        await soon(lambda: running(server, "sleep 999"), 5)
        if farewell == "reset":
            session.drop()
        else:
            await session.ws.close()
        await _nothing_left(server)
    assert metric(server, "tbench2_ends_total", reason="disconnected") == ends + 1


async def test_lost_in_the_middle_of_a_message(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        await session.tell("step", {"command": "sleep 999"})
        frame = text_frame(b'{"type":"step","data":{"command":"' + b"x" * (5 << 20))
        session.ws.transport.write(frame[: 1 << 20])
        await soon(lambda: running(server, "sleep 999"), 5)
        session.drop()
        await _nothing_left(server)


@pytest.mark.parametrize("ahead", [63, 65, 500])
async def test_lost_with_many_messages_ahead(server: Server, ahead: int) -> None:
    """A client that sends on without waiting for answers is lost like any other."""
    async with wire(server) as session:
        await session.reset()
        await session.tell("step", {"command": "sleep 999", "metadata": {"x": "y" * 1000}})
        for _ in range(ahead):
            await session.tell("state")
        await soon(lambda: running(server, "sleep 999"), 5)
        await asyncio.sleep(0.2)
        session.drop()
        await _nothing_left(server)


async def test_many_messages_ahead_are_answered_in_order(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        await session.tell("step", {"command": "sleep 0.5"})
        for number in range(200):
            await session.tell("step", {"action_type": "view", "session_id": f"t{number}"})
        assert (await session.hear())["data"]["observation"]["success"] is True
        for number in range(200):
            assert f"'t{number}'" in (await session.hear())["data"]["observation"]["error"]


async def test_lost_in_mid_reset(server: Server) -> None:
    async with wire(server) as session:
        with Stopped(spawner(server)):
            await session.tell("reset", {"task_id": "ok"})
            await soon(lambda: slots_active(server) == 1, 2)
            await asyncio.sleep(0.3)
            session.drop()
            await soon(lambda: slots_active(server) == 0, GONE_WITHIN_S)
        await _nothing_left(server)


async def test_lost_in_mid_create_of_a_terminal(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        with Stopped(launcher(server)):
            await session.tell("step", {"command": "sleep 999", "session_id": "t", "block": False})
            await asyncio.sleep(0.3)
            session.drop()
        await _nothing_left(server)


async def test_lost_while_its_answer_is_sent(server: Server) -> None:
    """A client that does not read: the answers fill every buffer, then it is gone."""
    async with wire(server, max_queue=1) as session:
        await session.reset()
        session.ws.transport.pause_reading()
        for _ in range(40):
            await session.tell("step", {"command": "head -c 900000 /dev/zero | tr '\\0' x"})
        await asyncio.sleep(1)
        assert slots_active(server) == 1
        session.drop()
        await _nothing_left(server)


async def test_a_cancelled_coroutine_ends_the_episode(server: Server) -> None:
    env = Tbench2Env(server.url)
    await env.reset(task_id="ok")
    call = asyncio.create_task(env.exec("sleep 999"))
    await soon(lambda: running(server, "sleep 999"), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await _nothing_left(server)
    await env.close()


async def test_a_peer_that_vanished_is_noticed_by_its_missing_pongs(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server(tasks=life_tasks, wrap=(sys.executable, "-c", _SHORT_PINGS))
    _, silent = await bare_websocket(server)
    async with wire(server) as alive:
        await alive.reset()
        silent.write(message("reset", task_id="ok"))
        await soon(lambda: metric(server, "tbench2_resets_total", outcome="ok") == 2, 5)
        silent.write(message("step", command="sleep 999"))
        await soon(lambda: metric(server, "tbench2_ends_total", reason="disconnected") == 1, 8)
        await soon(lambda: not running(server, "sleep 999"), GONE_WITHIN_S)
        # One that answers pings, as every client does, stays for as long as it likes.
        assert (await alive.step(command="sleep 3; echo ok"))["output"] == "ok\n"
        assert slots_active(server) == 1
    silent.close()


# ---------------------------------------------------------------- HTTP
@pytest.mark.parametrize("route", ["exec", "step", "evaluate"])
async def test_an_http_client_that_hangs_up_ends_the_command_not_the_episode(server: Server, route: str) -> None:
    with http(server) as client:
        episode_id = begin(client, "hang")
        client.post(f"/episodes/{episode_id}/exec", json={"command": "echo kept > f"})
        bodies = {
            "exec": (f"/episodes/{episode_id}/exec", {"command": "sleep 999 & sleep 999", "timeout_s": 60}),
            "step": ("/step", {"episode_id": episode_id, "action": {"command": "sleep 999"}, "timeout_s": 60}),
            "evaluate": (f"/episodes/{episode_id}/evaluate", None),
        }
        async with async_http(server) as hasty:
            url, body = bodies[route]
            call = asyncio.create_task(hasty.post(url, json=body))
            await soon(lambda: running(server, "sleep 999"), 5)
            assert client.get(f"/episodes/{episode_id}").json()["busy"] is True
            call.cancel()
            await soon(lambda: not running(server, "sleep 999"), GONE_WITHIN_S)
        await soon(lambda: client.get(f"/episodes/{episode_id}").json()["busy"] is False, GONE_WITHIN_S)
        answer = client.post(f"/episodes/{episode_id}/exec", json={"command": "cat f"}).json()
        assert (answer["success"], answer["output"]) == (True, "kept\n")
        assert client.delete(f"/episodes/{episode_id}").status_code == 204


@pytest.mark.parametrize("route", ["/episodes", "/reset"])
async def test_an_http_client_that_hangs_up_in_mid_create_has_no_episode(server: Server, route: str) -> None:
    async with async_http(server) as hasty:
        with Stopped(spawner(server)):
            call = asyncio.create_task(hasty.post(route, json={"task_id": "ok"}))
            await soon(lambda: slots_active(server) == 1, 2)
            await asyncio.sleep(0.3)
            call.cancel()
            await soon(lambda: slots_active(server) == 0, GONE_WITHIN_S)
        await _nothing_left(server)


async def test_wait_0_needs_no_client(server: Server) -> None:
    with http(server) as client:
        episode_id = begin(client)
        async with async_http(server) as hasty:
            response = await hasty.post(f"/episodes/{episode_id}/exec?wait=0", json={"command": "sleep 1; echo ok"})
        assert response.status_code == 202
        url = response.json()["url"]
        await soon(lambda: client.get(url).json()["done"], 5)
        assert client.get(url).json()["answer"]["output"] == "ok\n"
        client.delete(f"/episodes/{episode_id}")
