"""`make bench`, `make bench-smoke` and the comparison of two reports."""

import asyncio
import contextlib
import os
import platform
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

from bench import footprint, latency, peer, references, throughput
from bench.compare import compare
from bench.latency import Bench
from bench.plan import FULL, SMOKE, Plan
from bench.plot import draw
from bench.report import SHELL, Report
from bench.sampling import Samples
from bench.session import TASK
from bench.subject import BenchError, Subject
from bench.tables import show
from bench.targets import targets
from support.tasks import make_task

#: The task of CASES.md, with a place of its own for the verdict where it is run without a sandbox.
_TEST = '[ "$(cat out.txt 2>/dev/null)" = ok ] && r=1 || r=0\necho $r > "${VERDICT:-/logs/verifier/reward.txt}"\n'
#: What upstream runs instead.
_UPSTREAM_TEST = "def test_it():\n    assert open('out.txt').read() == 'ok\\n'\n"
_SPARE_SLOTS = 8
_LOG = Console(stderr=True)
_WIDTH_OF_A_FILE = 120


class _Run:
    """One report in the making: what is measured, in what folder, of which interpreter's server."""

    def __init__(self, plan: Plan, python: str, folder: Path, label: str) -> None:
        self._plan, self._python, self._folder = plan, python, folder
        self._tasks = folder / "tasks"
        self._task = make_task(self._tasks, TASK, _TEST)
        (self._task / "tests/test_outputs.py").write_text(_UPSTREAM_TEST)
        self._servers = 0
        self.samples = Samples()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.report = Report(label=label, begun=now, machine=_machine())

    def _server(self, **env: str) -> Subject:
        self._servers += 1
        slots = max(*self._plan.live, *self._plan.callers, self._plan.at_once) + _SPARE_SLOTS
        folder = self._folder / f"server-{self._servers}"
        return Subject(folder, self._tasks, {"MAX_CONCURRENT_ENVS": str(slots), **env}, python=self._python)

    def measure(self) -> None:
        """Raises: BenchError."""
        begun = time.perf_counter()
        report = self.report
        _say("time until ready")
        report.figures.append(footprint.ready(self._server, self._plan.repeats))
        makers, notes = references.makers(self._folder, self._task)
        report.notes += notes
        with self._server() as server, self._server(TB2_WARM="0") as cold, contextlib.ExitStack() as stack:
            served = {maker.name: stack.enter_context(maker.serving()) for maker in makers}
            bench = Bench(self.samples, server, cold, served, self._task, self._folder)
            shell = next((maker for maker in makers if maker.name == SHELL), None)
            asyncio.run(self._measure(bench, shell))
        self._measure_peer()
        report.series = self.samples.series()
        report.targets = targets(report)
        report.seconds = time.perf_counter() - begun

    async def _measure(self, bench: Bench, shell: references.Maker | None) -> None:
        plan, figures = self._plan, self.report.figures
        _say(f"{max(plan.live)} idle episodes")
        figures += await footprint.idle_episodes(bench.server, max(plan.live), plan.growths)
        _say("operations by live episodes")
        await latency.by_live(bench, plan.live, plan.rounds, plan.level_s)
        _say("operations by callers")
        await latency.by_callers(bench, plan.callers, plan.shared)
        _say("CPU")
        figures += await throughput.exec_cpu(bench.server, plan)
        _say("whole episodes")
        figures += await throughput.whole_episodes(bench.server, shell, plan)
        _say("output")
        figures += await throughput.output(bench.server, plan)

    def _measure_peer(self) -> None:
        server = peer.peer(self._folder / "peer", self._tasks)
        if server is None:
            self.report.notes.append(f"upstream is left out: {peer.VARIABLE} names no venv")
            return
        _say("upstream")
        with server:
            figures, notes = asyncio.run(peer.measure(server, self.samples, self._plan.peer_s))
        self.report.figures += figures
        self.report.notes += notes


def _say(what: str) -> None:
    _LOG.print(f"{time.strftime('%H:%M:%S')} {what}", style="dim")


def _machine() -> dict[str, str]:
    load = os.getloadavg()[0]
    return {"kernel": platform.release(), "cores": str(os.cpu_count()), "load before": f"{load:.1f}"}


@click.group()
def main() -> None:
    """Measure the server, beside bash, sandboxes from a shell, and upstream."""


@main.command()
@click.option("--smoke", is_flag=True, help="The minute-long form.")
@click.option("--python", default=sys.executable, help="Interpreter of the server under test.")
@click.option("--label", default="now", help="What this report is called in comparisons.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report here, as JSON.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write the plot here, as PNG.")
def run(smoke: bool, python: str, label: str, json_path: Path | None, plot_path: Path | None) -> None:
    """Measure; status 0 whether or not targets are met, 1 when something fails or a verdict is wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without stopping what was started
    with tempfile.TemporaryDirectory(prefix="tbench2-bench-") as folder:
        measuring = _Run(SMOKE if smoke else FULL, python, Path(folder), label)
        try:
            measuring.measure()
        except BenchError as error:
            raise click.ClickException(str(error)) from error
    if json_path is not None:
        measuring.report.write(json_path)
    show(measuring.report, Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE))
    if plot_path is not None:
        draw(measuring.report, plot_path)


@main.command(name="compare")
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
def compare_reports(before: Path, after: Path) -> None:
    """Print two JSON reports side by side, in Markdown."""
    click.echo(compare(Report.read(before), Report.read(after)))
