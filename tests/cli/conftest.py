"""The command line in this process, and as a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from support.tasks import make_task
from tbench2_env.server.cli.main import main

COMMAND = (sys.executable, "-c", "from tbench2_env.server.cli.main import main; main(prog_name='tbench2')")
#: The fixture `tbench2`.
Tbench2 = Callable[..., Result]


@pytest.fixture
def small_tasks(tmp_path: Path) -> Path:
    """A folder with the tasks a, b and c, each solved in no time."""
    for name in "abc":
        make_task(tmp_path / "tasks", name)
    return tmp_path / "tasks"


@pytest.fixture
def tbench2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tbench2:
    """Run a command in this process, in a folder of its own: `tbench2("tasks", "list", tasks=folder)`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, tasks: Path, **env: str) -> Result:
        common = {"TB2_TASKS_DIR": str(tasks), "COLUMNS": "160", "TB2_REGISTRY": "none"}
        return CliRunner(env=common | env).invoke(main, arguments)

    return run


class Program:
    """The command as a process, with all that it leaves below `folder`."""

    def __init__(self, folder: Path, tasks: Path) -> None:
        self.folder = folder
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/root"),
            "TMPDIR": str(folder),
            "TB2_TASKS_DIR": str(tasks),
            "TB2_OUTPUT_DIR": str(folder / "runs"),
            "TB2_SCRATCH_DIR": str(folder / "scratch"),
            "TB2_REGISTRY": "none",
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*COMMAND, *arguments], cwd=self.folder, env=self.env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, output)


def results(path: Path) -> dict[str, dict[str, Any]]:
    """What a run of the oracle has written so far."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]
    return found
