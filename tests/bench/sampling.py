"""Durations as they are taken, by who did what under which load, and their summaries."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Figure, Series


@dataclass(frozen=True)
class Load:
    """What else there was: `live` episodes (the caller's included), `callers` at the same time."""

    live: int = 1
    callers: int = 1


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, interpolated between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figure(name: str, values: Sequence[float], unit: str) -> Figure:
    """The median of the runs' values, and their quartiles."""
    ordered = sorted(values)
    low, high = percentile(ordered, 25), percentile(ordered, 75)
    return Figure(name=name, value=statistics.median(ordered), low=low, high=high, unit=unit, runs=len(ordered))


class Samples:
    """Seconds by (who, what, load)."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str, Load], list[float]] = defaultdict(list)

    def add(self, who: str, what: str, load: Load, seconds: float) -> None:
        self._seconds[who, what, load].append(seconds)

    def series(self) -> list[Series]:
        return [self._summary(*key, sorted(values)) for key, values in self._seconds.items()]

    @staticmethod
    def _summary(who: str, what: str, load: Load, ordered: list[float]) -> Series:
        ms = {f"p{percent}": percentile(ordered, percent) * 1e3 for percent in (25, 50, 75, 95, 99)}
        return Series(
            who=who, what=what, live=load.live, callers=load.callers, count=len(ordered), least=ordered[0] * 1e3, **ms
        )
