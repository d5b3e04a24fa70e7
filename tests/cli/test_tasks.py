"""`tbench2 tasks list`."""

import json
from pathlib import Path
from typing import Any

from support.tasks import make_task

from .conftest import Tbench2

TOML = """
[metadata]
difficulty = "hard"
category = "games"
[agent]
timeout_sec = 900
[verifier]
timeout_sec = 360.0
[environment]
docker_image = "example/x:1"
memory = "4G"
"""
STAGES = "FROM debian:13 AS build\nRUN make\nFROM python:3.13-slim\nCOPY --from=build /x /x\n"


def listed(tbench2: Tbench2, tasks: Path) -> dict[str, dict[str, Any]]:
    shown = tbench2("tasks", "list", "--json", tasks=tasks)
    assert shown.exit_code == 0, shown.output
    return {entry["id"]: entry for entry in json.loads(shown.stdout)}


def test_what_a_task_asks_for(tbench2: Tbench2, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "t", toml=TOML, dockerfile=STAGES)
    assert listed(tbench2, tmp_path / "tasks")["t"] == {
        "id": "t", "difficulty": "hard", "category": "games", "base": "python:3.13-slim", "docker_image": "example/x:1",
        "agent_timeout_s": 900.0, "verifier_timeout_s": 360.0, "memory_bytes": 4 << 30, "error": "",
    }  # fmt: skip


def test_a_base_behind_a_stage(tbench2: Tbench2, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "t", dockerfile="ARG TAG=13\nFROM debian:$TAG AS x\nFROM x AS y\nFROM y\n")
    assert listed(tbench2, tmp_path / "tasks")["t"]["base"] == "debian:13"


def test_a_broken_task_is_a_row_with_its_error(tbench2: Tbench2, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    make_task(tasks, "good", dockerfile=None)
    make_task(tasks, "no-toml", toml="[agent\n")
    make_task(tasks, "no-size", toml='[environment]\nmemory = "much"\n')
    make_task(tasks, "no-dockerfile", dockerfile="FROM debian\nFLY away\n")
    make_task(tasks, "no-text", toml="x").joinpath("task.toml").write_bytes(b"\xff")
    errors = {name: entry["error"] for name, entry in listed(tbench2, tasks).items()}
    assert errors.pop("good") == ""
    assert errors["no-toml"].startswith("task.toml is not valid TOML")
    assert "environment.memory = 'much'" in errors["no-size"]
    assert "line 2" in errors["no-dockerfile"]
    assert errors["no-text"]
    shown = tbench2("tasks", "list", tasks=tasks)
    assert shown.exit_code == 0
    assert shown.output.count("broken") == len(errors)


def test_the_table_obeys_no_task(tbench2: Tbench2, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "t", toml='[metadata]\ncategory = "[red]\\u001b[2J"\n')
    shown = tbench2("tasks", "list", tasks=tmp_path / "tasks")
    assert "[red]?[2J" in shown.output
