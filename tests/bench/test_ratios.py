"""The speed that must not be lost, as ratios within one run, with room for a machine that does other things too.

CPU time is what others on the machine change least; the cheapest of a few batches counts, for what a hypervisor takes
meanwhile is in it, too. Of durations the shortest ones are compared, each operation having taken turns with bash, and
none when even bash found the machine too busy. `make bench` has the figures themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import references
from bench.compare import compare
from bench.latency import CLOSE, EVALUATE, EXEC, OUTPUT, RESET, RESET_COLD, WRITE, Bench, by_live, idle
from bench.report import BASH, SERVER, Report
from bench.sampling import Samples
from bench.session import Session, session
from bench.subject import Subject
from bench.targets import targets
from support.tasks import make_task

_TEST = 'r=0; [ ! -f out.txt ] || r=1; echo $r > "${VERDICT:-/logs/verifier/reward.txt}"\n'
_ROUNDS, _ROUNDS_S, _BATCHES, _EXECS, _LIVES, _LIVE = 4, 2.0, 3, 40, 8, 32
#: Shortest durations, to that of `bash -c true`.
_SLOWEST = {EXEC: 6.0, RESET: 16.0, RESET_COLD: 16.0, CLOSE: 12.0, EVALUATE: 35.0, OUTPUT: 25.0, WRITE: 25.0}
#: CPU of all processes of the server, to that of `bash -c true`.
_MOST_CPU_OF_EXEC, _MOST_CPU_OF_LIFE = 9.0, 55.0
#: CPU of an exec beside 31 other episodes, to that of one alone.
_FLATNESS = 1.6
#: A bash that takes this many times what the fastest did, in one case of four, had to wait for others.
_BUSY = 2.0


@dataclass(frozen=True)
class Measured:
    """CPU in seconds of one `bash -c true`, one exec and one reset with evaluate."""

    report: Report
    bash_cpu_s: float
    exec_cpu_s: float
    life_cpu_s: float
    exec_cpu_beside_s: float


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("bench")
    task = make_task(folder / "tasks", "ok", _TEST)
    with Subject(folder / "server", task.parent, {"MAX_CONCURRENT_ENVS": "40"}) as server:
        return asyncio.run(_measure(Bench(Samples(), server, server, {}, task, folder)))


async def _measure(bench: Bench) -> Measured:
    await by_live(bench, [1], _ROUNDS, _ROUNDS_S)
    report = Report(label="test", begun="now", machine={}, series=bench.samples.series())
    async with idle(bench.server) as others, session(bench.server.url) as own:
        life_s = await _cpu_s(bench.server, lambda: _life(own), _LIVES)
        await own.reset()
        exec_s = await _cpu_s(bench.server, own.true, _EXECS)
        await others.grow(_LIVE - 1)
        return Measured(
            report, references.bash_cpu_s(_EXECS), exec_s, life_s, await _cpu_s(bench.server, own.true, _EXECS)
        )


async def _life(own: Session) -> None:
    await own.reset()
    await own.evaluate(0.0)


async def _cpu_s(server: Subject, operation: Callable[[], Awaitable[object]], times: int) -> float:
    batches = []
    for _ in range(_BATCHES):
        before = server.cpu()
        for _ in range(times):
            await operation()
        batches.append(sum(server.cpu().since(before).values()) / times)
    return min(batches)


def test_an_operation_uses_at_most_a_few_times_the_cpu_of_bash(measured: Measured) -> None:
    assert measured.exec_cpu_s / measured.bash_cpu_s <= _MOST_CPU_OF_EXEC, measured
    assert measured.life_cpu_s / measured.bash_cpu_s <= _MOST_CPU_OF_LIFE, measured


def test_an_exec_costs_no_more_beside_many_episodes(measured: Measured) -> None:
    assert measured.exec_cpu_beside_s / measured.exec_cpu_s <= _FLATNESS, measured


@pytest.mark.parametrize("what", _SLOWEST)
def test_an_operation_takes_at_most_a_few_times_as_long_as_bash(measured: Measured, what: str) -> None:
    bash, server = measured.report.find(BASH, EXEC), measured.report.find(SERVER, what)
    assert bash is not None
    assert server is not None
    if bash.p75 > _BUSY * bash.least:
        pytest.skip(f"the machine is too busy to tell: {bash}")
    assert server.least / bash.least <= _SLOWEST[what], f"{server} beside {bash}"


def test_a_report_says_which_targets_it_meets_and_can_be_compared(measured: Measured, tmp_path: Path) -> None:
    report = measured.report.model_copy(update={"targets": targets(measured.report)})
    assert {"exec / bash", "close / bash"} <= {each.name for each in report.targets}
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report
    assert "| exec | server | 1 | 1 |" in compare(report, report)
