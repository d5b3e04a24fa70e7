"""What ends an episode that nobody ends: it was idle for too long, or its time is over."""

import asyncio
from collections.abc import Callable

from tbench2_env.server.ending import End


class Timers:
    """The timers of one episode, from `arm` to `cancel`. `end(why, message)` is called at most once by each.

    A running command is activity, however long it runs: the episode is never idle while `busy()`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, busy: Callable[[], bool], end: Callable[[End, str], object]
    ) -> None:
        self._loop, self._busy, self._end = loop, busy, end
        self._last_active = loop.time()
        self._armed: dict[End, asyncio.TimerHandle] = {}

    def arm(self, idle_s: float | None, life_s: float | None) -> None:
        """None: no limit."""
        if idle_s is not None:
            self._armed[End.IDLE] = self._loop.call_later(idle_s, self._check_idle, idle_s)
        if life_s is not None:
            message = f"the episode's time of {life_s:g} s is over (TB2_EPISODE_TIMEOUT_S)"
            self._armed[End.DEADLINE] = self._loop.call_later(life_s, self._end, End.DEADLINE, message)

    def touch(self) -> None:
        """Something was done with the episode: it is not idle."""
        self._last_active = self._loop.time()

    def cancel(self) -> None:
        for timer in self._armed.values():
            timer.cancel()

    def _check_idle(self, idle_s: float) -> None:
        left_s = idle_s if self._busy() else self._last_active + idle_s - self._loop.time()
        if left_s > 0:
            self._armed[End.IDLE] = self._loop.call_later(left_s, self._check_idle, idle_s)
        else:
            self._end(End.IDLE, f"the episode was idle for {idle_s:g} s and was reaped (TB2_IDLE_TIMEOUT_S)")
