"""Upstream's tbench2_env on the same tasks, when TB2_BENCH_PEER names a venv that has it."""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.latency import CLOSE, EVALUATE, EXEC, OUTPUT, RESET_COLD, WRITE
from bench.report import UPSTREAM, Figure
from bench.sampling import Load, Samples, figure
from bench.session import Session, session
from bench.subject import BenchError, Subject

VARIABLE = "TB2_BENCH_PEER"
_NOTE_LENGTH = 300


def peer(folder: Path, tasks: Path) -> Subject | None:
    venv = os.environ.get(VARIABLE)
    return Subject(folder, tasks, python=f"{venv}/bin/python", upstream=True) if venv else None


async def measure(server: Subject, samples: Samples, seconds: float) -> tuple[list[Figure], list[str]]:
    """One caller, at least once, until `seconds` are over. What upstream cannot do is a note, not a failure."""
    notes: dict[str, None] = {}
    deadline = time.monotonic() + seconds
    while True:
        try:
            await _episode(server, samples)
        except BenchError as error:
            notes[f"{UPSTREAM}: {str(error)[:_NOTE_LENGTH]}"] = None
        if time.monotonic() > deadline:
            break
    rss = figure(f"{UPSTREAM}'s server RSS", [server.rss_bytes() / 1e6], "MB")
    return [figure(f"{UPSTREAM} until ready", [server.ready_s], "s"), rss], list(notes)


async def _episode(server: Subject, samples: Samples) -> None:
    async with session(server.url) as own:
        for what, step in _STEPS:
            samples.add(UPSTREAM, what, Load(), await step(own))


async def _evaluate_solved(own: Session) -> float:
    await own.solve()
    return await own.evaluate(1.0)


_STEPS: tuple[tuple[str, Callable[[Session], Awaitable[float]]], ...] = (
    (RESET_COLD, Session.reset), (EXEC, Session.true), (EXEC, Session.true), (OUTPUT, Session.output),
    (WRITE, Session.write), (EVALUATE, _evaluate_solved), (CLOSE, Session.close),
)  # fmt: skip
