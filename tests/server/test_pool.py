"""Slots: never more than there are, and never lost; and the queue for them, first come, first served."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbench2_env.server.pool import CapacityReached, Pool, Slot


class _Selector(selectors.DefaultSelector):
    """Time passes only where the loop would sleep, and then at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(timeout or 0.0, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work()` on a loop whose time takes none."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(work())


async def _settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- without a queue
@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_there_are_never_more_than_the_maximum(maximum: int, takes: list[bool]) -> None:
    pool, held = Pool(maximum), list[Slot]()
    for take in takes:
        if not take:
            if held:
                held.pop().release()
        elif len(held) < maximum:
            held.append(pool.take())
        else:
            with pytest.raises(CapacityReached) as full:
                pool.take()
            assert (full.value.active, full.value.maximum) == (maximum, maximum)
            assert "CAPACITY_REACHED" in str(full.value)
        assert pool.active == len(held)


def test_a_slot_is_released_once_and_whatever_happens() -> None:
    pool = Pool(2)
    with pytest.raises(ZeroDivisionError), pool.take() as slot:
        _ = 1 / 0
    other = pool.take()
    slot.release()
    assert pool.active == 1, "a slot released twice freed another's"
    other.release()
    assert pool.active == 0


def test_without_a_queue_nobody_waits() -> None:
    async def work() -> None:
        pool = Pool(1)
        slot = await pool.acquire()
        assert slot.queued_s == 0
        with pytest.raises(CapacityReached, match="1 of 1") as full:
            await pool.acquire()
        assert "queue" not in str(full.value)
        assert asyncio.get_running_loop().time() == 0

    run(work)


# ---------------------------------------------------------------- the queue
class _Callers:
    """Many callers of one pool, and what must be true of them after every step."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.tasks: list[asyncio.Task[Slot]] = []
        self.held: list[Slot] = []
        self.served: list[int] = []

    def acquire(self) -> None:
        number = len(self.tasks)
        task = asyncio.create_task(self.pool.acquire())
        task.add_done_callback(lambda done: self._done(number, done))
        self.tasks.append(task)

    def _done(self, number: int, task: "asyncio.Task[Slot]") -> None:
        if task.cancelled() or task.exception():
            return
        self.served.append(number)
        self.held.append(task.result())

    @property
    def waiting(self) -> "list[asyncio.Task[Slot]]":
        return [task for task in self.tasks if not task.done()]

    def check(self) -> None:
        assert self.pool.active <= self.pool.maximum
        assert self.pool.active >= len(self.held)

    def check_settled(self) -> None:
        self.check()
        assert self.pool.active == len(self.held), "a slot is nobody's"
        assert self.pool.queued == len(self.waiting), "a place in the queue is nobody's"
        assert not (self.waiting and self.pool.active < self.pool.maximum), "a slot is free and somebody waits"
        # Not judged in between: of two who were given slots in their turn, the later may hear of it sooner.
        last_served = max(self.served, default=-1)
        assert all(task.done() for task in self.tasks[:last_served]), "somebody was overtaken"


_STEPS = st.lists(
    st.one_of(
        st.just(("acquire", 0)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("release twice"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("sleep"), st.integers(1, 12)),
        st.just(("turn", 0)),
        st.just(("settle", 0)),
    ),
    min_size=20,  # without it most are five steps long, in which nobody queues
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 4), st.sampled_from([0.0, 1.0, 10.0]), _STEPS)
def test_any_interleaving(maximum: int, queue_timeout_s: float, steps: list[tuple[str, int]]) -> None:
    async def work() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        callers = _Callers(Pool(maximum, queue_timeout_s))
        for step, number in steps:
            match step:
                case "acquire":
                    callers.acquire()
                case "cancel" if callers.waiting:
                    callers.waiting[number % len(callers.waiting)].cancel()
                case "release" | "release twice" if callers.held:
                    slot = callers.held.pop(number % len(callers.held))
                    slot.release()
                    if step == "release twice":
                        slot.release()
                case "leave" if callers.held:
                    callers.held[number % len(callers.held)].leave()
                case "sleep":
                    await asyncio.sleep(number / 4)
                case "turn":
                    await asyncio.sleep(0)
                case "settle":
                    await _settle()
                    callers.check_settled()
            callers.check()
        await _settle()
        callers.check_settled()
        # Whatever happened: everybody gets an answer, and every slot can be had again.
        while callers.waiting:
            if callers.held:
                callers.held.pop().release()
            await asyncio.sleep(1)
        await asyncio.gather(*callers.tasks, return_exceptions=True)
        for slot in callers.held:
            slot.release()
        assert (callers.pool.active, callers.pool.queued) == (0, 0)
        again = [callers.pool.take() for _ in range(maximum)]
        assert len(again) == maximum
        assert not failures, failures

    run(work)


def test_first_come_first_served() -> None:
    async def work() -> None:
        pool = Pool(2, queue_timeout_s=100)
        callers = _Callers(pool)
        for _ in range(8):
            callers.acquire()
        await _settle()
        assert (callers.served, pool.queued) == ([0, 1], 6)
        callers.tasks[3].cancel()
        for expected in ([0, 1, 2], [0, 1, 2, 4], [0, 1, 2, 4, 5]):
            await asyncio.sleep(2)
            callers.held.pop(0).release()
            await _settle()
            assert callers.served == expected
        assert [slot.queued_s for slot in callers.held] == [4, 6]
        for task in callers.waiting:
            task.cancel()

    run(work)


def test_nobody_overtakes_the_queue() -> None:
    """Not even by coming in the moment in which a slot is released."""

    async def work() -> None:
        pool = Pool(1, queue_timeout_s=100)
        first = pool.take()
        waiting = asyncio.create_task(pool.acquire())
        await _settle()
        first.release()
        with pytest.raises(CapacityReached):
            pool.take()
        late = asyncio.create_task(pool.acquire())
        second = await waiting
        assert not late.done()
        second.release()
        (await late).release()

    run(work)


def test_who_waits_in_vain_is_told_the_position() -> None:
    async def work() -> None:
        pool = Pool(1, queue_timeout_s=3)
        slot = pool.take()
        waiting = []
        for _ in range(3):
            waiting.append(asyncio.create_task(pool.acquire()))
            await asyncio.sleep(2)
        await asyncio.sleep(5)
        # Each is the first when its time is over: those before have left. The one after has come meanwhile, or not.
        for task, position in zip(waiting, ("1 of 2", "1 of 2", "1 of 1"), strict=True):
            assert f"after 3 s in the queue the position was {position}" in str(task.exception())
            assert "CAPACITY_REACHED" in str(task.exception())
        assert pool.queued == 0
        slot.release()
        assert pool.active == 0

    run(work)


def test_a_slot_granted_to_one_who_leaves_goes_on() -> None:
    async def work() -> None:
        pool = Pool(1, queue_timeout_s=100)
        slot = pool.take()
        leaver, stayer = asyncio.create_task(pool.acquire()), asyncio.create_task(pool.acquire())
        await _settle()
        slot.release()
        leaver.cancel()
        granted = await stayer
        assert leaver.cancelled()
        assert pool.active == 1
        granted.release()
        assert pool.active == 0

    run(work)


# ---------------------------------------------------------------- slots on their way back
def test_who_comes_while_a_slot_is_on_its_way_back_waits_for_it() -> None:
    async def work() -> None:
        pool = Pool(2)
        leaving, _ = pool.take(), pool.take()
        with pytest.raises(CapacityReached):
            await pool.acquire()
        leaving.leave()
        newcomer = asyncio.create_task(pool.acquire())
        await _settle()
        # One slot comes back, so one may wait.
        with pytest.raises(CapacityReached):
            await pool.acquire()
        await asyncio.sleep(1)
        leaving.release()
        slot = await newcomer
        assert pool.active == 2
        assert slot.queued_s == 1

    run(work)


def test_a_slot_that_does_not_come_back_is_not_waited_for_long() -> None:
    async def work() -> None:
        pool = Pool(1)
        pool.take().leave()
        with pytest.raises(CapacityReached):
            await pool.acquire()
        assert 0 < asyncio.get_running_loop().time() <= 10
        assert pool.queued == 0

    run(work)
