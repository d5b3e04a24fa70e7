"""Many episodes in one server life, ended in every way: nothing grows.

300 in CI; by hand TB2_SOAK_EPISODES=2000 pytest --timeout 3600 --log-cli-level WARNING tests/lifecycle/test_soak.py
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from support.processes import inits, running
from support.server import HELPERS, MakeServer, Server
from support.talk import async_http, metric, slots_active, soon, wire

log = logging.getLogger(__name__)
EPISODES = int(os.environ.get("TB2_SOAK_EPISODES", "300"))
#: What the memory at the end is compared with: that after the first fifth, or 200.
WARM = min(EPISODES // 5, 200)
#: malloc keeps up to 30 MB of what was held at once, from 70 MB on; malloc_trim(3) gives all of it back.
GROWTH_MAX = 1.5


async def _normal(server: Server, number: int) -> None:
    async with wire(server) as session:
        await session.reset()
        await session.step(command="echo ok > out.txt; head -c 200000 /dev/urandom | base64")
        assert (await session.step(action_type="evaluate"))["reward"] == 1.0
        await session.tell("close")
        await session.ws.wait_closed()


async def _dropped(server: Server, number: int) -> None:
    async with wire(server) as session:
        await session.reset()
        await session.tell("step", {"command": f"sleep 9{number}00"})
        await soon(lambda: running(server, f"sleep 9{number}00"), 10)
        session.drop()
        await soon(lambda: not running(server, f"sleep 9{number}00"), 5)


async def _timed_out(server: Server, number: int) -> None:
    async with async_http(server) as client:
        url = f"/episodes/{(await client.post('/episodes', json={'task_id': 'ok'})).json()['episode_id']}"
        body = {"command": "yes | head -c 3000000; sleep 999", "timeout_s": 0.3}
        assert (await client.post(f"{url}/exec", json=body)).json()["timed_out"] is True
        assert (await client.put(f"{url}/files?path=f", content=b"x" * 100_000)).status_code == 204
        assert len((await client.get(f"{url}/files?path=f")).content) == 100_000
        assert (await client.delete(url)).status_code == 204


async def _reset_again(server: Server, number: int) -> None:
    async with wire(server) as session:
        for _ in range(2):
            await session.reset()
            await session.step(command="cat", session_id="t", block=False)
            await session.step(command="sleep 999 & touch a b c")


async def _killed(server: Server, others: Callable[[], Awaitable[Any]]) -> None:
    """The first in the server, so that it is sure whose PID 1 it kills; that while the others play."""
    async with wire(server) as session:
        await session.reset()
        pid = min(inits(server))  # beside one that is made ahead, perhaps
        playing = asyncio.ensure_future(others())
        await session.step(command="sleep 999 & sleep 0.1")
        os.kill(pid, signal.SIGKILL)
        await soon(lambda: pid not in inits(server), 5)
        assert (await session.step(command="ls"))["success"] is False
        await playing


KINDS = (_normal, _dropped, _timed_out, _reset_again) * 2
#: Each of KINDS has one, reset-again two; and the one that is killed.
EPISODES_OF_A_ROUND = len(KINDS) + 2 + 1


async def _idle(server: Server) -> None:
    def idle() -> bool:
        return len(server.descendants()) == HELPERS and not server.worktrees() and slots_active(server) == 0

    await soon(idle, 5, lambda: f"left: {server.descendants()} {server.worktrees()}")


async def test_nothing_grows(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server({"TB2_KEEP_RUNS": "20"}, tasks=life_tasks)
    begun = time.monotonic()
    played, warm_bytes, warm_descriptors = 0, 0, 0
    while played < EPISODES:
        await _killed(server, lambda: asyncio.gather(*(kind(server, number) for number, kind in enumerate(KINDS))))
        await _idle(server)
        played += EPISODES_OF_A_ROUND
        if played >= WARM and not warm_bytes:
            warm_bytes, warm_descriptors = server.rss_bytes(), server.descriptors()
    bytes_, descriptors = server.rss_bytes(), server.descriptors()
    log.warning(
        "%d episodes in %.0f s: RSS %.1f MiB after %d, %.1f MiB at the end; descriptors %d, %d",
        played, time.monotonic() - begun, warm_bytes / 2**20, WARM, bytes_ / 2**20, warm_descriptors, descriptors,
    )  # fmt: skip
    assert bytes_ <= GROWTH_MAX * warm_bytes
    assert descriptors <= warm_descriptors + 3
    rounds = played // EPISODES_OF_A_ROUND
    wanted = {"closed": 2, "disconnected": 4, "deleted": 2, "replaced": 2, "died": 1}
    for reason, each in wanted.items():
        assert metric(server, "tbench2_ends_total", reason=reason) == each * rounds, reason
    assert metric(server, "tbench2_helper_restarts") == 0
    assert len(list(server.runs.glob("ok.*"))) <= 20
