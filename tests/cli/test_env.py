"""`tbench2 env ls` and `env rm`, over real stores."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tbench2_env.server.images import inventory
from tbench2_env.server.images.store import Kind, Store

from .conftest import Tbench2

KIND = Kind(0, os.geteuid() == 0, "trusted" if os.geteuid() == 0 else "user")
SHARED, OF_A, OF_B, OF_NONE = (letter * 40 for letter in "5ab0")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One layer that the tasks a and b share, one of each, and one of neither."""
    store = Store(tmp_path / "cache" / "store", KIND)
    for layer_id in (SHARED, OF_A, OF_B, OF_NONE):

        async def fill(folder: Path) -> None:
            (folder / "root").mkdir()
            (folder / "root" / "f").write_bytes(b"x" * 100_000)

        asyncio.run(store.make(layer_id, fill, {"step": f"RUN make {layer_id[:2]}"}))
    inventory.remember(store, inventory.Use("a", "built on debian", (OF_A, SHARED)))
    inventory.remember(store, inventory.Use("b", "built on debian", (OF_B, SHARED)))
    return store


@pytest.fixture
def env(tbench2: Tbench2, store: Store, tmp_path: Path) -> Tbench2:
    def run(*arguments: str) -> Result:
        return tbench2("env", *arguments, tasks=tmp_path, TB2_CACHE_DIR=str(tmp_path / "cache"))

    return run


def there(store: Store) -> set[str]:
    return {layer.id for layer in store.usage()}


def test_ls(env: Tbench2, store: Store) -> None:
    with store.lease([OF_A]):
        (found,) = json.loads(env("ls", "--json").stdout)
        shown = env("ls").output
    assert found["store"] == str(store.folder)
    layers: dict[str, dict[str, Any]] = {layer["id"]: layer for layer in found["layers"]}
    assert {name: layer["tasks"] for name, layer in layers.items()} == {
        SHARED: ["a", "b"], OF_A: ["a"], OF_B: ["b"], OF_NONE: [],
    }  # fmt: skip
    assert [name for name, layer in layers.items() if layer["in_use"]] == [OF_A]
    size = layers[SHARED]["bytes"]
    assert size >= 100_000
    assert {use["task_id"]: (use["bytes"], use["own_bytes"]) for use in found["environments"]} == {
        "a": (2 * size, size), "b": (2 * size, size),
    }  # fmt: skip
    assert (found["bytes"], found["bytes_without_sharing"]) == (4 * size, 5 * size)
    assert "RUN make aa" in shown
    assert "4 layers" in shown


def test_ls_of_what_was_never_used(tbench2: Tbench2, tmp_path: Path) -> None:
    shown = tbench2("env", "ls", tasks=tmp_path, TB2_CACHE_DIR=str(tmp_path / "none"))
    assert shown.output == "0 layers, 0 bytes; without sharing it would be 0 bytes\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        (("a" * 8,), {OF_A}),
        ((OF_A, "b" * 6), {OF_A, OF_B}),
        (("a",), {OF_A}),
        (("--unused",), {OF_NONE}),
        (("--all",), {SHARED, OF_A, OF_B, OF_NONE}),
    ],
)
def test_rm(env: Tbench2, store: Store, arguments: tuple[str, ...], gone: set[str]) -> None:
    before = there(store)
    done = env("rm", *arguments)
    assert (done.exit_code, done.output.startswith(f"removed {len(gone)} layers, ")) == (0, True), done.output
    assert there(store) == before - gone
    assert bool(store.record_names()) is (arguments != ("--all",)), "with all layers the pins of tags go, too"


def test_what_is_in_use_stays(env: Tbench2, store: Store) -> None:
    with store.lease([SHARED, OF_A]):
        refused = env("rm", OF_A, OF_B)
        assert refused.exit_code == 1
        assert "in use by an episode or a build" in refused.output
        assert len(there(store)) == 4
        assert env("rm", "--all").exit_code == 0
    assert there(store) == {SHARED, OF_A}


def test_an_environment_that_lost_a_layer_is_shown_as_such(env: Tbench2) -> None:
    assert env("rm", SHARED).exit_code == 0
    assert env("ls").output.count("1 of 2") == 2


@pytest.mark.parametrize("arguments", [(), ("aaaaaa", "--all"), ("--all", "--unused"), ("cccccc",), ("aaa",)])
def test_a_wrong_command_line(env: Tbench2, store: Store, arguments: tuple[str, ...]) -> None:
    assert env("rm", *arguments).exit_code == 2
    assert len(there(store)) == 4


def test_the_beginning_of_several_ids(env: Tbench2, store: Store) -> None:
    async def fill(folder: Path) -> None:
        (folder / "root").mkdir()

    asyncio.run(store.make("a" * 39 + "0", fill))
    assert "give more of it" in env("rm", "a" * 39).output
    assert len(there(store)) == 5
