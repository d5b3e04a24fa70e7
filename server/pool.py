"""Slots: the one place that decides how many episodes live at once, whoever asks, and who waits for the next."""

import asyncio
import collections
from types import TracebackType
from typing import Self

#: Seconds to wait for a slot whose episode is ending.
_LEAVING_S = 5.0


class CapacityReached(Exception):
    """Every slot is taken. Trainers look for CAPACITY_REACHED and come again."""

    def __init__(self, active: int, maximum: int, waited: str = "") -> None:
        super().__init__(f"server at capacity: {active} of {maximum} sessions are active{waited} (CAPACITY_REACHED)")
        self.active, self.maximum = active, maximum


class Slot:
    """One unit of capacity, held from a session's beginning to its end. A context manager; releasing twice is fine.

    `queued_s` is how long its holder waited for it.
    """

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self.queued_s = 0.0
        self.leaving = False

    def leave(self) -> None:
        """Its episode is ending: the slot comes free in a moment, so a newcomer may wait for it."""
        self.leaving = True

    def release(self) -> None:
        self._pool._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Pool:
    """`maximum` slots and a first-come queue for them.

    Everything happens on the event loop, between awaits, so no two callers can take one slot; and a slot that comes
    free goes straight to the first in the queue, so nobody overtakes.
    """

    def __init__(self, maximum: int, queue_timeout_s: float = 0.0) -> None:
        self.maximum, self.queue_timeout_s = maximum, queue_timeout_s
        self._slots: set[Slot] = set()
        self._queue: collections.deque[asyncio.Future[Slot]] = collections.deque()

    @property
    def active(self) -> int:
        return len(self._slots)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def take(self) -> Slot:
        """A slot now. Raises: CapacityReached."""
        if self.active >= self.maximum:
            raise CapacityReached(self.active, self.maximum)
        return self._grant()

    async def acquire(self) -> Slot:
        """A slot now, or in its turn within `queue_timeout_s` seconds. Raises: CapacityReached naming the position."""
        timeout_s = self._patience_s()
        if self.active < self.maximum or timeout_s <= 0:
            return self.take()
        loop = asyncio.get_running_loop()
        begun, turn = loop.time(), loop.create_future()
        self._queue.append(turn)
        try:
            await asyncio.wait([turn], timeout=timeout_s)
        except asyncio.CancelledError:
            self._leave(turn)
            raise
        if not turn.done():
            waited = self._waited(turn)
            self._leave(turn)
            raise CapacityReached(self.active, self.maximum, waited)
        slot: Slot = turn.result()
        slot.queued_s = loop.time() - begun
        return slot

    def _patience_s(self) -> float:
        """Who closes one session and opens the next at once must not be turned away by its own old slot."""
        leaving = sum(slot.leaving for slot in self._slots)
        return self.queue_timeout_s or (_LEAVING_S if leaving > self.queued else 0.0)

    def _waited(self, turn: "asyncio.Future[Slot]") -> str:
        if self.queue_timeout_s <= 0:
            return ""
        position = self._queue.index(turn) + 1
        return f"; after {self.queue_timeout_s:g} s in the queue the position was {position} of {self.queued}"

    def _leave(self, turn: "asyncio.Future[Slot]") -> None:
        """Whoever leaves loses the place; a slot that was granted in the same moment goes on to the next."""
        if turn.done():
            turn.result().release()
        else:
            self._queue.remove(turn)

    def _grant(self) -> Slot:
        slot = Slot(self)
        self._slots.add(slot)
        return slot

    def _release(self, slot: Slot) -> None:
        if slot not in self._slots:
            return
        self._slots.discard(slot)
        if self._queue:
            self._queue.popleft().set_result(self._grant())
