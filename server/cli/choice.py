"""Which tasks a command is for: those named, or all."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from tbench2_env.server.settings import Settings
from tbench2_env.server.tasks import Catalogue, DefaultCatalogue, Task

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def task_arguments(command: CommandT) -> CommandT:
    """Give a command the arguments `names` and `take_all`."""
    command = click.option("--all", "take_all", is_flag=True, help="All tasks of TB2_TASKS_DIR.")(command)
    return click.argument("names", metavar="TASK...", nargs=-1)(command)


def catalogue(settings: Settings) -> Catalogue:
    """The tasks of the settings, downloaded if need be. Raises: TaskError."""
    return asyncio.run(DefaultCatalogue(settings).get())


def chosen(settings: Settings, names: Sequence[str], take_all: bool) -> list[Task]:
    """The tasks, each once, in the order asked for. Raises: click.UsageError, TaskError."""
    if bool(names) == take_all:
        raise click.UsageError("name the tasks, or give --all")
    known = catalogue(settings)
    return known.list() if take_all else [known.find(name) for name in dict.fromkeys(names)]
