"""CASES.md 1: many episodes of one task are graded at the same time, each by its own files."""

import asyncio
import re
import time
from pathlib import Path

from support.server import MakeServer
from support.tasks import OK_TEST, make_task
from tbench2_env import Tbench2Env
from tbench2_env.models import StepResult, Tbench2Observation

SLOW_TEST = f"echo begun=$(date +%s.%N)=\nsleep 2\n{OK_TEST}echo ended=$(date +%s.%N)=\n"


def peak(intervals: list[tuple[float, float]]) -> int:
    """How many of the intervals overlap at most."""
    edges = sorted([(begun, 1) for begun, _ in intervals] + [(ended, -1) for _, ended in intervals])
    level = highest = 0
    for _, step in edges:
        level += step
        highest = max(highest, level)
    return highest


def interval(output: str) -> tuple[float, float]:
    begun, ended = (float(each) for each in re.findall(r"=([0-9.]+)=", output))
    return begun, ended


async def test_32_slow_verifiers_of_one_task_run_at_once_and_are_all_right(
    make_server: MakeServer, tmp_path: Path
) -> None:
    make_task(tmp_path / "own", "slow", SLOW_TEST)
    server = make_server(tasks=tmp_path / "own")
    ready = asyncio.Barrier(32)

    async def play(number: int, env: Tbench2Env) -> StepResult[Tbench2Observation]:
        async with env:
            await env.reset(task_id="slow")
            if number % 2 == 0:
                await env.exec("echo ok > out.txt")
            await ready.wait()
            return await env.evaluate()

    begun = time.monotonic()
    results = await asyncio.gather(*(play(number, server.client()) for number in range(32)))
    assert time.monotonic() - begun < 20
    assert [result.reward for result in results] == [1.0, 0.0] * 16
    assert [result.observation.error for result in results] == [""] * 32
    assert {result.observation.info.get("harness") for result in results} == {"tests/test.sh"}
    assert all(result.done for result in results)
    # No lock in the way: most of them slept at the same moment.
    assert peak([interval(result.observation.output) for result in results]) >= 24
