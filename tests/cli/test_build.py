"""`tbench2 env build`: real builds over the node's own root, which stands in for a base that is not to be had."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support.server import descendants, eventually
from support.tasks import make_task

from .conftest import Program

NOWHERE = "127.0.0.1:9"
START = "FROM nothing:1\nWORKDIR /app\nRUN echo shared > /shared\n"


@pytest.fixture
def program(tmp_path: Path) -> Program:
    tasks = tmp_path / "tasks"
    make_task(tasks, "good", dockerfile=START + "RUN echo good > /mine\n")
    program = Program(tmp_path, tasks)
    program.env |= {"TB2_ENVIRONMENT": "build", "TB2_REGISTRY": NOWHERE}
    return program


def layers(program: Program) -> list[dict[str, Any]]:
    """What `env ls` says of the only store."""
    (found,) = json.loads(program.run("env", "ls", "--json").stdout)
    return list(found["layers"])


def test_built_and_failed(program: Program, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "bad", dockerfile=START + "RUN echo [red]why; exit 7\n")
    make_task(tmp_path / "tasks", "plain", dockerfile=None)
    done = program.run("env", "build", "--all", "-j", "2")
    assert done.returncode == 1, done.stdout
    text = " ".join(done.stdout.split())
    assert "bad: failed after" in text
    assert "ended with exit code 7" in text
    assert "[red]why" in text
    assert "the node's own root stands in for it" in text
    assert "2 of 3 environments are there" in text
    steps = {" ".join(layer["note"].values()): layer["tasks"] for layer in layers(program)}
    assert set(steps) == {"WORKDIR /app", "RUN echo shared > /shared", "RUN echo good > /mine"}
    assert steps == {step: ["good"] for step in steps}


def test_interrupted_and_run_again(program: Program, tmp_path: Path) -> None:
    slow = make_task(tmp_path / "tasks", "slow", dockerfile=START + "RUN touch /begun; sleep 1000\n")
    with program.start("env", "build", "slow", "good", "-j", "1") as process:
        try:
            eventually(lambda: any("sleep 1000" in line for line in descendants(process.pid).values()), 30)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 130, output
    assert "0 of 2 environments are there" in output
    assert not list((tmp_path / "scratch").iterdir())
    before = {layer["id"] for layer in layers(program)}
    assert len(before) == 2
    (slow / "environment" / "Dockerfile").write_text(START + "RUN touch /begun\n")
    again = program.run("env", "build", "--all")
    assert again.returncode == 0, again.stdout
    assert before < {layer["id"] for layer in layers(program)}
