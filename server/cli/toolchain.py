"""`tbench2 toolchain prepare`: the verifier's kit, so that test scripts run without a network."""

from collections.abc import Iterable
from pathlib import Path

import click
from rich.progress import Progress
from rich.table import Table

from tbench2_env.server import sources
from tbench2_env.server.cli.choice import chosen, task_arguments
from tbench2_env.server.cli.console import plain, progress_bars, wide_console
from tbench2_env.server.settings import Settings
from tbench2_env.server.tasks import Task
from tbench2_env.server.toolchain.interpreters import NoInterpreter
from tbench2_env.server.toolchain.prepare import CannotPrepare, Prepared, Step, prepare

_SCRIPT = "tests/test.sh"


@click.group()
def toolchain() -> None:
    """What test scripts fetch: uv, Pythons and wheels, kept in TB2_CACHE_DIR for verifiers alone."""


@toolchain.command("prepare")
@task_arguments
@click.option(
    "--python", "pythons", multiple=True, type=click.Path(exists=True, path_type=Path),
    help="A Python to take: an executable, its prefix, or a root filesystem that has it. May be repeated.",
)  # fmt: skip
def prepare_kit(names: tuple[str, ...], take_all: bool, pythons: tuple[Path, ...]) -> None:
    """Make the kit for these tasks' test.sh, in place of the current one.

    What was fetched for an earlier kit is used again. The exit status is 0 if there is a kit, even if something that a
    task wants could not be had: that is listed.
    """
    settings = Settings.from_environment()
    scripts = _scripts(chosen(settings, names, take_all))
    try:
        with progress_bars() as bars:
            prepared = prepare(settings.cache_dir, scripts, pythons, _Shown(bars).step)
    except (CannotPrepare, NoInterpreter, OSError) as error:
        raise click.ClickException(str(error)) from None
    _print(prepared)


def _scripts(tasks: Iterable[Task]) -> dict[str, str]:
    """Each task's test.sh; a task without any needs nothing of the kit."""
    found = {task.task_id: sources.read(task, _SCRIPT) for task in tasks}
    return {name: text.decode(errors="replace") for name, text in found.items() if text is not None}


class _Shown:
    def __init__(self, progress: Progress) -> None:
        self._progress, self._bar = progress, progress.add_task("", total=None)

    def step(self, step: Step) -> None:
        description = plain(step.what)
        self._progress.update(self._bar, completed=step.number - 1, total=step.total, description=description)


def _print(prepared: Prepared) -> None:
    manifest, table = prepared.kit.manifest, Table("what", "in the kit", title=plain(str(prepared.kit.folder)))
    table.add_row("uv", plain(manifest.uv))
    for version, python in manifest.pythons.items():
        lacks = f", without {', '.join(python.lacks)}" if python.lacks else ""
        table.add_row(f"Python {plain(version)}", plain(f"{python.release} of {python.source}{lacks}"))
    table.add_row("wheels", str(len(manifest.wheels)))
    table.add_row("not to be had", "\n".join(map(plain, prepared.problems)) or "-")
    wide_console().print(table)
