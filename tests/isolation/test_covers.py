"""Folders in which a verifier sees something else than the agent left there."""

import pytest

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import Cover, Rung

from .conftest import StartRig
from .rig import RUNGS_HERE, Rig

LOOK = "cd {}; for f in *; do echo $f $(cat $f); done"


@pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)
async def test_what_is_hidden_and_what_is_restored(start_rig: StartRig, rung: Rung) -> None:
    rig = await start_rig(rung=rung.name)
    task = {"opt/kit/kept": "task", "opt/kit/changed": "task", "opt/kit/removed": "task", "opt/kit/left": "task"}
    layer = rig.layer(task, test=LOOK.format("/opt/kit") + "; echo more >new; echo more >kept; ls -A")
    sandbox = await rig.create(layer)
    script = (
        "cd /opt/kit; echo agent >changed; echo agent >left; rm removed; echo agent >added; echo agent >evil; ls -A"
    )
    before = await rig.sh(sandbox, script)
    cover = Cover("/opt/kit", hidden=("evil",), restored=("changed", "removed"))
    done = await rig.verify(sandbox, layer, [cover])
    seen = ["added agent", "changed task", "kept task", "left agent", "removed task"]
    assert done.lines[:5] == seen
    assert done.lines[5:] == ["added", "changed", "kept", "left", "new", "removed"]
    assert (await rig.sh(sandbox, "cd /opt/kit; ls -A")).output == before.output, "the agent notices nothing"
    assert (await rig.sh(sandbox, "cat /opt/kit/kept")).output == "task"
    assert (await rig.verify(sandbox, layer, [cover])).lines[:5] == seen, "and the next verifier begins anew"


@pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)
async def test_the_nodes_own_folders(start_rig: StartRig, rung: Rung) -> None:
    rig = await start_rig(rung=rung.name)
    layer = rig.layer(
        test="cat /usr/bin/cut | sha256sum; ls /usr/bin/evil; ls /usr/bin | wc -l; ls -A /root/.local/bin"
    )
    sandbox = await rig.create()
    honest = await rig.verify(sandbox, layer)
    script = "echo >/tmp/c; mv /tmp/c /usr/bin/cut; cd ~; mkdir -p .local/bin; touch /usr/bin/evil .local/bin/{uv,mine}"
    assert (await rig.sh(sandbox, script)).status == 0
    covers = [Cover("/usr/bin", ("evil",), ("cut",)), Cover("/root/.local/bin", ("uv",))]
    assert (await rig.verify(sandbox, layer, covers)).lines[:3] == honest.lines[:3]
    assert (await rig.verify(sandbox, layer, covers)).lines[3:] == ["mine"]


async def test_folders_in_the_way_are_told_of(rig: Rig) -> None:
    layer = rig.layer({"app/x": "x"}, test="true")
    sandbox = await rig.create(layer)
    await rig.sh(
        sandbox, "ln -s /etc /srv/link; touch /srv/file; rm -r /app; echo x >/app; mkdir /srv/d; ln -s /etc /srv/d/e"
    )
    for folder in ("/srv/link", "/srv/file", "/app", "/nowhere", "/srv/d/e"):
        with pytest.raises(SandboxError, match=f"{folder} is no folder that can be covered"):
            await rig.verify(sandbox, layer, [Cover(folder, hidden=("x",))])
    assert (await rig.verify(sandbox, layer)).status == 0


async def test_an_opaque_folder_hides_what_was_there(rig: Rig) -> None:
    layer = rig.layer({"opt/kit/old": "task"}, test=LOOK.format("/opt/kit"))
    sandbox = await rig.create(layer)
    await rig.sh(sandbox, "rm -r /opt/kit; mkdir /opt/kit; echo agent >/opt/kit/new")
    assert (await rig.verify(sandbox, layer, [Cover("/opt/kit", hidden=("nothing",))])).lines == ["new agent"]
    assert (await rig.verify(sandbox, layer, [Cover("/opt/kit", restored=("old",))])).lines == ["new agent", "old task"]


async def test_files_in_the_root_folder(rig: Rig) -> None:
    layer = rig.layer(test="ls -s /planted; cat /planted; echo more >/planted || echo read-only")
    sandbox = await rig.create(layer)
    await rig.sh(sandbox, "echo agent >/planted")
    done = await rig.verify(sandbox, layer, [Cover("/", blank=("planted",))])
    assert (done.lines[0], done.lines[-1]) == ("0 /planted", "read-only")
    assert (await rig.sh(sandbox, "cat /planted")).output == "agent\n"
    assert (await rig.verify(sandbox, layer)).lines[1] == "agent"


async def test_a_hundred_files(rig: Rig) -> None:
    """Each is a mount, whose descriptor the verifier is started with."""
    sandbox, names = await rig.create(), tuple(map(str, range(100)))
    await rig.sh(sandbox, "cd /srv; for i in {0..99}; do echo agent >$i; done")
    done = await rig.verify(sandbox, rig.layer(test="cat /srv/*; ls /srv | wc -l"), [Cover("/srv", blank=names)])
    assert done.output == "100\n"
