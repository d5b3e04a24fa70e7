"""`tbench2 tasks list`: what the tasks say of themselves."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from tbench2_env.server import limits, taskconfig
from tbench2_env.server.cli.choice import catalogue
from tbench2_env.server.cli.console import plain, wide_console
from tbench2_env.server.images import dockerfile
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task

_GIB = 1 << 30


@dataclass
class Entry:
    """A task as `--json` prints it. `base`: what its Dockerfile's last stage is FROM; `error`: why it is broken."""

    id: str
    difficulty: str = ""
    category: str = ""
    base: str = ""
    docker_image: str = ""
    agent_timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    memory_bytes: int | None = None
    error: str = ""

    @classmethod
    def of(cls, task: Task) -> "Entry":
        entry = cls(task.task_id)
        try:
            entry._read(task)
        except dockerfile.DockerfileError as error:
            entry.error = f"environment/{error}"
        except (TaskError, OSError, UnicodeDecodeError) as error:
            entry.error = str(error)
        return entry

    def _read(self, task: Task) -> None:
        config = taskconfig.parse((task.path / "task.toml").read_text())
        self.difficulty, self.category = (str(config.metadata.get(key, "")) for key in ("difficulty", "category"))
        self.docker_image = config.environment.docker_image or ""
        self.agent_timeout_s, self.verifier_timeout_s = config.agent.timeout_sec, config.verifier.timeout_sec
        self.memory_bytes = limits.of_task(config.environment, enforced=True).memory_bytes
        path = task.path / "environment" / "Dockerfile"
        self.base = _base(path) if path.is_file() else ""


@click.group()
def tasks() -> None:
    """The tasks of TB2_TASKS_DIR."""


@tasks.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_tasks(as_json: bool) -> None:
    """List the tasks and what they ask for."""
    entries = [Entry.of(task) for task in catalogue(Settings.from_environment()).list()]
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=1))
    else:
        _print(entries)


def _print(entries: list[Entry]) -> None:
    table = Table("task", "difficulty", "category", "base or image", title=f"{len(entries)} tasks")
    for heading in ("agent s", "verifier s", "memory GiB"):
        table.add_column(heading, justify="right")
    for entry in entries:
        if entry.error:
            table.add_row(plain(entry.id), "[red]broken[/]", "", plain(" ".join(entry.error.split())))
            continue
        images = "\n".join(map(plain, filter(None, (entry.base, entry.docker_image))))
        figures = (entry.agent_timeout_s, entry.verifier_timeout_s, _gib(entry.memory_bytes))
        table.add_row(*map(plain, (entry.id, entry.difficulty, entry.category)), images, *map(_number, figures))
    wide_console().print(table)


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / _GIB


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _base(path: Path) -> str:
    """What the last stage is FROM, through earlier stages if need be. Raises: DockerfileError, OSError."""
    parsed = dockerfile.load(path)
    stage = parsed.stages[parsed.target]
    while stage.base_stage is not None:
        stage = parsed.stages[stage.base_stage]
    return stage.base
