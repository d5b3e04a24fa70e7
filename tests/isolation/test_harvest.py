"""What an episode left becomes a stored layer: moved or copied, it gives the next episode what the first had."""

import asyncio
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tbench2_env.isolation import worktree
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import SandboxSpec

from .conftest import HostFolder, StartRig
from .images import STORE, Layers, create
from .rig import RUNGS_HERE, Rig, children, first_process, fresh_name, is_alive, processes, until

EACH_RUNG = pytest.mark.parametrize("rung", [rung.name for rung in RUNGS_HERE])
#: All that can be done to what is below, in a place of an image or of the node.
WORK = """set -e; cd /opt/t
rm removed; rm -r folder; mkdir folder; echo c >folder/c; echo more >>changed; chmod 4755 kept; mv other moved
echo 1 >one; ln one two; mkdir -p deep/er; ln deep/er/../../one deep/er/three; ln -s nowhere link; mkfifo fifo
echo x >closed; chmod 0 closed; mkdir shut; echo x >shut/x; chmod 0 shut; touch -d @1000000000 shut
mkdir -m 1777 sticky; touch -d @1234567890 changed; chmod 700 /opt/t; rm -r again; mkdir again
: >/tmp/x; printf 12 >sparse; truncate -s 20M sparse; printf 34 >>sparse; chown 33:34 one || true"""
LOOK = r"""cd /opt/t; find . -type d -printf '%p %m\n' -o -printf '%p %y %m %n %s %l\n' | sort; stat -c '%u %g' kept one
cat */c; stat -c %Y changed shut sticky/ | head -2; cmp one deep/er/three; tail -c 2 sparse; ls -A /tmp"""


@pytest.fixture
def other_filesystem() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"tbench2-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    worktree.delete(str(folder))
    assert not folder.exists()


def bottom(layers: Layers) -> str:
    names = ("removed", "kept", "changed", "folder/a", "folder/b", "other/a", "again/x")
    return layers.add({f"opt/t/{name}": f"{name}\n" for name in names})


def notes(root: Path) -> set[str]:
    """Names of overlayfs's attributes on anything of a layer."""
    return {
        name
        for path in (root, *root.rglob("*"))
        for name in os.listxattr(path, follow_symlinks=False)
        if ".overlay." in name
    }


@EACH_RUNG
async def test_a_layer_looks_as_the_episode_did(
    other_filesystem: Path, start_rig: StartRig, host_folder: HostFolder, rung: str
) -> None:
    """Moved, copied from one file system to another, and copied out of a worktree in memory."""
    places = {"moved": host_folder(STORE), "copied": other_filesystem, "out of memory": host_folder(STORE)}
    for how, store in places.items():
        scratch = other_filesystem / "scratch" if how == "out of memory" else host_folder(STORE) / "scratch"
        rig = await start_rig(rung=rung, scratch=scratch)
        layers = Layers(host_folder(STORE), rig.spawner.rung)
        below = bottom(layers)
        sandbox = await create(rig, [below], over_node=True, building=True)
        assert (await rig.sh(sandbox, WORK)).status == 0, how
        expected = await rig.sh(sandbox, LOOK)
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(f"{rig.spawner.ground}/episodes/{sandbox.spec.name}/upper/socket")
        target = store / "layer"
        await sandbox.harvest(target)
        with pytest.raises(SandboxError, match="the sandbox has become a layer"):
            await rig.sh(sandbox, "true")
        assert {name.partition(".")[2] for name in notes(target)} == {"overlay.opaque"}
        assert (target / "opt/t/sparse").stat().st_blocks < 100
        assert stat.S_ISCHR((target / "opt/t/removed").lstat().st_mode)
        assert not (target / "socket").exists()
        assert stat.S_IMODE(target.stat().st_mode) == 0o755
        again = await create(rig, [str(target), below], over_node=True, building=True)
        assert (await rig.sh(again, LOOK)).output == expected.output, how
        assert "removed\n" not in expected.output
        assert (await rig.sh(again, "cd /opt/t; rm -r folder one again shut; mkdir folder")).status == 0
        await again.harvest(store / "second")
        last = await create(rig, [str(store / "second"), str(target), below], over_node=True)
        done = await rig.sh(last, "cd /opt/t; ls; ls folder; cat two")
        assert done.lines[-1] == "1"
        assert not {"one", "again", "removed", "shut"} & set(done.lines)


@EACH_RUNG
async def test_changes_of_the_node(start_rig: StartRig, host_folder: HostFolder, rung: str) -> None:
    """With uppers for each of its folders they come together in one layer."""
    rig = await start_rig(rung=rung, scratch=host_folder(STORE) / "scratch")
    target = host_folder(STORE) / "layer"
    sandbox = await rig.create_as(SandboxSpec(fresh_name(), building=True))
    script = "rm /usr/bin/env; rm -r /etc/apt; mkdir /etc/apt /app; echo x >/app/x; echo x >/var/lib/x"
    assert (await rig.sh(sandbox, script)).status == 0
    await sandbox.harvest(target)
    assert {path.name for path in target.iterdir()} == {"usr", "app", "var", "etc"}
    over = await create(rig, [str(target)], over_node=True)
    look = "cat /app/x /var/lib/x; ls -A /etc/apt; ls /usr/bin/env /usr/bin/cut"
    assert (await rig.sh(over, look)).lines[:2] == ["x", "x"]
    assert (await rig.sh(over, look)).lines[2:] == [
        "ls: cannot access '/usr/bin/env': No such file or directory", "/usr/bin/cut",
    ]  # fmt: skip


async def test_what_was_kept_by_reference_is_refused(rig: Rig, tmp_path: Path) -> None:
    if "redirect_dir=on" not in rig.spawner.rung.overlay_options:
        pytest.skip("nothing is, here")
    sandbox = await rig.create(rig.layer({"opt/t/a": "x"}))
    assert (await rig.sh(sandbox, "chmod 700 /opt/t/a")).status == 0
    with pytest.raises(SandboxError, match=r"opt/t/a has no content of its own .*metacopy.*`building`"):
        await sandbox.harvest(tmp_path / "layer")
    assert not (tmp_path / "layer").exists()


async def test_a_place_that_cannot_be_taken(rig: Rig, tmp_path: Path) -> None:
    sandbox = await rig.create()
    with pytest.raises(SandboxError, match="File exists"):
        await sandbox.harvest(tmp_path)
    sandbox = await rig.create()
    with pytest.raises(SandboxError, match=r"No such file or directory.*nowhere/layer"):
        await sandbox.harvest(tmp_path / "nowhere/layer")
    with pytest.raises(SandboxError, match="the sandbox has become a layer"):
        await sandbox.harvest(tmp_path / "nowhere/layer")


async def test_what_runs_is_killed_and_the_dead_give_nothing(rig: Rig, tmp_path: Path) -> None:
    sandbox = await rig.create()
    names = [await rig.pid_namespace(sandbox)]
    writer = rig.start_sh(sandbox, "while :; do echo x >>/tmp/x; done")
    upper = rig.spawner.ground / "episodes" / sandbox.spec.name / "upper"
    await until(lambda: (upper / "tmp/x").exists())
    await sandbox.harvest(tmp_path / "layer")
    assert await writer.ended_with_its_sandbox()
    assert not processes(names)
    size = (tmp_path / "layer/tmp/x").stat().st_size
    sandbox = await rig.create()
    pid = first_process(await rig.pid_namespace(sandbox))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid))
    with pytest.raises(SandboxError, match="the sandbox is dead"):
        await sandbox.harvest(tmp_path / "other")
    assert (tmp_path / "layer/tmp/x").stat().st_size == size
    assert not (tmp_path / "other").exists()


async def test_a_harvest_that_is_cancelled(other_filesystem: Path, rig: Rig) -> None:
    """Its process is gone when the news is out, and so is the worktree."""
    sandbox = await rig.create()
    assert (await rig.sh(sandbox, "mkdir /app; cd /app; for i in {1..800}; do echo x >$i; done")).status == 0
    before = set(children(rig.pid))
    task = asyncio.ensure_future(sandbox.harvest(other_filesystem / "layer"))
    await until(lambda: (other_filesystem / "layer/app").exists() or task.done())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(children(rig.pid)) <= len(before) - 1
    await until(lambda: not rig.worktrees(), 5.0, rig.worktrees)
