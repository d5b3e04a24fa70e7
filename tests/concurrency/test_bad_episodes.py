"""Episodes and clients that misbehave cost nobody else anything, and nothing is left of them."""

import asyncio
import contextlib
import time
import urllib.request
from pathlib import Path

from support.processes import running
from support.server import HELPERS, MakeServer, Server
from support.talk import soon, wire
from support.tasks import make_task
from tbench2_env import CapacityReached, Tbench2Env


async def test_many_processes_of_one_episode_do_not_hurt_another(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        assert (await a.exec("for i in $(seq 200); do sleep 614 & done; echo started")).output == "started\n"
        await soon(lambda: len(running(server, "sleep 614")) == 200, 5)
        begun = time.monotonic()
        assert (await b.exec("echo ok > out.txt; pgrep -xc sleep")).output == "0\n"
        assert (await b.evaluate()).reward == 1.0
        assert time.monotonic() - begun < 3
        await a.close()
        await soon(lambda: not running(server, "sleep 614"), 2)


async def test_a_connection_dropped_during_reset_or_evaluate_leaves_nothing(
    make_server: MakeServer, tmp_path: Path
) -> None:
    make_task(tmp_path / "own", "slow", "sleep 615\n")
    server = make_server({"MAX_CONCURRENT_ENVS": "10"}, tasks=tmp_path / "own")
    async with contextlib.AsyncExitStack() as stack:
        resetting, evaluating = [[await stack.enter_async_context(wire(server)) for _ in range(5)] for _ in range(2)]
        for session in evaluating:
            await session.reset("slow")
            await session.tell("step", {"action_type": "evaluate"})
        await soon(lambda: len(running(server, "sleep 615")) == 5, 5)
        for session in resetting:
            await session.tell("reset", {"task_id": "slow"})
        for session in resetting + evaluating:
            session.drop()
        await soon(lambda: len(server.descendants()) == HELPERS, 2, lambda: str(server.descendants()))
    async with server.client() as env:
        assert (await env.reset(task_id="slow")).observation.success


async def test_exactly_as_many_are_admitted_as_there_are_slots(make_server: MakeServer) -> None:
    server = make_server({"MAX_CONCURRENT_ENVS": "4"})
    everyone_tried = asyncio.Barrier(20)

    async def connect(env: Tbench2Env) -> CapacityReached | None:
        async with env:
            try:
                await env.reset(task_id="ok")
                return None
            except CapacityReached as full:
                return full
            finally:
                await everyone_tried.wait()

    outcomes = await asyncio.gather(*(connect(server.client()) for _ in range(20)))
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert len(refused) == 16
    assert {(full.active_sessions, full.max_sessions) for full in refused} == {(4, 4)}
    assert all("CAPACITY_REACHED" in str(full) for full in refused)


async def test_a_slow_reset_does_not_hold_up_others(make_server: MakeServer, tmp_path: Path) -> None:
    files = {f"environment/many/{n % 100}/{n}": f"{n}" for n in range(2500)}
    make_task(tmp_path / "own", "huge", dockerfile="FROM debian\nCOPY many /app/many\nWORKDIR /app\n", files=files)
    make_task(tmp_path / "own", "small")
    server = make_server(tasks=tmp_path / "own")
    async with server.client() as slow, server.client() as b:
        await b.reset(task_id="small")
        waiting = asyncio.create_task(slow.reset(task_id="huge"))
        longest = 0.0
        others = 0
        while not waiting.done():
            begun = time.monotonic()
            async with server.client() as c:
                await c.reset(task_id="small")
                assert (await b.exec("echo hi")).output == "hi\n"
            longest = max(longest, time.monotonic() - begun)
            others += 1
        assert others > 2, "the slow reset was not slow enough to show anything"
        assert longest < 1.5
        assert (await waiting).observation.success
        assert (await slow.exec("ls many/7 | wc -l")).output == "25\n"


async def test_many_episodes_in_a_row_leave_nothing(server: Server) -> None:
    async def play(number: int) -> None:
        async with server.client() as env:
            await env.reset(task_id="ok")
            await env.exec("echo ok > out.txt; sleep 618 & echo")
            if number % 5 == 0:
                await env.exec("cat", session_id="t", block=False)
            assert (await env.evaluate()).reward == 1.0

    await play(0)
    await soon(lambda: len(server.descendants()) == HELPERS, 3)
    before, helpers = server.descriptors(), server.descendants()
    helper_descriptors = {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in helpers}
    for first in range(0, 120, 8):
        await asyncio.gather(*(play(first + number) for number in range(8)))
    await soon(lambda: server.descendants() == helpers, 3, lambda: str(server.descendants()))
    await soon(lambda: not server.worktrees(), 3)
    await soon(lambda: server.descriptors() <= before + 2, 3)
    for pid, count in helper_descriptors.items():
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) <= count + 2


async def test_heavy_output_of_16_episodes_does_not_block_the_event_loop(server: Server) -> None:
    envs = [server.client() for _ in range(16)]
    for env in envs:
        await env.reset(task_id="ok")
    heavy = asyncio.gather(*(env.exec("yes 0123456789abcdef | head -c 60000000; echo END") for env in envs))
    latencies: list[float] = []
    while not heavy.done():
        begun = time.monotonic()
        await asyncio.to_thread(get_health, server)
        latencies.append(time.monotonic() - begun)
    assert all(answer.output.endswith("END\n") for answer in await heavy)
    for env in envs:
        await env.close()
    assert len(latencies) > 3
    assert max(latencies) < 1.0


def get_health(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
        assert response.status == 200
