"""Limits in time: what is idle is reaped, what is over its time ends with a clear error. CASE 20."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.processes import running
from support.server import MakeServer, Server
from support.talk import async_http, begin, http, metric, problem, soon, wire

IDLE_S = 2.0


@pytest.fixture
def reaping(make_server: MakeServer, life_tasks: Path) -> Server:
    return make_server({"TB2_IDLE_TIMEOUT_S": f"{IDLE_S:g}"}, tasks=life_tasks)


async def test_a_busy_episode_is_kept_and_an_idle_one_reaped(reaping: Server) -> None:
    await asyncio.gather(_idle_websocket(reaping), _idle_http(reaping))


async def _idle_websocket(reaping: Server) -> None:
    async with wire(reaping) as session:
        await session.reset()
        answer = await session.step(command="sleep 6; echo ok")
        assert (answer["success"], answer["output"]) == (True, "ok\n")
        assert (await session.step(command="echo kept"))["output"] == "kept\n"
        used = time.monotonic()
        while (await session.ask("state"))["data"]["terminal_ready"]:
            assert time.monotonic() - used < IDLE_S + 3
            await asyncio.sleep(0.05)
        assert time.monotonic() - used >= IDLE_S - 0.1
        answer = await session.step(command="echo late")
        assert (answer["success"], answer["done"], answer["reward"], answer["output"]) == (False, True, None, "")
        assert "TB2_IDLE_TIMEOUT_S" in answer["error"]
        verdict = await session.step(action_type="evaluate")
        assert (verdict["success"], verdict["reward"]) == (False, None)
        assert verdict["info"]["no_verdict"] == "sandbox_dead"
        assert "TB2_IDLE_TIMEOUT_S" in verdict["error"]
        # The connection is fine, and a reset begins anew.
        await session.reset()
        assert (await session.step(command="echo again"))["output"] == "again\n"


async def _idle_http(reaping: Server) -> None:
    async with async_http(reaping) as client:
        episode_id = (await client.post("/episodes", json={"task_id": "ok"})).json()["episode_id"]
        answer = (await client.post(f"/episodes/{episode_id}/exec", json={"command": "sleep 3; echo ok"})).json()
        assert (answer["success"], answer["output"]) == (True, "ok\n")
        started = await client.post(f"/episodes/{episode_id}/exec?wait=0", json={"command": "sleep 3; echo ok"})
        await asyncio.sleep(2.5)
        with http(reaping) as poll:
            await soon(lambda: poll.get(started.json()["url"]).json()["done"], 5)
        polled = (await client.get(started.json()["url"])).json()
        assert polled["answer"]["output"] == "ok\n"
        deadline = time.monotonic() + IDLE_S + 3
        while (await client.get(f"/episodes/{episode_id}")).json()["state"] == "live":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        for response in (
            await client.post(f"/episodes/{episode_id}/exec", json={"command": "ls"}),
            await client.post(f"/episodes/{episode_id}/evaluate"),
            await client.get(f"/state?episode_id={episode_id}"),
            await client.post("/step", json={"episode_id": episode_id, "action": {"command": "ls"}}),
            await client.put(f"/episodes/{episode_id}/files?path=f", content=b"x"),
            await client.get(f"/episodes/{episode_id}/files?path=f"),
            await client.get(started.json()["url"]),
        ):
            assert "TB2_IDLE_TIMEOUT_S" in problem(response, 409, "EPISODE_ENDED")["detail"]
        info = (await client.get(f"/episodes/{episode_id}")).json()
        assert (info["state"], info["end"], info["busy"]) == ("ended", "idle", False)
        assert (await client.delete(f"/episodes/{episode_id}")).status_code == 204


async def test_a_transfer_is_activity(reaping: Server) -> None:
    """A file that takes longer than the idle limit, in either direction."""
    async with async_http(reaping) as client:
        episode_id = (await client.post("/episodes", json={"task_id": "ok"})).json()["episode_id"]

        async def slowly() -> AsyncIterator[bytes]:
            for _ in range(6):
                yield b"x" * 1000
                await asyncio.sleep(0.5)

        response = await client.put(f"/episodes/{episode_id}/files?path=f", content=slowly())
        assert response.status_code == 204, response.text
        await client.post(f"/episodes/{episode_id}/exec", json={"command": "head -c 30000000 /dev/zero >g"})
        size = 0
        async with client.stream("GET", f"/episodes/{episode_id}/files?path=g") as download:
            begun = time.monotonic()
            async for chunk in download.aiter_bytes():
                size += len(chunk)
                if time.monotonic() - begun < 3 and size % (8 << 20) < len(chunk):
                    await asyncio.sleep(1.5)
        assert size == 30_000_000
        assert (await client.delete(f"/episodes/{episode_id}")).status_code == 204
        assert (await client.get(f"/episodes/{episode_id}")).json()["end"] == "deleted"


async def test_the_deadline_ends_an_episode_in_mid_command(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server({"TB2_EPISODE_TIMEOUT_S": "2"}, tasks=life_tasks)
    async with wire(server) as session, async_http(server) as client:
        for _ in range(2):
            begun = time.monotonic()
            assert (await session.reset())["info"]["episode_timeout_s"] == 2
            created = await client.post("/episodes", json={"task_id": "ok"})
            url = f"/episodes/{created.json()['episode_id']}/exec"
            over_http = asyncio.create_task(client.post(url, json={"command": "echo some; sleep 999"}))
            answer = await session.step(command="echo some; sleep 999")
            assert 2 <= time.monotonic() - begun < 5
            assert (answer["success"], answer["done"]) == (False, True)
            assert "TB2_EPISODE_TIMEOUT_S" in answer["error"]
            assert "TB2_EPISODE_TIMEOUT_S" in problem(await over_http, 409, "EPISODE_ENDED")["detail"]
            await soon(lambda: not running(server, "sleep 999"), 2)
            late = await session.step(command="echo late")
            assert (late["success"], late["output"]) == (False, "")
            assert "TB2_EPISODE_TIMEOUT_S" in late["error"]
    assert metric(server, "tbench2_ends_total", reason="deadline") == 4


@pytest.mark.parametrize("task_id", ["hang", "score-then-hang"])
async def test_the_deadline_in_mid_evaluate_is_no_verdict(
    make_server: MakeServer, life_tasks: Path, task_id: str
) -> None:
    server = make_server({"TB2_EPISODE_TIMEOUT_S": "1.5"}, tasks=life_tasks)
    async with wire(server) as session, async_http(server) as client:
        await session.reset(task_id)
        created = await client.post("/episodes", json={"task_id": task_id})
        over_http = asyncio.create_task(client.post(f"/episodes/{created.json()['episode_id']}/evaluate"))
        answer = await session.step(action_type="evaluate")
        assert (answer["success"], answer["reward"], answer["done"]) == (False, None, True)
        assert "harness" not in answer["info"]
        assert answer["info"]["no_verdict"] == "sandbox_dead"
        assert "TB2_EPISODE_TIMEOUT_S" in answer["error"]
        assert "TB2_EPISODE_TIMEOUT_S" in problem(await over_http, 409, "EPISODE_ENDED")["detail"]


async def test_the_task_may_set_the_deadline(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server({"TB2_EPISODE_TIMEOUT_S": "task"}, tasks=life_tasks)
    async with wire(server) as brief, wire(server) as other:
        assert (await brief.reset("brief"))["info"]["episode_timeout_s"] == 2
        limit = (await other.reset("ok"))["info"]["episode_timeout_s"]
        assert limit is None or limit > 2
        answer = await brief.step(command="sleep 999")
        assert answer["success"] is False
        assert "TB2_EPISODE_TIMEOUT_S" in answer["error"]
        assert (await other.step(command="echo ok"))["output"] == "ok\n"


async def test_reset_again_starts_the_time_anew(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server({"TB2_EPISODE_TIMEOUT_S": "3"}, tasks=life_tasks)
    async with wire(server) as session:
        for _ in range(2):
            await session.reset()
            assert (await session.step(command="sleep 1.6; echo ok"))["output"] == "ok\n"
    assert metric(server, "tbench2_ends_total", reason="deadline") == 0


def test_a_command_of_its_own_limit(make_server: MakeServer, life_tasks: Path) -> None:
    """`timeout_s` replaces TB2_COMMAND_TIMEOUT_S in both directions."""
    server = make_server({"TB2_COMMAND_TIMEOUT_S": "1"}, tasks=life_tasks)
    with http(server) as client:
        episode_id = begin(client)
        url = f"/episodes/{episode_id}/exec"
        longer = client.post(url, json={"command": "sleep 1.2; echo ok", "timeout_s": 10}).json()
        assert (longer["success"], longer["output"], longer["timed_out"]) == (True, "ok\n", False)
        begun = time.monotonic()
        shorter = client.post(url, json={"command": "echo some; sleep 999", "timeout_s": 0.3}).json()
        assert time.monotonic() - begun < 2
        assert (shorter["success"], shorter["timed_out"]) == (False, True)
        assert "0.3 s" in shorter["error"]
        assert shorter["output"].startswith("some\n")
        default = client.post(url, json={"command": "sleep 999"}).json()
        assert default["timed_out"] is True
        step = {"episode_id": episode_id, "action": {"command": "sleep 1.2; echo ok"}, "timeout_s": 10}
        assert client.post("/step", json=step).json()["observation"]["output"] == "ok\n"
        client.delete(f"/episodes/{episode_id}")
