"""Stored layers: an image of its own, or layers over the node's root, on every kind of overlay that rungs make."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tbench2_env.isolation.changes import Budget
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Cover

from .conftest import HostFolder, StartRig
from .images import STORE, Layers, create
from .rig import BEST_RUNG, ROOT_IS_OVERLAY, RUNGS_HERE, Rig

NO_ENV = "ls: cannot access '/usr/bin/env': No such file or directory"
EACH_RUNG = pytest.mark.parametrize("rung", [rung.name for rung in RUNGS_HERE])
Store = Callable[[Rig], Layers]


@pytest.fixture
def store(host_folder: HostFolder) -> Store:
    """In a system folder of the node, on the file system of its root, if that is no overlay."""
    return lambda rig: Layers(host_folder(STORE), rig.spawner.rung)


def changed(sandbox: Sandbox) -> dict[str, str]:
    with sandbox.worktree() as tree:
        return {change.path: change.kind.value for change in tree.walk(tree.root, Budget(10_000))}


@EACH_RUNG
async def test_an_image_of_its_own(start_rig: StartRig, store: Store, rung: str) -> None:
    rig = await start_rig(rung=rung)
    layers = store(rig)
    image = layers.image()
    sandbox = await create(rig, [layers.add({"app/x": "top\n"}), image], rig.layer({"app/task": "task\n"}))
    done = await rig.sh(sandbox, "cd /; echo *; cat app/* home/someone/note; stat -c '%a %u %n' / etc root tmp logs")
    made = {"app", "etc", "root", "run", "tmp", "var", "proc", "sys", "dev", "tests", "logs"}
    names = made | {path.name for path in Path(image).iterdir()}
    assert done.lines[0].split() == sorted(names)
    assert done.lines[1:4] == ["task", "top", "of the image"]
    assert done.lines[4:] == ["755 0 /", "755 0 etc", "700 0 root", "1777 0 tmp", "755 0 logs"]
    done = await rig.sh(sandbox, "cat /etc/hostname; cat /etc/hosts; echo x >/dev/null; ls /dev/pts /proc/self/ns")
    assert done.lines[0] == "tbench"
    assert "127.0.0.1\tlocalhost tbench" in done.lines
    assert "ptmx" in done.lines
    assert changed(sandbox) == {}
    await whiteouts_and_opaque_folders(rig, layers, image)
    await what_is_changed_of_an_image(rig, image)


async def what_is_changed_of_an_image(rig: Rig, image: str) -> None:
    layer = rig.layer({"app/task": "task\n"}, test="cat /opt/t/*; echo more >/opt/t/new")
    sandbox = await create(rig, [image], layer)
    script = """cd /opt/t; echo more >>changed; rm removed; rm -r folder; mkdir folder; echo c >folder/c
    echo x >/etc/hosts; rm /app/task; echo x >/tmp/x; echo evil >/opt/t/evil; chmod 700 /usr/bin/cat"""
    assert (await rig.sh(sandbox, script)).status == 0
    assert changed(sandbox) == {
        "/opt/t/changed": "modified", "/opt/t/removed": "deleted", "/opt/t/folder": "replaced",
        "/opt/t/folder/a": "deleted", "/opt/t/folder/b": "deleted", "/opt/t/folder/c": "added", "/opt/t/evil": "added",
        "/etc/hosts": "modified", "/app/task": "deleted", "/tmp/x": "added", "/usr/bin/cat": "metadata",
    }  # fmt: skip
    with sandbox.worktree(thorough=True) as tree:
        assert tree.read("/opt/t/kept", 100) == b"kept\n"
        assert tree.read_below("/opt/t/removed", 100) == b"removed\n"
        assert b"localhost" in tree.read_below("/etc/hosts", 100)
    cover = Cover("/opt/t", hidden=("evil",), restored=("changed", "removed"))
    assert (await rig.verify(sandbox, layer, [cover])).lines[:1] == ["changed"]
    done = await rig.verify(sandbox, layer, [cover])
    assert [line for line in done.lines if "directory" not in line] == ["changed", "kept", "removed"]


async def whiteouts_and_opaque_folders(rig: Rig, layers: Layers, image: str) -> None:
    bottom = layers.add({"srv/d/a": "1", "srv/d/b": "1", "srv/gone/x": "1", "srv/file": "1", "srv/e/old": "1"})
    middle = layers.add({"srv/d/a": "2"}, gone=("srv/gone", "srv/file"), opaque=("srv/e",))
    top = layers.add({"srv/gone/y": "3", "srv/e/new": "3"}, gone=("srv/d/b",))
    sandbox = await create(rig, [top, middle, bottom, image])
    done = await rig.sh(sandbox, "cd /srv; echo * */*; cat */*; stat -c %h gone")
    assert done.lines[0] == "d e gone d/a e/new gone/y"
    assert done.lines[1].startswith("233")
    with sandbox.worktree() as tree:
        assert tree.below("/srv/file") is None
        assert tree.below("/srv/d/b") is None
        assert tree.read_below("/srv/d/a", 9) == b"2"
    assert (await rig.sh(sandbox, "cd /srv; rm -r gone; mkdir gone; echo 4 >d/b; echo 4 >file")).status == 0
    assert changed(sandbox) == {
        "/srv/gone": "replaced", "/srv/gone/y": "deleted", "/srv/d/b": "added", "/srv/file": "added",
    }  # fmt: skip


@EACH_RUNG
async def test_layers_over_the_node(start_rig: StartRig, store: Store, rung: str) -> None:
    """In a system folder of the node's own file system, where a lower inside another is refused."""
    rig = await start_rig(rung=rung)
    layers = store(rig)
    stored = layers.add(
        {"usr/local/t/x": "stored\n", "var/t": "stored\n", "root/t": "stored\n", "app/t": "stored\n"},
        gone=("usr/bin/env",), opaque=("usr/share/doc",),
    )  # fmt: skip
    layer = rig.layer({"app/task": "task\n"}, test="ls /usr/bin/cut /usr/bin/env; cat /usr/local/t/x /root/t")
    sandbox = await create(rig, [stored], layer, over_node=True)
    script = "cat /usr/local/t/x /var/t /root/t /app/*; ls /usr/bin/env; ls -A /usr/share/doc /var/tmp /home; echo /*"
    done = await rig.sh(sandbox, script)
    assert done.lines[:5] == ["stored", "stored", "stored", "stored", "task"]
    assert done.lines[5:-1] == [NO_ENV, "/home:", "", "/usr/share/doc:", "", "/var/tmp:"]
    assert done.lines[-1] == (await rig.sh(await rig.create(layer), "echo /*")).output.strip()
    owner = "nobody" if rig.spawner.rung.foreign else "root"
    assert (await rig.sh(sandbox, "stat -c %U /usr/local/t/x /root/t /usr/bin/cut")).lines == ["root", "root", owner]
    assert changed(sandbox) == {}
    script = "rm /usr/bin/cut; echo x >/usr/bin/env; rm /usr/local/t/x /root/t; echo x >>/etc/passwd; echo >/app/new"
    assert (await rig.sh(sandbox, script)).status == 0
    assert changed(sandbox) == {
        "/usr/bin/cut": "deleted", "/usr/bin/env": "added", "/usr/local/t/x": "deleted", "/root/t": "deleted",
        "/etc/passwd": "modified", "/app/new": "added",
    }  # fmt: skip
    covers = [Cover("/usr/bin", ("env",), ("cut",)), Cover("/usr/local/t", (), ("x",)), Cover("/root", (), ("t",))]
    done = await rig.verify(sandbox, layer, covers)
    assert done.lines == [NO_ENV, "/usr/bin/cut", "stored", "stored"]


@pytest.mark.skipif(not ROOT_IS_OVERLAY, reason="the node's root is none")
async def test_layers_in_the_root_that_is_an_overlay_itself(rig: Rig, host_folder: HostFolder) -> None:
    layers = Layers(host_folder("/var/tmp"), rig.spawner.rung)
    with pytest.raises(SandboxError, match="let TB2_CACHE_DIR be on another file system than /"):
        await create(rig, [layers.add({"usr/local/t/x": "stored"})], over_node=True)


@pytest.mark.skipif(
    ROOT_IS_OVERLAY or BEST_RUNG.by_folder or not os.access("/", os.W_OK),
    reason="the node's root is not below, or nobody can add to it",
)
async def test_names_that_are_new_in_the_nodes_root_stay_hidden(
    rig: Rig, host_folder: HostFolder, store: Store
) -> None:
    stored = [store(rig).add({"app/x": "x"})]
    before = await create(rig, stored, over_node=True)
    new = host_folder("/")
    for sandbox in (await create(rig, stored, over_node=True), await create(rig, stored, over_node=True)):
        done = await rig.sh(sandbox, f"cat /app/x {new}/secret; ls /; cut --version | head -1")
        assert new.name not in done.lines
        assert "host secret" not in done.output
        assert "cut" in done.lines[-1]
    assert (await rig.sh(before, "cat /app/x; echo x >/usr/bin/new; rm /usr/bin/cut; ls /usr/bin/new")).status == 0


async def test_many_layers_with_long_names(rig: Rig, store: Store) -> None:
    """As fast as one, and with each of them in its place."""
    layers = store(rig)
    image = layers.image()
    many = [layers.add({f"srv/{n}": str(n), "srv/top": str(n)}, name=f"{n}-{'x' * 64}") for n in range(24)]
    took: dict[int, list[float]] = {1: [], 25: []}
    for _ in range(8):
        for stored in ([image], [*many, image]):
            begun = time.perf_counter()
            sandbox = await create(rig, stored)
            took[len(stored)].append(time.perf_counter() - begun)
    done = await rig.sh(sandbox, "cd /srv; echo *; cat top")
    assert done.lines == [" ".join(sorted([*map(str, range(24)), "top"])), "0"]
    assert min(took[25]) < 1.5 * min(took[1]) + 0.003, took


async def test_layers_in_folders_with_odd_names(rig: Rig, host_folder: HostFolder) -> None:
    folder = host_folder(STORE) / "a:b, c\\"
    folder.mkdir()
    layers = Layers(folder, rig.spawner.rung)
    sandbox = await create(rig, [layers.add({"app/x": "x"}), layers.image()])
    assert (await rig.sh(sandbox, "cat /app/x")).output == "x"
    with pytest.raises(SandboxError, match="255 characters: let TB2_CACHE_DIR be shorter"):
        await create(rig, ["/" + "x" * 255])
    with pytest.raises(SandboxError, match="/nowhere"):
        await create(rig, ["/nowhere", layers.image()])
