"""Threads that outlive no task: whoever is cancelled stops his thread and waits for it."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Stopped(Exception):
    """Work in a thread was told to stop, since nobody waits for its result."""


class Stop:
    """Asked now and then by work in a thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises: Stopped."""
        if self._event.is_set():
            raise Stopped("the work was cancelled")


async def run(work: Callable[[Stop], T]) -> T:
    """`work` in a thread. When the caller is cancelled, it is told to stop and has ended when this raises."""
    stop = Stop()
    return await _finish(asyncio.to_thread(work, stop), stop.set)


async def finish(work: Callable[[], T]) -> T:
    """`work` in a thread, to its end, even when the caller is cancelled meanwhile."""
    return await _finish(asyncio.to_thread(work), lambda: None)


async def gather(works: Iterable[Callable[[], Awaitable[T]]], limit: int) -> list[T]:
    """The results of `works`, at most `limit` of them at once. The first one's error ends the others, and is raised."""
    slots = asyncio.Semaphore(limit)

    async def run_one(work: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await work()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(work)) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """The results of two that run at once. The first one's error ends the other, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(one), group.create_task(other)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()


async def _finish(work: Awaitable[T], cancel: Callable[[], None]) -> T:
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not complain that nobody looked
        raise
