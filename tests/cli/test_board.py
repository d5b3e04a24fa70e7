"""The oracle's table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tbench2_env.server.cli.board import Board
from tbench2_env.server.cli.results import Result
from tbench2_env.server.tasks import Task

TASKS = [Task(f"task-{number}", Path("/")) for number in range(30)]


def board(*, terminal: bool) -> tuple[Board, io.StringIO]:
    shown = io.StringIO()
    return Board(TASKS, 1.0, Console(file=shown, force_terminal=terminal, width=120, height=12)), shown


def test_on_a_terminal_it_fits_and_has_what_is_under_way() -> None:
    table, shown = board(terminal=True)
    with table.shown():
        for task in TASKS[:20]:
            table.finish(task.task_id, Result(reward=1.0, final=True))
        table.enter("task-29", "reset")
        table.enter("task-29", "solve")
    assert "solving" in shown.getvalue()
    lines = Console(width=120).render_lines(table.current())
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) <= 12
    assert "solving" in text[3]
    assert "task-19" in text[4]
    assert "20 of 30 tasks: 20 with reward 1, 0 with another, 0 without verdict" in " ".join(" ".join(text).split())


def test_elsewhere_it_is_a_line_for_each_task() -> None:
    table, shown = board(terminal=False)
    with table.shown():
        table.enter("task-1", "reset")
        table.finish("task-2", Result(reward=1.0, seconds={"reset": 1.0, "solve": 2.5}))
        table.finish("task-3", Result(reason="reset_failed", error="a\n[red]b\x1b[2J"))
        table.finish("task-4", Result(reward=0.0), earlier=True)
    assert shown.getvalue().splitlines() == [
        "task-2: reward 1 after 3.5 s",
        "task-3: no verdict, reset_failed: a [red]b?[2J after 0.0 s",
    ]


def test_the_whole_table_at_the_end() -> None:
    table, shown = board(terminal=False)
    table.enter("task-1", "evaluate")
    table.finish("task-2", Result(reward=0.0, solve_exit_code=3))
    table.finish("task-3", Result(reward=1.0, solve_timed_out=True), earlier=True)
    shown.truncate(0)
    table.print()
    rows = {line.split()[1]: line for line in shown.getvalue().splitlines() if "task-" in line}
    assert len(rows) == len(TASKS)
    assert "interrupted" in rows["task-1"]
    assert "solve.sh: exit code 3" in rows["task-2"]
    assert "earlier run" in rows["task-3"]
    assert "solve.sh timed out" in rows["task-3"]
    assert "2 of 30 tasks: 1 with reward 1, 1 with another, 0 without verdict" in shown.getvalue()


@pytest.mark.parametrize("expected", [0.0, 1.0])
def test_the_right_reward_is_counted(expected: float) -> None:
    shown = io.StringIO()
    table = Board(TASKS, expected, Console(file=shown))
    table.finish("task-1", Result(reward=expected))
    table.print()
    assert f"1 with reward {expected:g}" in " ".join(shown.getvalue().split())
