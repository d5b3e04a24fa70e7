"""Stored layers merged on the host, for the server to read."""

import os
from pathlib import Path

import pytest

from tbench2_env.isolation.process import SandboxError

from .conftest import HostFolder, StartRig
from .images import STORE, Layers
from .rig import RUNGS_HERE, Rig

EACH_RUNG = pytest.mark.parametrize("rung", [rung.name for rung in RUNGS_HERE])


def views(rig: Rig) -> list[str]:
    folder = rig.spawner.ground / "shared/views"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@EACH_RUNG
async def test_layers_of_an_image(start_rig: StartRig, host_folder: HostFolder, rung: str) -> None:
    rig = await start_rig(rung=rung)
    layers = Layers(host_folder(STORE), rig.spawner.rung)
    lower = layers.add({"a/x": "lower", "a/y": "lower", "b/x": "lower"})
    upper = layers.add({"a/x": "upper"}, gone=("b",))
    async with rig.spawner.view([upper, lower], over_node=False) as folder:
        assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"a", "a/x", "a/y"}
        assert ((folder / "a/x").read_text(), (folder / "a/y").read_text()) == ("upper", "lower")
        assert (folder / "a/x").stat().st_uid == rig.spawner.rung.owner_shift + os.geteuid()
        with pytest.raises(OSError, match="Read-only file system"):
            (folder / "a/new").touch()
        async with rig.spawner.view([lower], over_node=False) as alone:
            assert (alone / "b/x").read_text() == "lower"
            assert len(views(rig)) == 2
    assert views(rig) == []
    assert not Path(folder).exists()


@EACH_RUNG
async def test_layers_over_the_node(start_rig: StartRig, host_folder: HostFolder, rung: str) -> None:
    rig = await start_rig(rung=rung)
    layers = Layers(host_folder(STORE), rig.spawner.rung)
    stored = [layers.add({"app/x": "x", "usr/local/t": "t"}, gone=("usr/bin/env",))]
    async with rig.spawner.view(stored, over_node=True) as folder:
        assert (folder / "app/x").read_text() + (folder / "usr/local/t").read_text() == "xt"
        assert not (folder / "usr/bin/env").exists()
        assert (folder / "usr/bin/cut").read_bytes() == Path("/usr/bin/cut").read_bytes()
        assert "root:" in (folder / "etc/passwd").read_text()
        assert {path.name for path in (folder / "root").iterdir()} == {".bashrc", ".profile"}
        assert not (folder / "work").exists()
    assert views(rig) == []


async def test_a_layer_that_is_missing(rig: Rig) -> None:
    with pytest.raises(SandboxError, match="/nowhere"):
        async with rig.spawner.view(["/nowhere"], over_node=False):
            pass
    assert views(rig) == []


async def test_a_view_of_a_stopped_spawner(start_rig: StartRig, host_folder: HostFolder) -> None:
    rig = await start_rig()
    layer = Layers(host_folder(STORE), rig.spawner.rung).add({"x": "x"})
    async with rig.spawner.view([layer], over_node=False) as folder:
        assert (folder / "x").read_text() == "x"
        await rig.spawner.stop()
        assert not folder.exists()
    assert Path(layer, "x").read_text() == "x"
