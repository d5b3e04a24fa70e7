"""One server against several side by side, each on a port of its own and the same callers split among them.

    PYTHONPATH=tests .venv/bin/python -m bench.servers

Whether more servers make more episodes shows whether the one was what held them up; docs/scaling.md draws on it.
"""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from bench.session import TASK
from bench.subject import Subject
from bench.throughput import episode
from support.tasks import make_task

#: A caller comes back before its last episode is put away.
_SLOTS_PER_CALLER = 4


async def _caller(server: Subject, share: Sequence[int]) -> None:
    for _ in share:
        await episode(server)


async def _round(servers: Sequence[Subject], episodes: int, at_once: int) -> dict[str, float]:
    """Episodes per second, milliseconds of CPU for each, and how much of the machine was idle."""
    before, machine = [server.cpu() for server in servers], _machine_s()
    begun = time.perf_counter()
    shares = [range(caller, episodes, at_once) for caller in range(at_once)]
    await asyncio.gather(*(_caller(servers[caller % len(servers)], share) for caller, share in enumerate(shares)))
    seconds = time.perf_counter() - begun
    idle, total = (after - earlier for after, earlier in zip(_machine_s(), machine, strict=True))
    spent = [server.cpu().since(earlier) for server, earlier in zip(servers, before, strict=True)]
    return {
        "episodes/s": episodes / seconds,
        "CPU of servers, ms": sum(each["server"] for each in spent) / episodes * 1e3,
        "CPU of all, ms": sum(sum(each.values()) for each in spent) / episodes * 1e3,
        "busiest server, %": max(each["server"] for each in spent) / seconds * 100,
        "machine idle, %": idle / total * 100,
    }


def _machine_s() -> tuple[float, float]:
    """Idle and all ticks of all CPUs; proc(5)."""
    ticks = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


@click.command()
@click.option("--servers", default=2, help="How many there are beside each other at the most.")
@click.option("--episodes", default=192, help="Whole episodes of a round.")
@click.option("--callers", default=64, help="At once, in all.")
@click.option("--rounds", default=5, help="With each number of servers, in turn; the median is printed.")
def main(servers: int, episodes: int, callers: int, rounds: int) -> None:
    """Print a line for each number of servers."""
    with tempfile.TemporaryDirectory(prefix="tbench2-bench-") as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        make_task(folder / "tasks", TASK)
        slots = {"MAX_CONCURRENT_ENVS": str(_SLOTS_PER_CALLER * callers)}
        made = [Subject(folder / f"{n}", folder / "tasks", slots) for n in range(servers)]
        running = [stack.enter_context(server) for server in made]
        asyncio.run(_round(running, callers, callers))
        found: dict[int, list[dict[str, float]]] = {count: [] for count in range(1, servers + 1)}
        for _ in range(rounds):
            for count, seen in found.items():
                seen.append(asyncio.run(_round(running[:count], episodes, callers)))
        for count, seen in found.items():
            medians = {name: statistics.median(each[name] for each in seen) for name in seen[0]}
            click.echo(f"{count} server(s): " + ", ".join(f"{name} {value:.1f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
