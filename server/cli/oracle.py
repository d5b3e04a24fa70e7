"""`tbench2 oracle`: carry out the tasks' own solutions, or nothing at all, and see what their tests say."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tbench2_env import ServerGone, Unauthorized
from tbench2_env.server.cli import interrupt
from tbench2_env.server.cli.attempt import Terms, attempt
from tbench2_env.server.cli.board import Board
from tbench2_env.server.cli.choice import chosen, task_arguments
from tbench2_env.server.cli.private import ServerFailed, private_server
from tbench2_env.server.cli.results import Results, ResultsError
from tbench2_env.server.settings import Settings
from tbench2_env.server.tasks import Task


@dataclass(frozen=True)
class _Options:
    jobs: int | None
    server: str | None
    out: Path | None
    without: bool
    again: bool
    reset_timeout_s: float

    @property
    def file(self) -> Path:
        return self.out or Path("untouched.json" if self.without else "oracle.json")


@click.command()
@task_arguments
@click.option("-j", "--jobs", type=click.IntRange(1), help="Tasks at once.  [default: MAX_CONCURRENT_ENVS]")
@click.option("--server", metavar="URL", help="A running server, which gets TB2_AUTH_TOKEN.  [default: its own]")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="Results, as JSON; beside it, the private server's log.  [default: oracle.json, --without: untouched.json]",
)  # fmt: skip
@click.option("--without", is_flag=True, help="Evaluate the tasks untouched: each reward must be 0.")
@click.option("--again/--resume", help="Do again what has a final result in --out, or leave it.  [default: resume]")
@click.option(
    "--reset-timeout-s", type=click.FloatRange(0, min_open=True), default=3600.0, show_default=True,
    help="Seconds for a reset, which may have to build the task's environment.",
)  # fmt: skip
@click.pass_context
def oracle(context: click.Context, /, names: tuple[str, ...], take_all: bool, **options: Any) -> None:
    """Run each task's solution/solve.sh in an episode, then its tests.

    The exit status is 0 if every task has a verdict. Interrupted, or run again for whatever reason, it goes on with
    the tasks that have no final result in --out.
    """
    wanted, settings = _Options(**options), Settings.from_environment()
    tasks = chosen(settings, names, take_all)
    run = _Run(wanted, settings, tasks)
    try:
        interrupt.run(run.carry_out())
    except interrupt.Interrupted:
        context.exit(interrupt.STATUS)
    finally:
        run.board.print()
    context.exit(0 if run.all_judged else 1)


class _Run:
    """One run of the command. Raises: click.UsageError when --out cannot be used."""

    def __init__(self, wanted: _Options, settings: Settings, tasks: Sequence[Task]) -> None:
        self._wanted, self._settings, self._tasks = wanted, settings, tasks
        try:
            self._results = Results.open(wanted.file, solved=not wanted.without)
        except ResultsError as error:
            raise click.UsageError(str(error)) from None
        self.board = Board(tasks, expected=0.0 if wanted.without else 1.0)
        self._todo = deque(task for task in tasks if not self._is_done(task))
        self._jobs = min(wanted.jobs or settings.max_concurrent_envs, len(self._todo))

    def _is_done(self, task: Task) -> bool:
        """Whether an earlier run has its result, which is then shown."""
        earlier = self._results.get(task.task_id)
        if self._wanted.again or earlier is None or not earlier.final:
            return False
        self.board.finish(task.task_id, earlier, earlier=True)
        return True

    @property
    def all_judged(self) -> bool:
        found = [self._results.get(task.task_id) for task in self._tasks]
        return all(result is not None and result.reward is not None for result in found)

    async def carry_out(self) -> None:
        """Do what is left to do. Raises: click.ClickException when the server is of no use."""
        if not self._todo:
            return
        try:
            async with self._server() as (url, token):
                terms = Terms(url, token, not self._wanted.without, self._wanted.reset_timeout_s)
                with self.board.shown():
                    await self._work(terms)
        except* (ServerFailed, ServerGone, Unauthorized, OSError) as errors:
            raise click.ClickException(str(_first(errors))) from None

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[tuple[str, str | None]]:
        token = self._settings.auth_token
        own = None if token is None else token.get_secret_value()
        if self._wanted.server is not None:
            yield self._wanted.server, own
            return
        async with private_server(self._jobs, own, self._wanted.file.with_suffix(".server.log")) as private:
            yield private

    async def _work(self, terms: Terms) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._jobs):
                workers.create_task(self._worker(terms))

    async def _worker(self, terms: Terms) -> None:
        while self._todo:
            task = self._todo.popleft()
            result = await attempt(task, terms, functools.partial(self.board.enter, task.task_id))
            self._results.put(task.task_id, result)
            self.board.finish(task.task_id, result)


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    """What went wrong first, of errors that may be in groups."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
