"""Whether an episode exceeds its memory: a cheap upper bound at each look, and beyond the limit what it really is."""

import time
from collections.abc import Sequence

from tbench2_env.isolation.gauge import Gauge

#: Beyond the limit by the upper bound, measure anew after this many times the time that it took, whatever the bound.
_REST_FACTOR = 20
#: Measuring thousands of processes is given up after this; what was not measured then counts as nothing.
_BUDGET_S = 0.2


class Memory:
    """One episode's memory. `peak` is the most that was seen, in bytes.

    The upper bound counts a page for each process that has it; such sharing makes 100 processes of one program look
    100 times its size. Measuring walks page tables, so between two measurements what was found grows by what the
    upper bound grew.
    """

    def __init__(self, gauge: Gauge, limit: int | None) -> None:
        self._gauge, self._limit = gauge, limit
        self.peak = 0
        self._measured: int | None = None
        self._lowest = 0
        self._ended_at = self._took_s = 0.0

    def is_exceeded(self, pids: Sequence[str]) -> bool:
        sizes = self._gauge.resident(pids)
        used = sum(sizes.values()) + self._gauge.shared_memory()
        if self._limit is not None and used > self._limit:
            used = self._look_closer(used, sizes, self._limit)
        else:
            self._measured = None
        self.peak = max(self.peak, used)
        return self._limit is not None and used > self._limit

    def _look_closer(self, at_most: int, sizes: dict[str, int], limit: int) -> int:
        self._lowest = min(self._lowest, at_most)
        rested_s = time.monotonic() - self._ended_at
        if self._measured is not None:
            bound = self._measured + at_most - self._lowest
            if rested_s < self._took_s or (bound <= limit and rested_s < _REST_FACTOR * self._took_s):
                return min(bound, limit)
        begun = time.monotonic()
        self._measured, self._lowest = self._measure(sizes, limit), at_most
        self._ended_at = time.monotonic()
        self._took_s = self._ended_at - begun
        return self._measured

    def _measure(self, sizes: dict[str, int], limit: int) -> int:
        """Largest processes first, and no further than it takes to know on which side of the limit it is."""
        deadline = time.monotonic() + _BUDGET_S
        in_files = self._gauge.shared_memory()
        private = shared = 0
        unread = sum(sizes.values())
        used = in_files
        for pid in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if used > limit or used + unread <= limit:
                break
            if time.monotonic() > deadline:
                return used
            unread -= sizes[pid]
            of_shared, of_others = self._gauge.proportional(pid)
            shared, private = shared + of_shared, private + of_others
            used = private + max(shared, in_files)  # what is mapped of /dev/shm is in both
        return used if used > limit else min(used + unread, limit)
