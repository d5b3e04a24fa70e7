"""What an episode changed, as its upper tells it: on real overlays, of every kind that rungs make."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from tbench2_env.isolation.changes import Budget, Change, Folder, Kind, Worktree
from tbench2_env.isolation.sandbox import Sandbox

from .conftest import StartRig
from .rig import RUNGS_HERE, Rig

#: Everything is made in a folder that the task's layer has, below a folder of the node's.
FILES = {
    "opt/t/modified": "old\n",
    "opt/t/same-size": "old\n",
    "opt/t/deleted": "gone\n",
    "opt/t/untouched": "x\n",
    "opt/t/mode": "x\n",
    "opt/t/opened": "x\n",
    "opt/t/to-folder": "x\n",
    "opt/t/folder/a": "a\n",
    "opt/t/folder/b": "b\n",
    "opt/t/gone/a": "a\n",
    "opt/t/to-file/a": "a\n",
    "opt/t/moved/a": "a\n",
    "opt/t/moved/b": "b\n",
}
EACH_RUNG = pytest.mark.parametrize("rung", [rung.name for rung in RUNGS_HERE])


async def started(start_rig: StartRig, rung: str) -> tuple[Rig, Sandbox]:
    rig = await start_rig(rung=rung)
    return rig, await rig.create(rig.layer(FILES))


def worktree(rig: Rig, sandbox: Sandbox, *, thorough: bool = False) -> Worktree:
    return Worktree(rig.spawner.ground, sandbox.spec, rig.spawner.rung, thorough=thorough)


def changes(rig: Rig, sandbox: Sandbox, entries_max: int = 10_000) -> dict[str, Change]:
    with worktree(rig, sandbox) as tree:
        found = list(tree.walk(tree.root, Budget(entries_max)))
    assert len({(change.path, change.kind) for change in found}) == len(found)
    return {change.path: change for change in found}


def kinds(found: dict[str, Change]) -> dict[str, str]:
    return {path: change.kind.value for path, change in found.items()}


def here(**expected: str) -> dict[str, str]:
    return {f"/opt/t/{name.replace('__', '/').replace('_', '-')}": kind for name, kind in expected.items()}


@EACH_RUNG
async def test_nothing_changed(start_rig: StartRig, rung: str) -> None:
    rig, sandbox = await started(start_rig, rung)
    assert (await rig.sh(sandbox, "cat /opt/t/* /etc/passwd >/dev/null; ls -R /usr/bin >/dev/null")).status in (0, 1)
    assert changes(rig, sandbox) == {}


@EACH_RUNG
async def test_files(start_rig: StartRig, rung: str) -> None:
    rig, sandbox = await started(start_rig, rung)
    script = """cd /opt/t; echo more >> modified; printf 'new\\n' > same-size; rm deleted; chmod 700 mode
    : >> opened; touch -d @1 opened; echo n > new; ln -s x link; mkfifo pipe; ln new hard"""
    assert (await rig.sh(sandbox, script)).status == 0
    found = changes(rig, sandbox)
    assert kinds(found) == here(
        modified="modified", same_size="modified", deleted="deleted", mode="metadata",
        new="added", link="added", pipe="added", hard="added",
    )  # fmt: skip
    modified, deleted = found["/opt/t/modified"], found["/opt/t/deleted"]
    assert modified.now is not None
    assert modified.before is not None
    assert (modified.now.st_size, modified.before.st_size) == (9, 4)
    assert deleted.now is None
    assert deleted.before is not None
    assert deleted.before.st_size == 5


@EACH_RUNG
async def test_folders(start_rig: StartRig, rung: str) -> None:
    rig, sandbox = await started(start_rig, rung)
    script = """cd /opt/t; rm -r gone; mkdir new; echo x > new/x; chmod 700 folder; echo c > folder/c
    rm to-folder; mkdir to-folder; rm -r to-file; echo x > to-file; mkdir -p /opt/other/deep"""
    assert (await rig.sh(sandbox, script)).status == 0
    assert kinds(changes(rig, sandbox)) == here(
        gone="deleted", new="added", new__x="added", folder="metadata", folder__c="added",
        to_folder="replaced", to_file="modified",
    ) | {"/opt/other": "added", "/opt/other/deep": "added"}  # fmt: skip


@EACH_RUNG
async def test_a_replaced_folder(start_rig: StartRig, rung: str) -> None:
    """What is in it again is no change, what is missing is deleted."""
    rig, sandbox = await started(start_rig, rung)
    script = "cd /opt/t; rm -r folder; mkdir folder; echo a > folder/a; echo n > folder/n"
    assert (await rig.sh(sandbox, script)).status == 0
    assert kinds(changes(rig, sandbox)) == here(folder="replaced", folder__b="deleted", folder__n="added")
    with worktree(rig, sandbox) as tree:
        assert isinstance(tree.find("/opt/t/folder"), Folder)
        gone = tree.find("/opt/t/folder/b")
        assert isinstance(gone, Change)
        assert gone.kind is Kind.DELETED


@EACH_RUNG
async def test_a_renamed_folder(start_rig: StartRig, rung: str) -> None:
    """By rename(2) where the rung has redirects; mv copies where it is EXDEV."""
    rig, sandbox = await started(start_rig, rung)
    script = "cd /opt/t; mv moved here; echo more >> here/a; rm here/b; echo n > here/n"
    assert (await rig.sh(sandbox, script)).status == 0
    found = changes(rig, sandbox)
    if "redirect_dir=on" in rig.spawner.rung.overlay_options:
        assert kinds(found) == here(
            moved="deleted", here="renamed", here__a="modified", here__b="deleted", here__n="added"
        )
        assert found["/opt/t/here"].origin == "/opt/t/moved"
    else:
        assert kinds(found) == here(moved="deleted", here="added", here__a="added", here__n="added")
    # Of the node's: the redirect is an absolute path then.
    assert (await rig.sh(sandbox, "mv /etc/apt /etc/was; mkdir /etc/apt")).status == 0
    found = changes(rig, sandbox)
    assert found["/etc/apt"].kind is Kind.REPLACED
    if "redirect_dir=on" in rig.spawner.rung.overlay_options:
        assert (found["/etc/was"].kind, found["/etc/was"].origin) == (Kind.RENAMED, "/etc/apt")


@EACH_RUNG
async def test_a_file_with_new_metadata_keeps_its_content(start_rig: StartRig, rung: str) -> None:
    """Metacopy, where there is that: the data is below, under another name after a rename."""
    rig, sandbox = await started(start_rig, rung)
    script = "cd /opt/t; chmod 600 mode; mv modified moved/m; chmod 600 opened; mv opened o"
    assert (await rig.sh(sandbox, script)).status == 0
    found = changes(rig, sandbox)
    assert kinds(found) == here(mode="metadata", modified="deleted", moved__m="added", opened="deleted", o="added")
    with worktree(rig, sandbox) as tree:
        contents = {}
        for folder_path, name in (("/opt/t", "mode"), ("/opt/t/moved", "m"), ("/opt/t", "o")):
            folder = tree.find(folder_path)
            assert isinstance(folder, Folder)
            fd = tree.open_file(folder, name)
            contents[name] = os.read(fd, 100)
            os.close(fd)
        assert contents == {"mode": b"x\n", "m": b"old\n", "o": b"x\n"}
        del folder


@EACH_RUNG
async def test_of_the_nodes_files(start_rig: StartRig, rung: str) -> None:
    rig, sandbox = await started(start_rig, rung)
    script = "rm /usr/bin/env; echo '1.2.3.4 x' >> /etc/hosts; echo x > /root/f; echo x > /tmp/f; rm -rf /usr/share/man"
    assert (await rig.sh(sandbox, script)).status == 0
    assert kinds(changes(rig, sandbox)) == {
        "/usr/bin/env": "deleted", "/etc/hosts": "modified", "/root/f": "added", "/tmp/f": "added",
        "/usr/share/man": "deleted",
    }  # fmt: skip


@EACH_RUNG
async def test_times_set_back(start_rig: StartRig, rung: str) -> None:
    """A large file of the same size and time is taken as unchanged, unless one asks to be thorough."""
    rig = await start_rig(rung=rung)
    sandbox = await rig.create(rig.layer({"opt/t/large": "a" * (2 << 20)}))
    script = "cd /opt/t; touch -r large /tmp/r; printf b | dd of=large conv=notrunc status=none; touch -r /tmp/r large"
    assert (await rig.sh(sandbox, script)).status == 0
    assert "/opt/t/large" not in changes(rig, sandbox)
    with worktree(rig, sandbox, thorough=True) as tree:
        folder = tree.find("/opt/t")
        assert isinstance(folder, Folder)
        change = tree.look(folder, "large")
        assert change is not None
        assert change.kind is Kind.MODIFIED
        del folder


@EACH_RUNG
async def test_what_an_agent_may_do_to_the_walk(start_rig: StartRig, rung: str, tmp_path: Path) -> None:
    """Links are not followed, whiteouts and overlay attributes cannot be made, unusual names are just names."""
    rig, sandbox = await started(start_rig, rung)
    (tmp_path / "secret").write_text("x")
    script = f"""cd /opt/t; ln -s {tmp_path} folder2; rm -r folder; ln -s /etc folder; mknod w c 0 0 2>/dev/null
    printf x > $'\\xff'; printf x > $'new\\nline'; printf x > '-'
    python3 -c 'import os; os.setxattr("untouched", "user.overlay.whiteout", b"y")' 2>/dev/null
    python3 -c 'import os; os.setxattr("gone", "user.overlay.opaque", b"y")' 2>/dev/null
    python3 -c 'import os; os.setxattr("moved", "user.overlay.redirect", b"/etc")' 2>/dev/null
    python3 -c 'import os; os.setxattr("gone", "trusted.overlay.opaque", b"y")' 2>/dev/null; true"""
    assert (await rig.sh(sandbox, script)).status == 0
    found = kinds(changes(rig, sandbox))
    assert found == here(folder2="added", folder="modified") | {
        f"/opt/t/{name}": "added" for name in ("\udcff", "new\nline", "-")
    }
    with worktree(rig, sandbox) as tree:
        change = tree.find("/opt/t/folder/passwd")
        assert isinstance(change, Change)
        assert (change.path, change.kind) == ("/opt/t/folder", Kind.MODIFIED)


@EACH_RUNG
async def test_a_folder_that_the_server_may_not_read(start_rig: StartRig, rung: str) -> None:
    """The agent is root in there and reads it all the same; only a server that is root, too, can."""
    rig, sandbox = await started(start_rig, rung)
    assert (await rig.sh(sandbox, "mkdir /tmp/d; echo x > /tmp/d/f; chmod 000 /tmp/d; cat /tmp/d/f")).status == 0
    with worktree(rig, sandbox) as tree:
        found = [(change.path, change.kind) for change in tree.walk(tree.root, Budget(100))]
        inside = ("/tmp/d/f", Kind.ADDED) if os.geteuid() == 0 else ("/tmp/d", Kind.UNREADABLE)
        assert found == [("/tmp/d", Kind.ADDED), inside]


async def test_a_deep_tree_is_not_followed_to_its_end(rig: Rig) -> None:
    sandbox = await rig.create()
    script = "mkdir -p /tmp/$(printf 'd/%.0s' {1..600}); echo x > /tmp/$(printf 'd/%.0s' {1..600})end"
    assert (await rig.sh(sandbox, script)).status == 0
    found = changes(rig, sandbox)
    assert [change.kind for change in found.values()].count(Kind.UNREADABLE) == 1
    assert len(found) < 250


async def test_the_budget_bounds_the_walk(rig: Rig) -> None:
    sandbox = await rig.create()
    assert (await rig.sh(sandbox, "mkdir /tmp/m; cd /tmp/m; touch {1..5000}")).status == 0
    with worktree(rig, sandbox) as tree:
        budget = Budget(1000)
        assert len(list(tree.walk(tree.root, budget))) <= 1000
        assert budget.exceeded


async def test_looking_at_one_path_is_quick_however_large_the_upper(start_rig: StartRig) -> None:
    rig = await start_rig()
    sandbox = await rig.create()
    script = "mkdir /tmp/{1..20}; touch /tmp/{1..20}/{1..300}; rm /usr/bin/env"
    assert (await rig.sh(sandbox, script, within_s=60)).status == 0
    begun = time.monotonic()
    with worktree(rig, sandbox) as tree:
        folder = tree.find("/usr/bin")
        assert isinstance(folder, Folder)
        assert tree.look(folder, "env") is not None
        assert tree.find("/usr/lib") is None
        del folder
    assert time.monotonic() - begun < 0.1


async def test_while_the_agent_changes_everything(rig: Rig) -> None:
    sandbox = await rig.create()
    script = "cd /tmp; while :; do mkdir -p a/b; touch a/b/c; mv a z; ln -s /etc a; rm -rf a z; done"
    busy = rig.start_sh(sandbox, script)
    for _ in range(100):
        paths = set(await asyncio.to_thread(changes, rig, sandbox))
        assert all(path.startswith("/tmp/") for path in paths)
    busy.process.kill()


async def test_an_episode_that_is_over(rig: Rig) -> None:
    sandbox = await rig.create()
    await sandbox.destroy()
    with pytest.raises(FileNotFoundError):
        worktree(rig, sandbox)
