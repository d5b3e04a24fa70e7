"""Slots: the one place that decides how many episodes live at once, whoever asks."""

from types import TracebackType
from typing import Self


class CapacityReached(Exception):
    """Every slot is taken. Trainers look for CAPACITY_REACHED and come again."""

    def __init__(self, active: int, maximum: int) -> None:
        super().__init__(f"server at capacity: {active} of {maximum} sessions are active (CAPACITY_REACHED)")
        self.active, self.maximum = active, maximum


class Slot:
    """One unit of capacity, held from a session's beginning to its end. A context manager; releasing twice is fine."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool

    def release(self) -> None:
        self._pool._slots.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Pool:
    """`maximum` slots. Everything happens on the event loop, so taking one cannot be overtaken."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._slots: set[Slot] = set()

    @property
    def active(self) -> int:
        return len(self._slots)

    def take(self) -> Slot:
        """Raises: CapacityReached."""
        if self.active >= self.maximum:
            raise CapacityReached(self.active, self.maximum)
        slot = Slot(self)
        self._slots.add(slot)
        return slot
