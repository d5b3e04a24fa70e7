"""The oracle's table: live on a terminal, a line for each task elsewhere, and whole at the end."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from tbench2_env.server.cli.console import plain, wide_console
from tbench2_env.server.cli.results import Result
from tbench2_env.server.tasks import Task

_STATES = {"reset": "resetting", "solve": "solving", "evaluate": "evaluating"}
#: Lines of a terminal that the table's frame and heading take.
_FRAME_LINES = 7
_REASON_MAX = 300


@dataclass
class _Row:
    state: str = "waiting"
    begun: float | None = None
    result: Result | None = None
    order: float = field(default=0.0)


class Board:
    """What is known of each task. `expected` is the reward that is right: 1 with the solution, 0 without."""

    def __init__(self, tasks: Sequence[Task], expected: float, console: Console | None = None) -> None:
        self._rows = {task.task_id: _Row() for task in tasks}
        self._expected = expected
        self._console = console or wide_console()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on the terminal, if there is one."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self.current, console=self._console, refresh_per_second=4, transient=True):
            yield

    def enter(self, task_id: str, phase: str) -> None:
        row = self._rows[task_id]
        row.state = _STATES[phase]
        row.begun = row.begun or time.monotonic()

    def finish(self, task_id: str, result: Result, *, earlier: bool = False) -> None:
        """The task's end; `earlier`: it is one of the run that this one goes on with."""
        row = self._rows[task_id]
        row.result, row.order = result, 0.0 if earlier else time.monotonic()
        row.state = "earlier run" if earlier else "done"
        if not self._console.is_terminal and not earlier:
            self._console.print(plain(f"{task_id}: {_verdict(result)} after {result.total_s:.1f} s"))

    def print(self) -> None:
        """The whole table and what it comes to, when nothing is under way any more."""
        for row in self._rows.values():
            row.state = row.state if row.begun is None or row.result is not None else "interrupted"
        self._console.print(self._table(list(self._rows)))
        self._console.print(self._summary())

    def current(self) -> RenderableType:
        """The tasks under way and as many of the others as fit, the last to end first."""
        running = [name for name, row in self._rows.items() if row.begun is not None and row.result is None]
        others = sorted(set(self._rows) - set(running), key=lambda name: (-self._rows[name].order, name))
        shown = (running + others)[: max(len(running), self._console.height - _FRAME_LINES)]
        table = self._table(shown)
        table.caption = self._summary()
        return table

    def _table(self, names: Sequence[str]) -> Table:
        table = Table()
        for heading in ("task", "state", "reward", "seconds", "reason"):
            right = heading in ("reward", "seconds")
            table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=right)
        for name in names:
            table.add_row(plain(name), *self._cells(self._rows[name]))
        return table

    def _cells(self, row: _Row) -> tuple[str, str, str, str]:
        if row.result is None:
            seconds = "" if row.begun is None else f"{time.monotonic() - row.begun:.0f}"
            return row.state, "", seconds, ""
        result = row.result
        style = "green" if result.reward == self._expected else "yellow" if result.reward is None else "red"
        reward = "none" if result.reward is None else f"{result.reward:g}"
        return row.state, f"[{style}]{reward}[/]", f"{result.total_s:.1f}", plain(_reason(result))

    def _summary(self) -> str:
        results = [row.result for row in self._rows.values() if row.result is not None]
        none = sum(result.reward is None for result in results)
        right = sum(result.reward == self._expected for result in results)
        return (
            f"{len(results)} of {len(self._rows)} tasks: {right} with reward {self._expected:g}, "
            f"{len(results) - right - none} with another, {none} without verdict"
        )


def _verdict(result: Result) -> str:
    return f"no verdict, {_reason(result)}" if result.reward is None else f"reward {result.reward:g}"


def _reason(result: Result) -> str:
    texts = [f"{result.reason}: {result.error}"]
    if result.reward is not None:
        code = result.solve_exit_code
        texts = [
            *(["solve.sh timed out"] if result.solve_timed_out else []),
            *([f"solve.sh: exit code {code}"] if code else []),
        ]
        texts += [result.error] if result.error else []
    return " ".join("; ".join(texts).split())[:_REASON_MAX]
