"""How long each operation takes, by live episodes and by callers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import references
from bench.references import Served
from bench.report import BASH, SERVER
from bench.sampling import Load, Samples
from bench.session import Session, session
from bench.subject import Subject

EXEC, OUTPUT, WRITE, EVALUATE, CLOSE = "exec", "exec 1 MiB out", "write_file 1 MiB", "evaluate", "close"
#: By a server as it is by default; by one that holds nothing ready (TB2_WARM=0); one that ends another episode first.
RESET, RESET_COLD, RESET_AGAIN = "reset", "reset cold", "reset after evaluate"
OPERATIONS = (RESET, RESET_COLD, RESET_AGAIN, EXEC, OUTPUT, WRITE, EVALUATE, CLOSE)
#: Words of loop.sh, and what they are called beside the server's.
SANDBOX = {"create": RESET_COLD, "exec": EXEC, "verify": EVALUATE, "destroy": CLOSE}
_EXECS = 3
#: After a reset or the end of an episode: what they leave to be done in the background is not to be in the next figure.
_SETTLE_S = 0.02
_OPENED_AT_ONCE = 8


@dataclass(frozen=True)
class Bench:
    """What takes turns: two servers, bash, and sandboxes from a shell."""

    samples: Samples
    server: Subject
    cold: Subject
    sandboxes: dict[str, Served]
    task: Path
    folder: Path


class Idle:
    """Episodes that are there and do nothing."""

    def __init__(self, server: Subject) -> None:
        self._server = server
        self._open: list[contextlib.AsyncExitStack] = []

    async def grow(self, count: int) -> None:
        """To `count`, or down to it."""
        for stack in self._open[count:]:
            await stack.aclose()
        del self._open[count:]
        while (missing := count - len(self._open)) > 0:
            self._open += await asyncio.gather(*(self._one() for _ in range(min(missing, _OPENED_AT_ONCE))))

    async def _one(self) -> contextlib.AsyncExitStack:
        stack = contextlib.AsyncExitStack()
        await (await stack.enter_async_context(session(self._server.url))).reset()
        return stack


@contextlib.asynccontextmanager
async def idle(server: Subject) -> AsyncIterator[Idle]:
    episodes = Idle(server)
    try:
        yield episodes
    finally:
        await episodes.grow(0)


# ---------------------------------------------------------------- by live episodes
async def by_live(bench: Bench, levels: Sequence[int], rounds: int, level_s: float) -> None:
    """One caller. The first level is measured again after the last, so that a change of the machine is seen there."""
    async with idle(bench.server) as others, session(bench.server.url) as own, session(bench.cold.url) as cold:
        for level in (*levels, levels[0]):
            await others.grow(level - 1)
            await asyncio.sleep(_SETTLE_S)
            deadline = time.monotonic() + level_s
            for number in range(rounds):
                await _Round(bench, Load(live=level), own, cold).run(reward=float(number % 2))
                if time.monotonic() > deadline:
                    break


@dataclass(frozen=True)
class _Round:
    """Every operation once or a few times, each beside what it is compared with."""

    bench: Bench
    load: Load
    own: Session
    cold: Session

    def _add(self, who: str, what: str, seconds: float) -> None:
        self.bench.samples.add(who, what, self.load, seconds)

    async def run(self, reward: float) -> None:
        self._add(BASH, EXEC, references.true_s())
        self._add(SERVER, RESET, await self.own.reset())
        await asyncio.sleep(_SETTLE_S)
        await self._execs()
        await self._mebibytes()
        await self._evaluate(reward)
        self._add(SERVER, RESET_AGAIN, await self.own.reset())
        await asyncio.sleep(_SETTLE_S)
        self._add(BASH, EXEC, references.true_s())
        self._add(SERVER, CLOSE, await self.own.close())
        await asyncio.sleep(_SETTLE_S)
        self._add(SERVER, RESET_COLD, await self.cold.reset())
        await self.cold.close()
        self._sandboxes()

    async def _execs(self) -> None:
        for _ in range(_EXECS):
            self._add(BASH, EXEC, references.true_s())
            self._add(SERVER, EXEC, await self.own.true())

    async def _mebibytes(self) -> None:
        self._add(BASH, OUTPUT, references.output_s())
        self._add(SERVER, OUTPUT, await self.own.output())
        self._add(BASH, WRITE, references.write_s(self.bench.folder))
        self._add(SERVER, WRITE, await self.own.write())

    async def _evaluate(self, reward: float) -> None:
        if reward:
            await self.own.solve()
        self._add(BASH, EVALUATE, references.harness_s(self.bench.task, self.bench.folder))
        self._add(SERVER, EVALUATE, await self.own.evaluate(reward))
        await asyncio.sleep(_SETTLE_S)

    def _sandboxes(self) -> None:
        for name, served in self.bench.sandboxes.items():
            for word, what in SANDBOX.items():
                self._add(name, what, served.seconds(word))


# ---------------------------------------------------------------- by callers
async def by_callers(bench: Bench, levels: Sequence[int], shared: int) -> None:
    """As many episodes as callers, each of which asks again as soon as it has its answer."""
    for level in levels:
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(session(bench.server.url)) for _ in range(level)]
            await _at_once(bench, sessions, max(shared // level, 2))


async def _at_once(bench: Bench, sessions: Sequence[Session], times: int) -> None:
    load = Load(live=len(sessions), callers=len(sessions))

    async def timed(what: str, operation: Callable[[Session], Awaitable[float]]) -> None:
        async def one(caller: Session) -> None:
            for _ in range(times):
                bench.samples.add(SERVER, what, load, await operation(caller))

        await asyncio.gather(*(one(caller) for caller in sessions))

    async def lives(caller: Session) -> None:
        for number in range(times):
            reset = RESET if number % 2 == 0 else RESET_AGAIN
            bench.samples.add(SERVER, reset, load, await caller.reset())
            if number % 2:
                bench.samples.add(SERVER, CLOSE, load, await caller.close())
            else:
                bench.samples.add(SERVER, EVALUATE, load, await caller.evaluate(0.0))

    await asyncio.gather(*(lives(caller) for caller in sessions))
    await asyncio.gather(*(caller.reset() for caller in sessions))
    await timed(EXEC, Session.true)
    await timed(OUTPUT, Session.output)
    await timed(WRITE, Session.write)
