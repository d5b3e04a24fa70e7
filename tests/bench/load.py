"""`make load`: many clients at once, with mixed work and time to think, and what that does to them and to a neighbour.

python tests/bench/load.py               128 clients x 20 episodes
python tests/bench/load.py --short       16 clients x 3 episodes
python tests/bench/load.py --neighbour   what busy processes next door lose to episodes, by TB2_NICE

Exit status 0 only if no call failed, every verdict was right, nothing was left, the slowest client's median was at most
twice the fastest's or no more than chance makes of it, and the event loop's lag was below 20 ms in 99 of 100 cases.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TypeVar

import httpx
from rich.console import Console
from rich.table import Table

from support.server import Server
from support.tasks import make_task
from tbench2_env import Tbench2Action, Tbench2Env, Tbench2Error

UNFAIR, LAG_P99_S = 2.0, 0.020
#: Seconds that a client thinks between two calls, on the average.
THINK_S = 1.0
_EPISODES_OF_A_SESSION = 5
#: How much more unfair than chance alone is unfair; and how often chance is tried.
_MORE_THAN_CHANCE, _DEALS = 1.1, 100
_LAG = "tbench2_loop_lag_seconds_bucket"
_BUSY = "while :; do :; done"

T = TypeVar("T")


class Wrong(Exception):
    """An answer is not what it must be."""


@dataclass
class Figures:
    """Of one run: seconds by kind of call, of each client those of calls that all clients make, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    alike: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    episodes: int = 0

    @property
    def unfairness(self) -> float:
        """The slowest client's median to the fastest's."""
        return _spread(list(self.alike.values()))

    @property
    def by_chance(self) -> float:
        """What it would be if no client were treated otherwise than another: with all episodes dealt out anew."""
        hands = list(self.alike.values())
        cards = [seconds for hand in hands for seconds in hand]
        spreads = []
        for _ in range(_DEALS):
            random.shuffle(cards)
            left = iter(cards)
            spreads.append(_spread([[next(left) for _ in hand] for hand in hands]))
        return statistics.median(spreads)


def _spread(hands: list[list[float]]) -> float:
    medians = [statistics.median(hand) for hand in hands]
    return max(medians) / min(medians)


# ---------------------------------------------------------------- kinds of work
def expect(true: bool, what: object) -> None:
    if not true:
        raise Wrong(str(what)[:200])


async def short(env: Tbench2Env) -> None:
    for _ in range(3):
        answer = await env.exec("echo here")
        expect(answer.output == "here\n", answer)


async def output(env: Tbench2Env) -> None:
    """Three times the limit of what is kept."""
    answer = await env.exec("head -c 3M /dev/zero | tr '\\0' x")
    expect(len(answer.output) > 1 << 20 and "bytes of output cut" in answer.output, len(answer.output))


async def file(env: Tbench2Env) -> None:
    expect((await env.write_file("big.txt", "y" * (256 << 10))).success, "write_file")
    expect((await env.exec("wc -c <big.txt")).output.strip() == str(256 << 10), "the file's size")


async def burst(env: Tbench2Env) -> None:
    """About a tenth of a second of CPU."""
    answer = await env.exec("i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo $i")
    expect(answer.output == "20000\n", answer)


async def background(env: Tbench2Env) -> None:
    """A child that outlives its command, and would outlive the episode."""
    expect((await env.exec("setsid sleep 3600 >/dev/null 2>&1 & echo up")).output == "up\n", "a background child")


async def terminal(env: Tbench2Env) -> None:
    seen = (await env.exec("read line; echo got $line", session_id="t", block=False)).output
    action, deadline = Tbench2Action(action_type="write", session_id="t", command="word\n"), time.monotonic() + 30
    while "got word" not in seen:
        expect(time.monotonic() < deadline, f"the terminal shows {seen!r}")
        seen += (await env.step(action)).observation.output
        action = Tbench2Action(action_type="view", session_id="t")
        await asyncio.sleep(0.1)


Work = Callable[[Tbench2Env], Awaitable[None]]
KINDS: tuple[Work, ...] = (short, output, file, burst, background, terminal)


# ---------------------------------------------------------------- clients
class Client:
    """One client, which plays one episode after the other; half of them it solves."""

    def __init__(self, number: int, figures: Figures) -> None:
        self.number, self.figures = number, figures
        self._random = random.Random(number)

    async def play(self, server: Server, episodes: int) -> None:
        for begun in range(0, episodes, _EPISODES_OF_A_SESSION):
            try:
                async with server.client(message_timeout_s=120) as env:
                    for episode in range(begun, min(begun + _EPISODES_OF_A_SESSION, episodes)):
                        await self._episode(env, KINDS[(self.number + episode) % len(KINDS)], solve=episode % 2 == 0)
                        self.figures.episodes += 1
            except (Tbench2Error, Wrong) as error:
                self.figures.wrong.append(f"client {self.number}: {type(error).__name__}: {error}")

    async def _episode(self, env: Tbench2Env, work: Work, *, solve: bool) -> None:
        reset_s, _ = await self._timed("reset", lambda: env.reset(task_id="ok"))
        exec_s, _ = await self._timed("exec", lambda: env.exec("echo ok >out.txt" if solve else "true"))
        await self._timed(work.__name__, lambda: work(env))
        evaluate_s, verdict = await self._timed("evaluate", env.evaluate)
        expect(verdict.reward == float(solve), f"a reward of {verdict.reward}: {verdict.observation.error}")
        self.figures.alike[self.number].append(reset_s + exec_s + evaluate_s)

    async def _timed(self, kind: str, call: Callable[[], Awaitable[T]]) -> tuple[float, T]:
        """Think, then make the call; answers also with the seconds that it took."""
        await asyncio.sleep(self._random.expovariate(1 / THINK_S))
        begun = time.perf_counter()
        answer = await call()
        self.figures.seconds[kind].append(time.perf_counter() - begun)
        return self.figures.seconds[kind][-1], answer


async def play_all(server: Server, clients: int, episodes: int) -> Figures:
    figures = Figures()
    await asyncio.gather(*(Client(number, figures).play(server, episodes) for number in range(clients)))
    return figures


def lag(server: Server) -> tuple[float, float]:
    """The event loop's p50 and p99, in seconds: upper bounds, those of a histogram's buckets."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    lines = [line.partition('le="')[2].split('"} ') for line in text.splitlines() if line.startswith(_LAG)]
    buckets = [(float(bound), float(count)) for bound, count in lines]
    total = buckets[-1][1]
    p50, p99 = (next(bound for bound, count in buckets if count >= share * total) for share in (0.5, 0.99))
    return p50, p99


@contextmanager
def serving(clients: int, env: Mapping[str, str] = {}) -> Iterator[Server]:
    """A server with a slot for each client."""
    with tempfile.TemporaryDirectory(prefix="tbench2-load-") as folder:
        make_task(Path(folder, "tasks"), "ok")
        server = Server(Path(folder), Path(folder, "tasks"), {"MAX_CONCURRENT_ENVS": str(clients), **env}).start()
        try:
            yield server
        finally:
            server.stop()


def load(console: Console, clients: int, episodes: int) -> bool:
    with serving(clients) as server:
        begun = time.monotonic()
        figures = asyncio.run(play_all(server, clients, episodes))
        took_s = time.monotonic() - begun
        p50, p99 = lag(server)
        try:
            server.assert_idle(within_s=60)
        except AssertionError as error:
            figures.wrong.append(str(error))
    shown = Table(title=f"{clients} clients x {episodes} episodes, {THINK_S:g} s of thought before each call")
    for heading in ("call", "count", "p50 ms", "p99 ms", "max ms"):
        shown.add_column(heading, justify="left" if heading == "call" else "right")
    for kind, seconds in figures.seconds.items():
        points = (
            statistics.median(seconds),
            statistics.quantiles(seconds, n=100, method="inclusive")[98],
            max(seconds),
        )
        shown.add_row(kind, str(len(seconds)), *(f"{point * 1e3:.1f}" for point in points))
    console.print(shown)
    console.print(f"{figures.episodes} episodes in {took_s:.0f} s, {figures.episodes / took_s:.1f} a second")
    most = max(UNFAIR, _MORE_THAN_CHANCE * figures.by_chance)
    by_chance = f"by chance alone {figures.by_chance:.2f}"
    console.print(
        f"slowest client's median to the fastest's: {figures.unfairness:.2f} (at most {most:.2f}; {by_chance})"
    )
    console.print(f"event-loop lag: p50 <= {p50 * 1e3:g} ms, p99 <= {p99 * 1e3:g} ms (at most {LAG_P99_S * 1e3:g})")
    for wrong in figures.wrong:
        console.print(wrong, style="red", markup=False)
    everything = figures.episodes == clients * episodes and not figures.wrong
    return everything and figures.unfairness <= most and p99 <= LAG_P99_S


# ---------------------------------------------------------------- the trainer next door
def _toil(done: "Synchronized[int]") -> None:
    os.setsid()
    while True:
        for _ in range(10_000):
            pass
        done.value += 1


@contextmanager
def neighbours() -> Iterator[Callable[[], int]]:
    """A busy process for each CPU; the function tells how much they have done so far."""
    done = [multiprocessing.Value("q", 0) for _ in os.sched_getaffinity(0)]
    processes = [multiprocessing.Process(target=_toil, args=(one,), daemon=True) for one in done]
    for process in processes:
        process.start()
    try:
        yield lambda: sum(one.value for one in done)
    finally:
        for process in processes:
            process.kill()
            process.join()


async def busy_episodes(server: Server, clients: int, done: Callable[[], int], for_s: float) -> float:
    """How much is done in a second while every client's episode does nothing but compute."""
    envs = [server.client() for _ in range(clients)]
    try:
        await asyncio.gather(*(env.reset(task_id="ok") for env in envs))
        await asyncio.gather(*(env.exec(_BUSY, session_id="t", block=False) for env in envs))
        return await rate(done, for_s)
    finally:
        await asyncio.gather(*(env.close() for env in envs))


async def mixed_episodes(server: Server, clients: int, done: Callable[[], int], for_s: float) -> float:
    """How much is done in a second while the clients play episodes as they do in `load`."""
    playing = asyncio.ensure_future(play_all(server, clients, 1000))
    await asyncio.sleep(2 * THINK_S)
    try:
        return await rate(done, for_s)
    finally:
        playing.cancel()
        await asyncio.wait([playing])


async def rate(done: Callable[[], int], for_s: float) -> float:
    before, begun = done(), time.monotonic()
    await asyncio.sleep(for_s)
    return (done() - before) / (time.monotonic() - begun)


def neighbour(console: Console, clients: int, for_s: float, nices: list[int]) -> None:
    shown = Table(title=f"a busy process on each of {len(os.sched_getaffinity(0))} CPUs, and {clients} episodes")
    for heading in ("TB2_NICE", "left to it beside busy episodes", "beside mixed ones"):
        shown.add_column(heading, justify="right")
    for nice in nices:
        with serving(clients, {"TB2_NICE": str(nice)}) as server, neighbours() as done:
            first = asyncio.run(rate(done, for_s / 2))
            busy = asyncio.run(busy_episodes(server, clients, done, for_s))
            mixed = asyncio.run(mixed_episodes(server, clients, done, for_s))
            alone = (first + asyncio.run(rate(done, for_s / 2))) / 2
            shown.add_row(str(nice), f"{busy / alone:.0%}", f"{mixed / alone:.0%}")
    console.print(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--episodes", type=int, default=20, help="of each client")
    parser.add_argument("--short", action="store_true", help="16 clients, 3 episodes each")
    parser.add_argument("--neighbour", action="store_true", help="measure what busy processes next door lose")
    parser.add_argument("--nice", type=int, nargs="+", default=[0, 5, 10, 19], help="with --neighbour: TB2_NICE")
    parser.add_argument("--seconds", type=float, default=4, help="with --neighbour: of each measurement")
    arguments = parser.parse_args()
    clients, episodes = (16, 3) if arguments.short else (arguments.clients, arguments.episodes)
    console = Console()
    if arguments.neighbour:
        neighbour(console, clients, arguments.seconds, arguments.nice)
        return 0
    return 0 if load(console, clients, episodes) else 1


if __name__ == "__main__":
    sys.exit(main())
