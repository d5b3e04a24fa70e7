"""Warm sandboxes: made ahead of the resets that will want them, for tasks that were reset lately.

warm = Warm(has_episodes, proxy, maximum=8)
sandbox, temperature = await warm.open(task.path, Order(engine, snapshot, network, limits))  # "warm" or "cold"
await warm.stop()

A warm sandbox is made exactly as its episode's would be, idle (see `Spawner.create`), and has one episode or none. It
is given away only if the order is still the same and nothing came or went at the top of the node's root since: new
names there are hidden when a sandbox is made. It holds a lease on its layers, as an episode does.

How many there are: of each task as many as it had resets lately, in all `maximum` at most, and no more than turned out
to be of use: each that ends unused takes one from `_credit`, each reset of a task that was reset lately gives one back.
So nothing is made ahead for a run over many tasks, one reset each. They are made one at a time, between resets, while
any episode lives or has just ended; once none does, all are gone in half a second.
"""

import asyncio
import collections
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Limits, SandboxSpec
from tbench2_env.server.engine import Engine
from tbench2_env.server.images.store import Lease, MissingLayer
from tbench2_env.server.networks import Choice
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.sandboxes import close_sandbox, open_sandbox
from tbench2_env.server.snapshots import Snapshot

log = structlog.get_logger()

#: One is made when nothing was asked of the helpers for so many seconds, so that nobody waits for it; but one every
#: `_PATIENCE_S` while they are never left alone.
_QUIET_S, _PATIENCE_S = 0.03, 0.25
#: A reset counts for so long, in seconds.
_LATELY_S = 30.0
#: Seconds that warm sandboxes outlive the last episode, for clients who close one and begin the next.
_LINGER_S = 0.4
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Order:
    """What a sandbox is made of. Equal orders get equal sandboxes."""

    engine: Engine
    snapshot: Snapshot
    network: Choice
    limits: Limits
    #: When a name came or went at the top of the node's root, in nanoseconds.
    root_changed_ns: int = field(default_factory=lambda: Path("/").stat().st_mtime_ns)

    async def make(self, proxy: EgressProxy, *, idle: bool = False) -> Sandbox:
        """Raises: SandboxError."""
        engine, environment = self.engine, self.snapshot.environment
        # The sandbox has a name of its own: episode ids are the client's choice and may come again.
        spec = SandboxSpec(
            uuid.uuid4().hex, (self.snapshot.name,), self.network.network, self.limits,
            engine.environments.folders(environment), environment.over_node,
        )  # fmt: skip
        return await open_sandbox(engine.spawner, spec, self.network, proxy, idle=idle)

    def lease(self) -> Lease:
        """Raises: MissingLayer."""
        return self.engine.environments.lease(self.snapshot.environment)


@dataclass(frozen=True, eq=False)
class _Kept:
    sandbox: Sandbox
    lease: Lease


@dataclass(eq=False)
class _Shelf:
    """What is kept of one task, the oldest first, and when it was reset lately (time.monotonic)."""

    order: Order
    resets: collections.deque[float] = field(default_factory=collections.deque)
    kept: collections.deque[_Kept] = field(default_factory=collections.deque)


class Warm:
    """State: a shelf for each task that was reset lately, the last reset last; and what is being made or destroyed."""

    def __init__(self, has_episodes: Callable[[], bool], proxy: EgressProxy, maximum: int) -> None:
        self._has_episodes, self._proxy, self._maximum = has_episodes, proxy, maximum
        self._credit = maximum
        self._shelves: dict[Path, _Shelf] = {}
        self._opening = 0
        self._used_at = self._made_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._making: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """From any thread."""
        return sum(len(shelf.kept) for shelf in list(self._shelves.values()))

    async def open(self, task: Path, order: Order) -> tuple[Sandbox, str]:
        """A sandbox, and whether it was "warm" or "cold". Raises: SandboxError."""
        if self._maximum == 0 or not order.engine.spawner.rung.isolated:
            return await order.make(self._proxy), "cold"
        shelf = self._note(task, order)
        self._opening += 1
        try:
            sandbox = await self._take(shelf)
            return (await order.make(self._proxy), "cold") if sandbox is None else (sandbox, "warm")
        finally:
            self._opening -= 1
            self._look_in(_QUIET_S)

    async def stop(self) -> None:
        """Destroy them all, also one that is being made."""
        self._maximum = 0
        if self._timer is not None:
            self._timer.cancel()
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        self._clear()
        if self._ending:
            await asyncio.wait(self._ending)

    # ------------------------------------------------------------ giving away
    def _note(self, task: Path, order: Order) -> _Shelf:
        """A reset of the task; what was kept of it as it was before is of no use any more."""
        shelf = self._shelves.pop(task, None)
        if shelf is not None and shelf.order != order:
            self._empty(shelf)
            shelf = None
        if shelf is None:
            shelf = _Shelf(order)
        else:
            self._credit = min(self._maximum, self._credit + 1)
        self._shelves[task] = shelf
        self._used_at = time.monotonic()
        shelf.resets.append(self._used_at)
        return shelf

    async def _take(self, shelf: _Shelf) -> Sandbox | None:
        while shelf.kept:
            kept = shelf.kept.popleft()  # from here on nobody else sees it
            try:
                await kept.sandbox.adopt()
            except SandboxError:  # it died
                self._end(kept)
                continue
            except BaseException:
                self._end(kept)
                raise
            kept.lease.close()  # the episode has its own
            return kept.sandbox
        return None

    # ------------------------------------------------------------ keeping
    def _look_in(self, seconds: float) -> None:
        if self._timer is None and self._making is None and self._maximum > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer, now = None, time.monotonic()
        self._sort_out(now)
        shelf = self._wanting()
        if shelf is None:
            self._made_at = now
        elif self._is_convenient(shelf, now):
            self._made_at = now
            if self._is_full:
                self._end(self._richest.kept.popleft())
            self._making = asyncio.get_running_loop().create_task(self._fill(shelf))
        if self._shelves:
            self._look_in(_LOOK_EVERY_S if shelf is None else _QUIET_S)

    def _is_convenient(self, shelf: _Shelf, now: float) -> bool:
        if self._opening:
            return False
        spoke_at = shelf.order.engine.spawner.conversation.spoke_at
        return now - spoke_at >= _QUIET_S or now - self._made_at >= _PATIENCE_S

    def _sort_out(self, now: float) -> None:
        """Destroy what is dead, of no use lately, or left by the last client."""
        if self._opening or self._has_episodes():
            self._used_at = now
        elif now - self._used_at > _LINGER_S:
            self._clear()
        for task, shelf in list(self._shelves.items()):
            for kept in [kept for kept in shelf.kept if kept.sandbox.died.done()]:
                shelf.kept.remove(kept)
                self._end(kept)
            while shelf.resets and now - shelf.resets[0] > _LATELY_S:
                shelf.resets.popleft()
            while len(shelf.kept) > len(shelf.resets):
                self._credit = max(0, self._credit - 1)
                self._end(shelf.kept.popleft())
            if not shelf.resets:
                del self._shelves[task]

    def _wanting(self) -> _Shelf | None:
        """The shelf that is to get one more: that with the fewest, at a tie the one whose task was reset last."""
        wanting = [shelf for shelf in reversed(self._shelves.values()) if len(shelf.kept) < len(shelf.resets)]
        poorest = min(wanting, key=_size, default=None)
        if poorest is None or (self._is_full and _size(self._richest) < _size(poorest) + 2):
            return None
        return poorest

    @property
    def _is_full(self) -> bool:
        return self.count >= min(self._maximum, self._credit)

    @property
    def _richest(self) -> _Shelf:
        return max(self._shelves.values(), key=_size)

    async def _fill(self, shelf: _Shelf) -> None:
        try:
            shelf.kept.append(await self._make(shelf.order))
            if shelf not in self._shelves.values():
                self._empty(shelf)
        except (SandboxError, MissingLayer, OSError) as error:
            log.warning("no sandbox can be made ahead", reason=str(error))
            shelf.resets.clear()  # until the next reset
        finally:
            self._making = None
            self._look_in(_QUIET_S)

    async def _make(self, order: Order) -> _Kept:
        lease = order.lease()
        try:
            return _Kept(await order.make(self._proxy, idle=True), lease)
        except BaseException:
            lease.close()
            raise

    # ------------------------------------------------------------ ends
    def _clear(self) -> None:
        self._credit = max(0, self._credit - self.count)
        for shelf in self._shelves.values():
            self._empty(shelf)
        self._shelves.clear()

    def _empty(self, shelf: _Shelf) -> None:
        while shelf.kept:
            self._end(shelf.kept.popleft())

    def _end(self, kept: _Kept) -> None:
        ending = asyncio.get_running_loop().create_task(self._destroy(kept))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _destroy(self, kept: _Kept) -> None:
        await close_sandbox(kept.sandbox, self._proxy)
        kept.lease.close()


def _size(shelf: _Shelf) -> int:
    return len(shelf.kept)
