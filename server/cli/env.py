"""`tbench2 env`: the tasks' environments in the store."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tbench2_env.server.cli.build import build
from tbench2_env.server.cli.console import plain, wide_console
from tbench2_env.server.cli.export import export
from tbench2_env.server.images.inventory import Inventory, inventories
from tbench2_env.server.images.store import LayerUsage, StoreError
from tbench2_env.server.settings import Settings

_SHOWN_ID = 12
_PREFIX_MIN = 6
_NAMED_MAX = 3
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"))


@click.group()
def env() -> None:
    """The tasks' environments: layers in the store of TB2_CACHE_DIR."""


env.add_command(build)
env.add_command(export)


def _inventories() -> list[Inventory]:
    return inventories(Settings.from_environment().cache_dir / "store")


# ---------------------------------------------------------------- ls
@env.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_environments(as_json: bool) -> None:
    """List environments and layers: size, last use, whether in use."""
    found = _inventories()
    if as_json:
        click.echo(json.dumps([_as_json(each) for each in found], indent=1))
        return
    console = wide_console()
    for each in found:
        console.print(_environments(each), _layers(each), sep="\n")
    _summarize(console, found)


def _as_json(found: Inventory) -> dict[str, Any]:
    layers = [{**asdict(layer), "note": dict(layer.note), "tasks": found.tasks(layer.id)} for layer in found.layers]
    environments = [
        {**asdict(use), "bytes": found.bytes(use.layers), "own_bytes": found.bytes(found.own(use))}
        for use in found.uses
    ]
    return {
        "store": str(found.store.folder), "layers": layers, "environments": environments,
        "bytes": sum(layer.bytes for layer in found.layers), "bytes_without_sharing": found.bytes_without_sharing,
    }  # fmt: skip


def _environments(found: Inventory) -> Table:
    table = Table("task", "environment", title=f"environments in {found.store.folder}")
    for heading in ("layers", "size", "of its own"):
        table.add_column(heading, justify="right")
    known = {layer.id for layer in found.layers}
    for use in found.uses:
        there = sum(layer_id in known for layer_id in use.layers)
        count = str(there) if there == len(use.layers) else f"{there} of {len(use.layers)}"
        sizes = (found.bytes(use.layers), found.bytes(found.own(use)))
        table.add_row(plain(use.task_id), plain(use.source), count, *map(decimal, sizes))
    return table


def _layers(found: Inventory) -> Table:
    table = Table("layer", "what", "in use", "tasks", title="layers, the least recently used first")
    for heading in ("size", "last used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in found.layers:
        in_use = "yes" if layer.in_use else ""
        what = plain(" ".join(" ".join(map(str, layer.note.values())).split()))
        tasks = plain(_few(found.tasks(layer.id)))
        table.add_row(layer.id[:_SHOWN_ID], what, in_use, tasks, decimal(layer.bytes), _age(layer.last_used))
    return table


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


def _age(since: float) -> str:
    age_s = time.time() - since
    return next((f"{age_s // unit:.0f} {name} ago" for unit, name in _AGES if age_s >= unit), "now")


def _summarize(console: Console, found: Iterable[Inventory]) -> None:
    layers = [layer for each in found for layer in each.layers]
    apart = sum(each.bytes_without_sharing for each in found)
    console.print(
        f"{len(layers)} layers, {decimal(sum(layer.bytes for layer in layers))}; "
        f"without sharing it would be {decimal(apart)}"
    )


# ---------------------------------------------------------------- rm
@env.command("rm")
@click.argument("names", metavar="ID...", nargs=-1)
@click.option("--unused", is_flag=True, help="Layers that are in no task's environment.")
@click.option("--all", "take_all", is_flag=True, help="All layers, and which image each tag was found to mean.")
def remove(names: tuple[str, ...], unused: bool, take_all: bool) -> None:
    """Remove layers, by the beginning of their ids, or by a task's name those that only its environment has.

    What an episode uses stays: to name it is an error, --unused and --all leave it out. What is removed is built or
    pulled again when it is needed.
    """
    if bool(names) + unused + take_all != 1:
        raise click.UsageError("name layers or tasks, or give --unused or --all")
    found = _inventories()
    if names:
        chosen = _named(found, names)
    else:
        chosen = [(each, [layer.id for layer in _free(each, take_all)]) for each in found]
    try:
        freed = sum(each.store.remove(layer_ids) for each, layer_ids in chosen)
        for each in found if take_all else ():
            each.store.forget_records()
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"removed {sum(len(layer_ids) for _, layer_ids in chosen)} layers, {decimal(freed)}")


def _free(found: Inventory, take_all: bool) -> list[LayerUsage]:
    unused = set(found.unused())
    return [layer for layer in found.layers if not layer.in_use and (take_all or layer.id in unused)]


def _named(found: Sequence[Inventory], names: Iterable[str]) -> list[tuple[Inventory, list[str]]]:
    """Raises: click.UsageError for what is neither a task's environment nor the beginning of one layer's id."""
    chosen: dict[int, set[str]] = {index: set() for index in range(len(found))}
    for name in names:
        hits = _of_task(found, name) or _of_id(found, name)
        if not hits:
            raise click.UsageError(f"there is no layer and no environment {name!r}: see tbench2 env ls")
        for index, layer_ids in hits.items():
            chosen[index] |= layer_ids
    return [(found[index], sorted(layer_ids)) for index, layer_ids in chosen.items()]


def _of_task(found: Sequence[Inventory], name: str) -> dict[int, set[str]]:
    uses = [(index, use) for index, each in enumerate(found) for use in each.uses if use.task_id == name]
    return {index: set(found[index].own(use)) for index, use in uses}


def _of_id(found: Sequence[Inventory], name: str) -> dict[int, set[str]]:
    matches: Callable[[str], bool] = name.__eq__ if len(name) < _PREFIX_MIN else lambda each: each.startswith(name)
    hits = {index: {layer.id for layer in each.layers if matches(layer.id)} for index, each in enumerate(found)}
    if len(set().union(*hits.values())) > 1:
        raise click.UsageError(f"{name!r} is the beginning of several layers' ids: give more of it")
    return {index: layer_ids for index, layer_ids in hits.items() if layer_ids}
