"""Work in a thread has ended when the task that wanted it has, however that ended."""

import asyncio
import threading
import time

import pytest

from tbench2_env.server import threads


async def test_a_result_and_an_error_come_through() -> None:
    assert await threads.run(lambda stop: 3) == 3
    assert await threads.finish(lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda stop: 1 // 0)


async def test_a_cancelled_task_stops_its_thread_and_waits_for_it() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(stop: threads.Stop) -> None:
        begun.set()
        try:
            while True:
                stop.check()
                time.sleep(0.01)
        finally:
            time.sleep(0.05)
            ended.set()

    task = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # impatience changes nothing
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_must_be_finished_is() -> None:
    ended = threading.Event()

    def work() -> None:
        time.sleep(0.05)
        ended.set()

    task = asyncio.create_task(threads.finish(work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_few_at_a_time() -> None:
    running = most = 0

    async def work() -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return most

    assert len(await threads.gather([work] * 6, 2)) == 6
    assert (running, most) == (0, 2)


async def test_the_first_error_ends_the_others() -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("this one")

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="this one"):
        await threads.gather([endless, fail], 2)
    assert ended.is_set()
