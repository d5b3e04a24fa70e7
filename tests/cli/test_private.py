"""`tbench2 oracle` on a server of its own, which ends with it, whatever ends it; and the run that goes on then."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import command_line, descendants, eventually
from support.tasks import make_task

from .conftest import Program, Tbench2, results


@pytest.fixture
def endless(small_tasks: Path) -> Path:
    """The script of the task d, which does not end."""
    return make_task(small_tasks, "d", files={"solution/solve.sh": "sleep 1000\n"}) / "solution" / "solve.sh"


@pytest.fixture
def program(tmp_path: Path, small_tasks: Path) -> Program:
    return Program(tmp_path, small_tasks)


@pytest.fixture
def stuck(program: Program, endless: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run that has done all tasks but d, which it is at."""
    with program.start("oracle", "--all", "-j", "2") as process:
        try:
            eventually(lambda: len(results(program.folder / "oracle.json")) == 3, 30)
            assert process.poll() is None
            yield process
        finally:
            process.kill()


def end(process: "subprocess.Popen[str]", number: int, program: Program) -> str:
    """Send it the signal: all that it started ends, too. Answers with its output."""
    below = descendants(process.pid)
    assert any("server.cli.private" in line for line in below.values())
    process.send_signal(number)
    output, _ = process.communicate(timeout=10)
    eventually(lambda: all(command_line(pid) != line for pid, line in below.items()), 10)
    assert not list((program.folder / "scratch").iterdir())
    return output


def test_interrupted_and_run_again(stuck: "subprocess.Popen[str]", program: Program, endless: Path) -> None:
    output = end(stuck, signal.SIGINT, program)
    assert stuck.returncode == 130
    assert "3 of 4 tasks: 3 with reward 1" in output
    assert "interrupted" in output
    before = results(program.folder / "oracle.json")
    assert set(before) == {"a", "b", "c"}
    endless.write_text("echo ok > out.txt\n")
    again = program.run("oracle", "--all")
    assert again.returncode == 0, again.stdout
    after = results(program.folder / "oracle.json")
    assert after.pop("d")["reward"] == 1.0
    assert after == before
    assert "task_id=a" not in (program.folder / "oracle.server.log").read_text()


def test_its_server_ends_with_it_even_if_it_is_killed(stuck: "subprocess.Popen[str]", program: Program) -> None:
    end(stuck, signal.SIGKILL, program)
    assert stuck.returncode == -signal.SIGKILL


def test_a_server_that_dies_ends_the_run(stuck: "subprocess.Popen[str]", program: Program, small_tasks: Path) -> None:
    make_task(small_tasks, "e")
    (server,) = (pid for pid, line in descendants(stuck.pid).items() if "server.cli.private" in line)
    os.kill(server, signal.SIGKILL)
    output, _ = stuck.communicate(timeout=10)
    assert stuck.returncode == 1
    assert "server_lost" in output
    assert not results(program.folder / "oracle.json")["d"]["final"]


def test_a_server_that_does_not_start(tbench2: Tbench2, small_tasks: Path, tmp_path: Path) -> None:
    env = {"TB2_OUTPUT_DIR": str(tmp_path / "runs"), "TB2_SCRATCH_DIR": "/proc/nowhere"}
    shown = tbench2("oracle", "--all", tasks=small_tasks, **env)
    assert shown.exit_code == 1
    assert "the private server did not start" in shown.output
    assert "/proc/nowhere" in shown.output
