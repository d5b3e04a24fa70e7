"""Asking again until the server says yes: exponential backoff with full jitter.

Full jitter, as of many clients that are turned away at the same moment each should come back at another:
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tbench2_env.errors import CapacityReached, ServerGone, Tbench2Error

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0

#: What may be over in a moment. ServerGone too: a server that is being restarted refuses, or hangs up.
NOT_NOW: tuple[type[Tbench2Error], ...] = (CapacityReached, ServerGone)

T = TypeVar("T")


async def retried(
    attempt: Callable[[], Awaitable[T]], on: tuple[type[Tbench2Error], ...], *, for_s: float, stop: asyncio.Event
) -> T:
    """The result of the first attempt that does not raise one of `on`.

    Args:
        attempt: called at least once, and for the last time when `for_s` seconds have passed.
        on: errors after which to try again; any other one ends it.
        for_s: 0 means one attempt.
        stop: once set, there is no further attempt after the next one, which is made at once.

    Raises:
        Tbench2Error: that of the last attempt.
    """
    clock = asyncio.get_running_loop().time
    deadline, longest_s = clock() + for_s, _FIRST_DELAY_S
    while True:
        try:
            return await attempt()
        except on as error:
            left_s = deadline - clock()
            if left_s <= 0 or stop.is_set():
                raise
            delay_s = random.uniform(0, longest_s) + _asked_for_s(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(delay_s, left_s)):
                await stop.wait()
        longest_s = min(2 * longest_s, _LONGEST_DELAY_S)


def _asked_for_s(error: Tbench2Error) -> float:
    return (error.retry_after_s or 0.0) if isinstance(error, CapacityReached) else 0.0
