"""Whole episodes per second, what they cost in CPU, and megabytes per second."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable

from bench import references, usage
from bench.plan import Plan
from bench.references import Maker
from bench.report import SHELL, Figure
from bench.sampling import figure
from bench.session import session
from bench.subject import BenchError, Subject
from support.server import rss_bytes

EPISODES_PER_S, SHELL_EPISODES_PER_S = "whole episodes", f"whole episodes, {SHELL} loop"
CPU_PER_EPISODE, SHELL_CPU_PER_EPISODE = "CPU of a whole episode", f"CPU of a whole episode, {SHELL} loop"
CPU_PER_EXEC, BASH_CPU_PER_EXEC = "CPU of an exec", "CPU of a bash"
OUTPUT_MB_PER_S, BASH_OUTPUT_MB_PER_S = "output of one exec", "output of one bash"
OUTPUT_GROWTH = "memory that a long output took"
#: Commands before the verdict of a whole episode; the last one solves the task. As in loop.sh.
_COMMANDS = 4


# ---------------------------------------------------------------- whole episodes
async def episode(server: Subject) -> None:
    """From connecting to hanging up, with a right verdict. Raises: BenchError."""
    async with session(server.url) as own:
        await own.reset()
        for _ in range(_COMMANDS):
            await own.true()
        await own.solve()
        await own.evaluate(1.0)


async def _episodes(server: Subject, count: int, at_once: int) -> float:
    """Per second."""
    waiting = iter(range(count))

    async def caller() -> None:
        for _ in waiting:
            await episode(server)

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return count / (time.perf_counter() - begun)


async def whole_episodes(server: Subject, shell: Maker | None, plan: Plan) -> list[Figure]:
    """The server and the shell's loop in turn; of the loop the best number of workers."""
    await _episodes(server, plan.at_once, plan.at_once)
    rates, cpu, loops = [], [], defaultdict(list)
    for _ in range(plan.repeats):
        before = server.cpu()
        rates.append(await _episodes(server, plan.episodes, plan.at_once))
        cpu.append({who: seconds / plan.episodes for who, seconds in server.cpu().since(before).items()})
        for workers in plan.shell_workers if shell else ():
            assert shell is not None
            loops[workers].append(await asyncio.to_thread(shell.episodes, plan.episodes, workers))
    found = [figure(EPISODES_PER_S, rates, "/s"), *_cpu(CPU_PER_EPISODE, cpu)]
    if loops:
        best = max(loops.values(), key=lambda runs: statistics.median(rate for rate, _ in runs))
        found.append(figure(SHELL_EPISODES_PER_S, [rate for rate, _ in best], "/s"))
        found.append(figure(SHELL_CPU_PER_EPISODE, [seconds * 1e3 for _, seconds in best], "ms"))
    return found


def _cpu(name: str, runs: list[dict[str, float]]) -> Iterable[Figure]:
    """In all, and by process, but for those that used none."""
    yield figure(name, [sum(run.values()) * 1e3 for run in runs], "ms")
    for who in (who for who in runs[-1] if any(run.get(who) for run in runs)):
        yield figure(f"{name}: {who}", [run.get(who, 0.0) * 1e3 for run in runs], "ms")


async def exec_cpu(server: Subject, plan: Plan) -> list[Figure]:
    """CPU of `true` through the server, and of bash alone, in turn."""
    through, alone = [], []
    async with session(server.url) as own:
        await own.reset()
        for _ in range(max(plan.repeats, 2)):
            before = server.cpu()
            for _ in range(plan.execs_for_cpu):
                await own.true()
            through.append({who: s / plan.execs_for_cpu for who, s in server.cpu().since(before).items()})
            alone.append(references.bash_cpu_s(plan.execs_for_cpu) * 1e3)
    return [*_cpu(CPU_PER_EXEC, through), figure(BASH_CPU_PER_EXEC, alone, "ms")]


# ---------------------------------------------------------------- output
async def output(server: Subject, plan: Plan) -> list[Figure]:
    """Through one exec, and from the same command to a reader of its pipe; and the family's growth meanwhile."""
    command = f"yes | head -c {plan.output_bytes}"
    megabytes = plan.output_bytes / 1e6
    through, alone, growth = [], [], []
    async with session(server.url) as own:
        await own.reset()
        for _ in range(plan.repeats):
            family = server.family()
            for pid in family:
                usage.forget_peak(pid)
            before = {pid: rss_bytes(pid) for pid in family}
            through.append(megabytes / await own.run(command))
            growth.append(sum(max(usage.peak_rss_bytes(pid) - before[pid], 0) for pid in family) / 1e6)
            alone.append(megabytes / references.output_s(command))
    if not through:
        raise BenchError("no output was measured")
    rates = [figure(OUTPUT_MB_PER_S, through, "MB/s"), figure(BASH_OUTPUT_MB_PER_S, alone, "MB/s")]
    return [*rates, figure(OUTPUT_GROWTH, growth, "MB")]
