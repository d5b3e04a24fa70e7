"""Sandboxes that are made ahead of resets (TB2_WARM): nobody shares one, and nobody gets one that is stale or dead."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.processes import inits, spawner
from support.server import HELPERS, Server, idle_again
from support.talk import Wire, metric, soon, wire
from support.tasks import make_task

MOST = 3


@pytest.fixture(scope="module")
def warm_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm-tasks")
    for name in ("ok", "other"):
        make_task(folder, name, files={"environment/f": "first\n"}, dockerfile="FROM x\nWORKDIR /app\nCOPY f .\n")
    return folder


@pytest.fixture(scope="module")
def shared_warming(tmp_path_factory: pytest.TempPathFactory, warm_tasks: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("warming"), warm_tasks, {"TB2_WARM": str(MOST)}).start()
    yield server
    assert server.stop() == 0
    assert not list(server.scratch.iterdir())


@pytest.fixture
def warming(shared_warming: Server) -> Iterator[Server]:
    with idle_again(shared_warming):
        yield shared_warming


@contextlib.asynccontextmanager
async def warmed(server: Server, task: str = "ok") -> AsyncIterator[Wire]:
    """A session whose task was reset so often that the server keeps all that it may of it."""
    async with wire(server) as session, asyncio.timeout(20):
        while server.warm() < MOST:
            await session.reset(task)
            await asyncio.sleep(0.15)
        yield session


def opened(server: Server, temperature: str) -> int:
    return int(metric(server, "tbench2_sandboxes_total", temperature=temperature))


async def output(session: Wire, command: str) -> str:
    return str((await session.step(command=command))["output"])


async def test_each_is_one_episodes_own_and_none_outlives_the_last(warming: Server) -> None:
    async with warmed(warming), contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(wire(warming)) for _ in range(MOST + 1)]
        made_ahead, before = inits(warming), opened(warming, "warm")
        await asyncio.gather(*(session.reset() for session in sessions))
        assert opened(warming, "warm") - before == MOST
        assert made_ahead <= inits(warming)
        found = [await output(each, "readlink /proc/self/ns/pid; ls /tmp; touch /tmp/mine") for each in sessions]
        assert len(set(found)) == MOST + 1, "two have one sandbox"
        assert not any("mine" in text for text in found), "one was used before"
        assert (await sessions[0].step(action_type="evaluate"))["reward"] == 0
        await soon(lambda: warming.warm() == MOST, 5)
    await soon(lambda: len(warming.descendants()) == HELPERS and not warming.worktrees(), 2)


async def test_the_only_client_gets_one_that_was_made_after_its_last_episode(warming: Server) -> None:
    async with wire(warming) as session:
        before = opened(warming, "warm")
        for _ in range(20):
            await session.reset()
            if opened(warming, "warm") > before:
                break
            await session.step(action_type="close")
            await asyncio.sleep(0.15)
        else:
            pytest.fail("it gets none")


async def test_a_task_or_a_root_that_changed_since(warming: Server, warm_tasks: Path) -> None:
    async with warmed(warming) as session:
        (warm_tasks / "ok/environment/f").write_text("second\n")
        before = opened(warming, "cold")
        await session.reset()
        assert await output(session, "cat f") == "second\n"
        await soon(lambda: warming.warm() == 1, 5)
        new_name = Path(f"/tbench2-test-{os.getpid()}")
        new_name.touch()
        try:
            await session.reset()
            assert new_name.name not in await output(session, "ls /")
        finally:
            new_name.unlink()
        assert opened(warming, "cold") - before == 2


async def test_the_dead_are_not_given_away(warming: Server) -> None:
    async with warmed(warming) as session:
        killed = inits(warming)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await soon(lambda: not killed & inits(warming), 5)
        await session.reset()
        assert await output(session, "echo alive") == "alive\n"
        await soon(lambda: warming.warm() == MOST, 5)
        before = opened(warming, "cold")
        os.kill(spawner(warming), signal.SIGKILL)
        await session.reset()
        assert await output(session, "echo alive") == "alive\n"
        assert opened(warming, "cold") - before == 1


async def test_they_are_shared_out_among_tasks(warming: Server) -> None:
    async with warmed(warming), wire(warming) as session:
        before = opened(warming, "warm")
        for _ in range(20):
            await session.reset("other")
            assert len(inits(warming)) <= 2 + MOST
            if opened(warming, "warm") > before:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the other task gets none")
