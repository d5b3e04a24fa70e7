"""`tbench2 env build`: have the tasks' environments before any episode needs them."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click
from rich.filesize import decimal
from rich.progress import Progress, TaskID
from rich.table import Table

from tbench2_env.isolation.process import SandboxError
from tbench2_env.server.cli import interrupt
from tbench2_env.server.cli.choice import chosen, task_arguments
from tbench2_env.server.cli.console import plain, progress_bars, wide_console
from tbench2_env.server.engine import Engine
from tbench2_env.server.images.inventory import Inventory, Use
from tbench2_env.server.images.store import StoreError
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task

_JOBS = max(2, len(os.sched_getaffinity(0)) // 2)
_STEP_MAX = 100


@dataclass
class _Outcome:
    """What became of one task. `use` None: nothing, for `error`."""

    use: Use | None = None
    unmet: Sequence[str] = ()
    error: str = ""
    seconds: float = 0.0


@click.command("build")
@task_arguments
@click.option("-j", "--jobs", type=click.IntRange(1), default=_JOBS, show_default=True, help="Environments at once.")
@click.pass_context
def build(context: click.Context, /, names: tuple[str, ...], take_all: bool, jobs: int) -> None:
    """Build or pull the tasks' environments, as a reset would, so that none has to wait.

    What is in the store already is not made again, also not what an interrupted run made. The exit status is 0 if all
    are there.
    """
    from tbench2_env.server import app  # half a second of imports that other commands do without

    settings = app.set_up()
    run = _Run(chosen(settings, names, take_all), jobs)
    try:
        interrupt.run(run.carry_out(settings))
    except interrupt.Interrupted:
        context.exit(interrupt.STATUS)
    finally:
        run.print()
    context.exit(0 if run.all_there else 1)


class _Run:
    def __init__(self, tasks: Sequence[Task], jobs: int) -> None:
        self._tasks, self._jobs = tasks, min(jobs, len(tasks))
        self._todo = deque(tasks)
        self._outcomes: dict[str, _Outcome] = {}
        self._inventory: Inventory | None = None

    @property
    def all_there(self) -> bool:
        return all(task.task_id in self._outcomes and self._outcomes[task.task_id].use for task in self._tasks)

    async def carry_out(self, settings: Settings) -> None:
        """Raises: SettingsError, SandboxError when this host isolates no builds."""
        from tbench2_env.server import app

        async with app.running(settings) as services:
            engine = await services.engines.get()
            try:
                with _shown(len(self._tasks)) as shown:
                    engine.environments.progress = shown.step
                    engine.environments.building = asyncio.Semaphore(self._jobs)
                    async with asyncio.TaskGroup() as workers:
                        for _ in range(self._jobs):
                            workers.create_task(self._worker(engine, shown))
            finally:
                self._inventory = await asyncio.to_thread(Inventory.of, engine.environments.store)

    async def _worker(self, engine: Engine, shown: "_Shown") -> None:
        while self._todo:
            task = self._todo.popleft()
            with shown.under_way(task.task_id):
                self._outcomes[task.task_id] = outcome = await _prepare(engine, task)
            shown.end(task.task_id, outcome)

    def print(self) -> None:
        table = Table("task", "environment")
        for heading in ("seconds", "layers", "size"):
            table.add_column(heading, justify="right", no_wrap=True)
        for task in self._tasks:
            table.add_row(plain(task.task_id), *self._cells(self._outcomes.get(task.task_id)))
        console = wide_console()
        console.print(table)
        built = [outcome.use for outcome in self._outcomes.values() if outcome.use is not None]
        console.print(f"{len(built)} of {len(self._tasks)} environments are there; {self._sizes(built)}")

    def _cells(self, outcome: _Outcome | None) -> tuple[str, str, str, str]:
        if outcome is None:
            return "[yellow]not built[/]", "", "", ""
        if outcome.use is None:
            return f"[red]failed[/]: {plain(outcome.error)}", f"{outcome.seconds:.1f}", "", ""
        lines = plain("\n".join((outcome.use.source, *outcome.unmet)))
        size = decimal(self._bytes([outcome.use]))
        return lines, f"{outcome.seconds:.1f}", str(len(outcome.use.layers)), size

    def _sizes(self, uses: Sequence[Use]) -> str:
        apart = sum(self._bytes([use]) for use in uses)
        return f"{decimal(self._bytes(uses))}, which without sharing would be {decimal(apart)}"

    def _bytes(self, uses: Sequence[Use]) -> int:
        layers = {layer_id for use in uses for layer_id in use.layers}
        return 0 if self._inventory is None else self._inventory.bytes(layers)


async def _prepare(engine: Engine, task: Task) -> _Outcome:
    begun = time.monotonic()
    try:
        environment = (await engine.snapshots.get(task)).environment
        outcome = _Outcome(Use(task.task_id, environment.source, environment.layers), environment.unmet)
    except (TaskError, StoreError, SandboxError, OSError) as error:
        outcome = _Outcome(error=str(error))
    outcome.seconds = time.monotonic() - begun
    return outcome


class _Shown:
    """The progress on the terminal: how many are done, and at which step each that is under way."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._all = progress, progress.add_task("environments", total=total)
        self._bars: dict[str, TaskID] = {}

    @contextmanager
    def under_way(self, task_id: str) -> Iterator[None]:
        self._bars[task_id] = bar = self._progress.add_task(plain(task_id), total=None)
        try:
            yield
        finally:
            self._progress.remove_task(bar)
            self._progress.advance(self._all)

    def end(self, task_id: str, outcome: _Outcome) -> None:
        """Where there is no terminal, a line for each."""
        if self._progress.disable:
            what = "failed" if outcome.use is None else f"{len(outcome.use.layers)} layers"
            self._progress.console.print(plain(f"{task_id}: {what} after {outcome.seconds:.1f} s"))

    def step(self, task_id: str, step: str) -> None:
        text = plain(" ".join(f"{task_id}: {step}".split())[:_STEP_MAX])
        if task_id in self._bars:
            self._progress.update(self._bars[task_id], description=text)


@contextmanager
def _shown(total: int) -> Iterator[_Shown]:
    with progress_bars() as progress:
        yield _Shown(progress, total)
