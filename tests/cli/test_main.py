"""The entry point, and how errors are shown."""

import importlib.metadata
from pathlib import Path

from tbench2_env.server.cli.main import main

from .conftest import Tbench2


def test_the_distribution_has_the_command() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tbench2")
    assert script.load() is main


def test_an_error_with_advice_is_shown_without_a_traceback(tbench2: Tbench2, tmp_path: Path) -> None:
    shown = tbench2("tasks", "list", tasks=tmp_path / "nowhere")
    assert shown.exit_code == 1
    assert shown.output.startswith("Error: TB2_TASKS_DIR: ")


def test_a_variable_with_a_wrong_value_is_named(tbench2: Tbench2, small_tasks: Path) -> None:
    shown = tbench2("tasks", "list", tasks=small_tasks, MAX_CONCURRENT_ENVS="many")
    assert shown.exit_code == 1
    assert shown.output.startswith("Error: MAX_CONCURRENT_ENVS: ")
