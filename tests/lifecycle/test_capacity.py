"""Who is let in when too many want to: CASE 19, and the queue."""

import asyncio
import contextlib
import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from support.processes import Stopped, spawner
from support.server import MakeServer, Server
from support.talk import Wire, async_http, begin, http, metric, problem, slots_active, soon, wire

N = 4
ROUNDS = 50


@pytest.fixture
def small(make_server: MakeServer, life_tasks: Path) -> Server:
    return make_server({"MAX_CONCURRENT_ENVS": str(N)}, tasks=life_tasks)


@pytest.fixture
def single(make_server: MakeServer, life_tasks: Path) -> Server:
    return make_server({"MAX_CONCURRENT_ENVS": "1", "TB2_QUEUE_TIMEOUT_S": "20"}, tasks=life_tasks)


async def _is_let_in(server: Server, stack: contextlib.AsyncExitStack) -> bool:
    session = await stack.enter_async_context(wire(server))
    answer = await session.ask("state")
    if answer["type"] == "state":
        return True
    assert answer["data"]["code"] == "CAPACITY_REACHED"
    assert (answer["data"]["active_sessions"], answer["data"]["max_sessions"]) == (N, N)
    with pytest.raises(ConnectionClosed):
        await session.hear()
    return False


async def test_exactly_n_of_5n_websockets_are_let_in(small: Server) -> None:
    for _ in range(ROUNDS):
        async with contextlib.AsyncExitStack() as stack:
            admitted = await asyncio.gather(*(_is_let_in(small, stack) for _ in range(5 * N)))
            assert sum(admitted) == N
            assert slots_active(small) == N
        await soon(lambda: slots_active(small) == 0, 2)
    assert metric(small, "tbench2_rejections_total", reason="capacity") == ROUNDS * 4 * N


async def test_exactly_n_of_5n_mixed_callers_are_let_in(small: Server) -> None:
    async def create(client: httpx.AsyncClient, ids: list[str]) -> bool:
        response = await client.post("/episodes", json={"task_id": "ok"})
        if response.status_code == 201:
            ids.append(response.json()["episode_id"])
            return True
        body = problem(response, 429, "CAPACITY_REACHED")
        assert (body["active_sessions"], body["max_sessions"]) == (N, N)
        assert int(response.headers["retry-after"]) >= 1
        return False

    async with async_http(small) as client:
        for _ in range(ROUNDS // 2):
            ids: list[str] = []
            async with contextlib.AsyncExitStack() as stack:
                callers = [_is_let_in(small, stack) for _ in range(5 * N // 2)]
                callers += [create(client, ids) for _ in range(5 * N // 2)]
                assert sum(await asyncio.gather(*callers)) == N
                assert slots_active(small) == N
                for episode_id in ids:
                    assert (await client.delete(f"/episodes/{episode_id}")).status_code == 204
            await soon(lambda: slots_active(small) == 0, 2)


async def test_who_closes_and_comes_again_at_once_is_let_in(make_server: MakeServer, life_tasks: Path) -> None:
    """The slot of the old session may still be on its way back."""
    server = make_server({"MAX_CONCURRENT_ENVS": "1"}, tasks=life_tasks)
    for _ in range(20):
        async with server.client() as env:
            await env.reset(task_id="ok")
            await env.exec("sleep 999 & echo begun")


async def test_a_failed_reset_takes_no_slot(small: Server) -> None:
    with http(small) as client:
        for _ in range(2 * N):
            problem(client.post("/episodes", json={"task_id": "nope"}), 404, "UNKNOWN_TASK")
        assert slots_active(small) == 0
        ids = [begin(client) for _ in range(N)]
        for episode_id in ids:
            client.delete(f"/episodes/{episode_id}")


async def _queued(server: Server, count: int) -> None:
    await soon(lambda: metric(server, "tbench2_queued") == count, 5, lambda: f"{metric(server, 'tbench2_queued')}")


async def test_the_queue_serves_websocket_and_http_in_order(single: Server) -> None:
    with http(single) as holder:
        held = begin(holder)
        order: list[str] = []
        async with wire(single) as first, wire(single) as third, async_http(single) as client:

            async def reset(name: str, session: Wire) -> float:
                observation = await session.reset()
                order.append(name)
                return float(observation["info"]["queued_s"])

            async def create() -> httpx.Response:
                response = await client.post("/episodes", json={"task_id": "ok"})
                order.append("second")
                return response

            resets = [asyncio.create_task(reset("first", first))]
            await _queued(single, 1)
            creation = asyncio.create_task(create())
            await _queued(single, 2)
            resets.append(asyncio.create_task(reset("third", third)))
            await _queued(single, 3)
            holder.delete(f"/episodes/{held}")
            assert await resets[0] > 0
            assert order == ["first"]
            assert metric(single, "tbench2_queued") == 2
            await first.tell("close")
            created = (await creation).json()
            assert created["info"]["queued_s"] > 0
            assert order == ["first", "second"]
            await client.delete(f"/episodes/{created['episode_id']}")
            assert await resets[1] > 0
            assert order == ["first", "second", "third"]
            # It has its slot by now: nothing to queue for.
            assert (await third.reset())["info"]["queued_s"] == 0


async def test_who_leaves_the_queue_loses_the_place(single: Server) -> None:
    with http(single) as holder:
        held = begin(holder)
        async with async_http(single) as client, wire(single) as leaver, wire(single) as stayer:
            await leaver.tell("reset", {"task_id": "ok"})
            await _queued(single, 1)
            creation = asyncio.create_task(client.post("/episodes", json={"task_id": "ok"}))
            await _queued(single, 2)
            waiting = asyncio.create_task(stayer.reset())
            await _queued(single, 3)
            leaver.drop()
            creation.cancel()
            await _queued(single, 1)
            assert slots_active(single) == 1
            holder.delete(f"/episodes/{held}")
            assert (await waiting)["info"]["queued_s"] > 0
            listed = holder.get("/episodes").json()
            assert listed["total"] == 1, "nobody else has an episode"


async def test_who_waited_in_vain_is_told_the_position(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server({"MAX_CONCURRENT_ENVS": "1", "TB2_QUEUE_TIMEOUT_S": "1.5"}, tasks=life_tasks)
    with http(server) as holder:
        held = begin(holder)
        async with wire(server) as session, async_http(server) as client:
            begun = time.monotonic()
            reset = asyncio.create_task(session.ask("reset", {"task_id": "ok"}))
            await _queued(server, 1)
            creation = asyncio.create_task(client.post("/episodes", json={"task_id": "ok"}))
            frame = await reset
            assert 1.5 <= time.monotonic() - begun < 5
            assert frame["data"]["code"] == "CAPACITY_REACHED"
            assert "position was 1 of 2" in frame["data"]["message"]
            assert (frame["data"]["active_sessions"], frame["data"]["max_sessions"]) == (1, 1)
            with pytest.raises(ConnectionClosed):
                await session.hear()
            response = await creation
            body = problem(response, 429, "CAPACITY_REACHED")
            assert "position was 1 of 1" in body["detail"]
            assert int(response.headers["retry-after"]) >= 1
        assert metric(server, "tbench2_queued") == 0
        assert metric(server, "tbench2_rejections_total", reason="capacity") == 2
        holder.delete(f"/episodes/{held}")


async def test_a_queueing_websocket_may_ask_for_its_state(single: Server) -> None:
    """With a queue, a connection is let in at once, and only reset waits."""
    with http(single) as holder:
        held = begin(holder)
        async with wire(single) as session:
            assert (await session.ask("state"))["type"] == "state"
            assert (await session.ask("step", {"command": "ls"}))["data"]["code"] == "EXECUTION_ERROR"
        assert slots_active(single) == 1
        holder.delete(f"/episodes/{held}")


async def test_set_up_and_queue_are_no_part_of_any_budget(make_server: MakeServer, life_tasks: Path) -> None:
    env = {
        "MAX_CONCURRENT_ENVS": "1",
        "TB2_QUEUE_TIMEOUT_S": "20",
        "TB2_COMMAND_TIMEOUT_S": "1.5",
        "TB2_EPISODE_TIMEOUT_S": "3",
    }
    server = make_server(env, tasks=life_tasks)
    async with wire(server) as holder, wire(server) as session:
        await holder.reset()
        waiting = asyncio.create_task(session.reset())
        await _queued(server, 1)
        await asyncio.sleep(2)
        with Stopped(spawner(server)):
            await holder.tell("close")
            await asyncio.sleep(2)
        assert (await waiting)["info"]["queued_s"] >= 2
        answer = await session.step(command="sleep 0.5; echo ok")
        assert (answer["success"], answer["output"]) == (True, "ok\n")
