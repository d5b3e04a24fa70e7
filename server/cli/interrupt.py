"""Ctrl-C and SIGTERM: what is under way is cancelled, cleans up, and the command then tells how far it came."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Exit status of a command that was interrupted.
STATUS = 128 + signal.SIGINT


class Interrupted(Exception):
    """Somebody ended the command before its time."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, on an event loop of its own. Raises: Interrupted, and what `work` raises."""

    async def cancelled_by_signals() -> T:
        this = asyncio.current_task()
        assert this is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        return await work

    try:
        return asyncio.run(cancelled_by_signals())
    except asyncio.CancelledError:
        raise Interrupted from None
