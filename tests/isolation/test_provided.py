"""Folders of the host that a verifier alone sees."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.files import picture
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Provided, Rung

from .conftest import HostFolder, StartRig
from .images import STORE, Layers, create
from .rig import RUNGS_HERE, Done, Rig, bash

PINNED, AT_HOME = "/logs/toolchain", "/root/.local/share/kit"
EACH_RUNG = pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)


async def verify(rig: Rig, sandbox: Sandbox, script: str, provided: Sequence[Provided]) -> Done:
    return await rig.start_verifier_command(sandbox, bash(script), rig.layer(), (), provided).done()


@pytest.fixture
def kit(host_folder: HostFolder) -> Path:
    """A program and a file `secret`."""
    folder = host_folder("/var/tmp")
    (folder / "program").write_text("#!/bin/bash\necho it runs\n")
    (folder / "program").chmod(0o4755)
    return folder


@EACH_RUNG
async def test_a_verifier_alone_sees_it_and_nobody_changes_it(
    start_rig: StartRig, kit: Path, host_folder: HostFolder, rung: Rung
) -> None:
    rig = await start_rig(rung=rung.name)
    image = Layers(host_folder("/var/tmp"), rig.spawner.rung).image()
    for sandbox in (await rig.create(), await create(rig, [image])):
        provided = [Provided(str(kit), PINNED), Provided(str(kit), AT_HOME)]
        script = f"for at in {PINNED} {AT_HOME}; do cat $at/secret; $at/program; echo x >$at/new; rm $at/secret; done"
        done = await verify(rig, sandbox, script, provided)
        assert done.lines[:2] == ["host secret", "it runs"]
        assert [line for line in done.lines if "Read-only" not in line] == ["host secret", "it runs"] * 2
        assert len(done.lines) == 8
        done = await rig.sh(sandbox, f"ls -A {PINNED} {AT_HOME}; stat -c '%U %a' {AT_HOME} /root/.local")
        assert done.lines[:4] == [f"{PINNED}:", "", f"{AT_HOME}:", "root 755"]
        assert (await verify(rig, sandbox, f"ls -A {PINNED} {AT_HOME}", ())).lines == [f"{PINNED}:", "", f"{AT_HOME}:"]


@EACH_RUNG
async def test_what_a_verifier_writes_is_its_own(start_rig: StartRig, host_folder: HostFolder, rung: Rung) -> None:
    rig = await start_rig(rung=rung.name)
    layer = Path(Layers(host_folder(STORE), rig.spawner.rung).add({"a/old": "old\n", "b": "b\n"}))
    before = picture(layer)
    provided = [Provided(str(layer), PINNED, writable=True), Provided(str(layer), "/srv/p", writable=True)]
    look, write = "cat a/old; ls; stat -c %U . a", "echo mine >>a/old; rm b; mkdir c; ln a/old c; stat -c %U c"
    waiting = f"cd {PINNED}; {look}; {write}; ls; ls /srv/p; echo up; read; cat c/old"
    sandboxes = [await rig.create() for _ in range(2)]
    verifiers = [rig.start_verifier_command(each, bash(waiting), rig.layer(), (), provided) for each in sandboxes]
    pristine = ["old", "a", "b", "root", "root"]
    for sandbox, verifier in zip(sandboxes, verifiers, strict=True):
        assert (await verifier.said("up")).split() == [*pristine, "root", "a", "c", "a", "b", "up"]
        assert (await rig.sh(sandbox, f"ls -A {PINNED} /srv/p")).lines == [f"{PINNED}:", "", "/srv/p:"]
    for verifier in verifiers:
        verifier.say()
        assert (await verifier.done()).lines[-2:] == ["old", "mine"]
    assert (await verify(rig, sandboxes[0], f"cd {PINNED}; {look}", provided)).lines == pristine
    assert picture(layer) == before
    await verify(rig, sandboxes[0], "true", ())
    assert not list(sandboxes[0].verifier_folder.parent.glob("provided*")), "the next verifier's start discards it"


@EACH_RUNG
async def test_the_pinned_place_cannot_be_faked(start_rig: StartRig, kit: Path, rung: Rung) -> None:
    rig = await start_rig(rung=rung.name)
    sandbox = await rig.create()
    for attack in ("rmdir {0}", "rm -rf {0}", "mv {0} /srv", "ln -s /srv {0}/x", "touch {0}/x", "umount -l {0}"):
        assert (await rig.sh(sandbox, attack.format(PINNED))).status != 0, attack
    assert (await verify(rig, sandbox, f"cat {PINNED}/secret", [Provided(str(kit), PINNED)])).output == "host secret\n"
    held = f"rm -rf {PINNED} /logs; cat {PINNED}/secret"
    waiting = bash(f"echo up; read; cat {PINNED}/secret")
    verifier = rig.start_verifier_command(sandbox, waiting, rig.layer(), (), [Provided(str(kit), PINNED)])
    await verifier.said("up")
    assert "host secret" not in (await rig.sh(sandbox, held)).output
    verifier.say()
    assert (await verifier.done()).lines == ["up", "host secret"]


async def test_what_is_in_the_way(rig: Rig, kit: Path) -> None:
    sandbox = await rig.create()
    await rig.sh(sandbox, "ln -s /srv /root/link; touch /root/file; mkdir /root/folder; ln -s /proc/1/root /root/out")
    for place, where in (("/root/link/kit", "/root/link"), ("/root/file", "/root/file"), ("/root/out/x", "/root/out")):
        with pytest.raises(SandboxError, match=f"a verifier's {place} cannot be made: {where}: File exists"):
            await verify(rig, sandbox, "true", [Provided(str(kit), place)])
    with pytest.raises(SandboxError, match="Read-only file system"):
        await verify(rig, sandbox, "true", [Provided(str(kit), "/sys/x")])
    with pytest.raises(SandboxError, match="/nowhere"):
        await verify(rig, sandbox, "true", [Provided("/nowhere", PINNED)])
    assert (await rig.sh(sandbox, "ls -A /srv")).output == ""
    assert (await verify(rig, sandbox, "ls /root/folder", [Provided(str(kit), "/root/folder")])).lines == [
        "program", "secret",
    ]  # fmt: skip
