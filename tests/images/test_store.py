"""Layers are made once, appear whole, are kept while leased, and are found when damaged; with real processes."""

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tbench2_env.isolation import worktree
from tbench2_env.isolation.spec import RUNGS
from tbench2_env.server.images.store import (
    Kind,
    LayerInUse,
    MissingLayer,
    Store,
    StoreError,
    StoreReadOnly,
)  # fmt: skip

from .conftest import KIND, ONE_ID

ROOT = os.geteuid() == 0
MAKER = Path(__file__).with_name("maker.py")


def filler(files: dict[str, str]) -> Callable[[Path], Awaitable[None]]:
    async def fill(folder: Path) -> None:
        (folder / "root").mkdir()
        for name, text in files.items():
            (folder / "root" / name).write_text(text)

    return fill


async def unwanted(folder: Path) -> None:
    raise AssertionError("the layer is there")


async def add(store: Store, layer_id: str, size: int = 10, age_s: float = 0) -> None:
    assert await store.make(layer_id, filler({"file": "x" * size}), {"step": layer_id})
    if age_s:
        os.utime(description(store, layer_id), (time.time() - age_s,) * 2)


def description(store: Store, layer_id: str) -> Path:
    return store.root(layer_id).with_name("layer.json")


@contextmanager
def process(store: Store, act: str, layer_id: str, filled: Path = Path("/dev/null")) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, str(MAKER), str(store.folder.parent), str(store.kind.has_ids), act, layer_id, str(filled)]
    with subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        try:
            yield maker
        finally:
            if maker.poll() is None:
                maker.kill()


# ---------------------------------------------------------------- kinds
def test_a_kind_follows_from_the_rung() -> None:
    kinds = {name: Kind.of(rung) for name, rung in RUNGS.items()}
    assert kinds["1"] == Kind(100_000, True, "trusted")
    assert kinds["2"] == kinds["3"] == Kind(0, True, "trusted")
    assert kinds["E"] == kinds["4"] == kinds["5"] == ONE_ID
    assert [kinds[name].name for name in "124"] == ["shift-100000", "shift-0", "one-id"]


# ---------------------------------------------------------------- making
async def test_a_layer_is_made_and_then_found(store: Store) -> None:
    assert not store.has("a1")
    assert await store.make("a1", filler({"file": "text"}), {"step": "RUN x"})
    assert (store.root("a1") / "file").read_text() == "text"
    assert not await store.make("a1", unwanted)
    assert not await Store(store.folder.parent, KIND).make("a1", unwanted)
    made = json.loads(description(store, "a1").read_text())
    assert made["digest"].startswith("sha256:")
    assert made["note"] == {"step": "RUN x"}
    assert made["bytes"] >= 4
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


async def test_the_note_is_taken_when_the_layer_is_filled(store: Store) -> None:
    note: dict[str, object] = {}

    async def fill(folder: Path) -> None:
        (folder / "root").mkdir()
        note["seconds"] = 3

    await store.make("a1", fill, note)
    assert [layer.note for layer in store.usage()] == [{"seconds": 3}]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "sha256:abc", "a" * 129])
def test_an_id_is_no_path(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name!r} is no id of a layer")):
        store.has(name)


async def test_many_tasks_of_one_process_make_a_layer_once(store: Store) -> None:
    filled = 0

    async def fill(folder: Path) -> None:
        nonlocal filled
        filled += 1
        await asyncio.sleep(0.02)
        await filler({"file": "x"})(folder)

    assert sum(await asyncio.gather(*(store.make("a1", fill) for _ in range(20)))) == 1
    assert filled == 1


def test_eight_processes_make_a_layer_once(store: Store, tmp_path: Path) -> None:
    filled = tmp_path / "filled"
    with process(store, "eight", "a1", filled) as makers:
        answers = makers.communicate(timeout=60)[0].split()
    assert sorted(answers) == ["False"] * 7 + ["True", "filling"]
    assert len(filled.read_text().split()) == 1
    assert (store.root("a1") / "whole").read_text() == "whole"


async def test_when_the_first_maker_fails_the_next_one_tries(store: Store) -> None:
    started = asyncio.Event()

    async def fail(folder: Path) -> None:
        await filler({"half": "x"})(folder)
        started.set()
        await asyncio.sleep(0.05)
        raise RuntimeError("no network")

    async def second() -> bool:
        await started.wait()
        return await store.make("a1", filler({"whole": "x"}))

    results = await asyncio.gather(store.make("a1", fail), second(), return_exceptions=True)
    assert str(results[0]) == "no network"
    assert results[1] is True
    assert [path.name for path in store.root("a1").iterdir()] == ["whole"]


async def test_a_maker_killed_in_the_middle_leaves_nothing_that_counts(store: Store) -> None:
    with process(store, "stuck", "a1") as maker:
        assert maker.stdout
        assert maker.stdout.readline() == "filling\n"
        assert not store.has("a1")
        (half,) = (store.folder / "making").iterdir()
        maker.kill()
        maker.wait()
    assert (half / "root/half").exists()
    await add(store, "b2")  # another layer: what is left is swept all the same
    assert not half.exists()
    assert not store.has("a1")
    await add(store, "a1")


async def test_what_another_process_makes_is_not_swept_and_is_waited_for(store: Store) -> None:
    with process(store, "stuck", "a1") as maker:
        assert maker.stdout
        maker.stdout.readline()
        await add(store, "b2")
        waiting = asyncio.create_task(store.make("a1", unwanted))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert maker.communicate("", timeout=30)[0] == "True\n"
        assert await waiting is False
    assert (store.root("a1") / "whole").exists()


@pytest.mark.parametrize("after_s", [0, 0.02])
async def test_a_cancelled_maker_leaves_nothing(store: Store, after_s: float) -> None:
    async def endless(folder: Path) -> None:
        await filler({"half": "x"})(folder)
        await asyncio.sleep(60)

    making = asyncio.create_task(store.make("a1", endless))
    await asyncio.sleep(after_s)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert not store.has("a1")
    await add(store, "a1")


async def test_one_who_waits_can_be_cancelled(store: Store) -> None:
    with process(store, "stuck", "a1") as maker:
        assert maker.stdout
        maker.stdout.readline()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.make("a1", unwanted), 0.1)
        maker.communicate("", timeout=30)


async def test_cancelled_while_its_digest_is_taken(store: Store) -> None:
    async def fill(folder: Path) -> None:
        (folder / "root").mkdir()
        with (folder / "root/large").open("wb") as file:
            file.truncate(8 << 30)  # nothing on the disk, but more to read than anybody waits for

    making = asyncio.create_task(store.make("a1", fill))
    await asyncio.sleep(0.3)
    making.cancel()
    begun = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert time.monotonic() - begun < 2


async def test_a_layer_is_its_root_and_nothing_else(store: Store) -> None:
    async def fill(folder: Path) -> None:
        (folder / "other").mkdir()

    with pytest.raises(StoreError, match="must hold the folder root and nothing else"):
        await store.make("a1", fill)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 3}', "\0"])
async def test_a_layer_with_a_broken_description_is_missing_and_made_anew(store: Store, text: str) -> None:
    await add(store, "a1")
    description(store, "a1").write_text(text)
    assert not store.has("a1")
    assert store.usage() == []
    assert await store.verify(["a1"]) == ["a1"]
    assert await store.make("a1", filler({"new": "x"}))
    assert [path.name for path in store.root("a1").iterdir()] == ["new"]


async def test_a_layer_with_a_broken_description_in_use_stays(store: Store) -> None:
    await add(store, "a1")
    with store.lease(["a1"]):
        description(store, "a1").write_text("{")
        with pytest.raises(LayerInUse, match="a1"):
            await store.make("a1", filler({}))
        assert (store.root("a1") / "file").exists()


async def test_folders_that_nobody_may_enter_go_too(store: Store) -> None:
    async def fill(folder: Path) -> None:
        (folder / "root/closed/inner").mkdir(parents=True)
        (folder / "root/closed/inner/file").write_text("x")
        (folder / "root/closed/inner").chmod(0)
        (folder / "root/closed").chmod(0)

    store = Store(store.folder.parent, ONE_ID)
    await store.make("a1", fill)
    assert await Store(store.folder.parent, ONE_ID).verify(["a1"]) == []
    store.remove(["a1"])
    assert not list((store.folder / "making").iterdir())


# ---------------------------------------------------------------- where it cannot be
@pytest.fixture
def on_overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder on overlayfs, which keeps whiteouts and its own attributes to itself."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, tmp_path / "merged"], check=True)
    yield tmp_path / "merged"
    subprocess.run(["umount", tmp_path / "merged"], check=True)


@pytest.mark.skipif(not ROOT, reason="mounts")
async def test_a_file_system_that_cannot_hold_layers_is_refused(on_overlay: Path) -> None:
    store = Store(on_overlay, KIND)
    with pytest.raises(
        StoreError, match=r"refuses whiteouts or the attribute trusted\.overlay\.opaque .*TB2_CACHE_DIR"
    ):
        await store.make("a1", unwanted)
    assert not list((store.folder / "making").iterdir())


@pytest.fixture
def shared(store: Store, filled: None, tmp_path: Path) -> Iterator[Path]:
    """The store's folder in another place, where it can only be read."""
    shared = tmp_path / "shared"
    shared.mkdir()
    subprocess.run(["mount", "--bind", store.folder.parent, shared], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", shared], check=True)
    yield shared
    subprocess.run(["umount", shared], check=True)


@pytest.fixture
def filled(store: Store) -> None:
    asyncio.run(add(store, "a1"))
    store.put_record("pin", {"digest": "x"})


@pytest.mark.skipif(not ROOT, reason="mounts")
async def test_a_read_only_store_serves_what_it_has(shared: Path) -> None:
    reader = Store(shared, KIND, max_bytes=0)
    assert not await reader.make("a1", unwanted)
    with reader.lease(["a1"]):
        assert (reader.root("a1") / "file").exists()
        assert [layer.in_use for layer in reader.usage()] == [True]
    assert await reader.verify(["a1"]) == []
    assert reader.get_record("pin") == {"digest": "x"}
    for write in (lambda: reader.put_record("pin", {}), lambda: reader.remove(["a1"]), reader.trim):
        with pytest.raises(StoreReadOnly, match="TB2_CACHE_DIR"):
            write()
    with pytest.raises(StoreReadOnly, match=r"cannot be written to .*Read-only file system.*TB2_CACHE_DIR"):
        await reader.make("b2", unwanted)


# ---------------------------------------------------------------- leases
async def test_a_lease_names_all_that_is_missing(store: Store) -> None:
    await add(store, "a1")
    with pytest.raises(MissingLayer, match="not in the store: b2, c3") as caught:
        store.lease(["b2", "a1", "c3"])
    assert caught.value.ids == ("b2", "c3")
    assert store.remove(["a1"]) > 0


async def test_leases_of_one_layer_are_counted(store: Store) -> None:
    await add(store, "a1")
    first, second = store.lease(["a1", "a1"]), store.lease(["a1"])
    first.close()
    first.close()
    with pytest.raises(LayerInUse, match="a1"):
        store.remove(["a1"])
    assert store.has("a1")
    second.close()
    assert store.remove(["a1", "never"]) > 0
    assert not store.has("a1")


async def test_another_process_keeps_a_layer_until_it_dies(store: Store) -> None:
    store.max_bytes = 0
    await add(store, "a1", 5000, age_s=500)
    await add(store, "b2", 5000, age_s=400)
    with process(store, "lease", "a1") as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "leased\n"
        with pytest.raises(LayerInUse):
            store.remove(["b2", "a1"])
        assert [layer.in_use for layer in store.usage()] == [False, True]  # and a1 was used just now
        assert store.trim() >= 5000
        assert [store.has("a1"), store.has("b2")] == [True, False]
        holder.kill()
        holder.wait()
        assert store.trim() >= 5000
        assert not store.has("a1")


async def test_the_least_recently_used_go_first(store: Store) -> None:
    for number, layer_id in enumerate(("a1", "b2", "c3", "d4")):
        await add(store, layer_id, 100_000, age_s=1000 - number)
    store.lease(["a1"]).close()
    layers = store.usage()
    assert [layer.id for layer in layers] == ["b2", "c3", "d4", "a1"]
    assert store.trim() == 0
    store.max_bytes = layers[0].bytes * 5 // 2
    assert store.trim() == layers[0].bytes * 2
    assert [layer.id for layer in store.usage()] == ["d4", "a1"]
    assert store.trim() == 0


async def test_a_layer_was_used_until_its_lease_ended(store: Store) -> None:
    await add(store, "a1")
    with store.lease(["a1"]):
        os.utime(description(store, "a1"), (time.time() - 1000,) * 2)
    assert time.time() - store.usage()[0].last_used < 60


async def test_leasing_and_removing_at_once(store: Store) -> None:
    """Whoever got a lease sees the whole layer until he closes it."""
    wrong: list[str] = []
    ended = threading.Event()

    def lease() -> None:
        while not ended.is_set():
            try:
                with store.lease(["a1"]):
                    if not (store.root("a1") / "file").exists():
                        wrong.append("gone")
            except MissingLayer:
                time.sleep(0.001)

    users = [threading.Thread(target=lease) for _ in range(3)]
    for user in users:
        user.start()
    removed = 0
    for _ in range(20):
        await store.make("a1", filler({"file": "x"}))
        try:
            removed += bool(await asyncio.to_thread(store.remove, ["a1"]))
        except LayerInUse:
            await asyncio.sleep(0.005)
    ended.set()
    for user in users:
        user.join()
    assert not wrong


# ---------------------------------------------------------------- verifying
@pytest.mark.parametrize(
    "damage",
    [
        lambda root: (root / "file").write_text("y" * 10),
        lambda root: os.truncate(root / "file", 3),
        lambda root: (root / "file").unlink(),
        lambda root: (root / "more").mkdir(),
        lambda root: (root / "file").chmod(0o4755),
        lambda root: (root / "file").rename(root / "elif"),
        lambda root: os.setxattr(root, KIND.opaque, b"y"),
        lambda root: (root / "more").hardlink_to(root / "file"),
        lambda root: worktree.delete(str(root)),
    ],
)
async def test_a_damaged_layer_is_found_and_removed(store: Store, damage: Callable[[Path], object]) -> None:
    await add(store, "a1")
    await add(store, "b2")
    damage(store.root("a1"))
    again = Store(store.folder.parent, KIND)
    assert await again.verify(["b2", "a1", "c3"]) == ["a1", "c3"]
    assert not store.has("a1")
    assert await again.verify(["b2"]) == []


async def test_a_damaged_layer_in_use_stays(store: Store) -> None:
    await add(store, "a1")
    (store.root("a1") / "file").write_text("y")
    with store.lease(["a1"]):
        again = Store(store.folder.parent, KIND)
        assert await again.verify(["a1"]) == ["a1"]
        assert store.has("a1")
    assert await again.verify(["a1"]) == ["a1"]
    assert not store.has("a1")


async def test_a_layer_is_read_once(store: Store) -> None:
    await add(store, "a1")
    again = Store(store.folder.parent, KIND)
    assert await again.verify(["a1", "a1"]) == []
    (store.root("a1") / "file").write_text("y")
    assert await again.verify(["a1"]) == []


# ---------------------------------------------------------------- records
def test_records(store: Store) -> None:
    assert store.get_record("pin docker.io/library/x:latest") is None
    assert store.record_names() == []
    store.put_record("pin docker.io/library/x:latest", {"digest": "a"})
    store.put_record("pin docker.io/library/x:latest", {"digest": "b"})
    store.put_record("ü/..", {})
    assert Store(store.folder.parent, KIND).get_record("pin docker.io/library/x:latest") == {"digest": "b"}
    assert store.record_names() == ["pin docker.io/library/x:latest", "ü/.."]
    for file in (store.folder / "images").iterdir():
        file.write_text("{")
    assert store.get_record("ü/..") is None
    assert store.record_names() == []


# ---------------------------------------------------------------- workplaces
async def test_a_workplace_is_for_one_at_a_time_and_goes_with_its_user(store: Store) -> None:
    order: list[str] = []

    async def use(name: str) -> None:
        async with Store(store.folder.parent, KIND).workplace("pull-x") as folder:
            order.append(f"{name} in")
            assert not list(folder.iterdir())
            (folder / "part").mkdir()
            await asyncio.sleep(0.05)
            order.append(f"{name} out")

    await asyncio.gather(use("a"), use("b"))
    assert [each.split()[1] for each in order] == ["in", "out", "in", "out"]
    left = store.folder / "making" / "pull-x.0123"
    left.mkdir()  # by a process that was killed
    async with Store(store.folder.parent, KIND).workplace("pull-y"):
        assert not left.exists()
