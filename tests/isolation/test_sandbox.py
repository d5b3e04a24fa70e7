"""What an episode sees, what it cannot see, and that its changes are its own."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import IsolationUnavailable
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS, Limits, Rung

from .conftest import HostFolder, StartRig
from .rig import (
    AS_ANOTHER_USER,
    BEST_RUNG,
    IDS_ARE_FAKED,
    ROOT_IS_OVERLAY,
    RUNGS_HERE,
    Rig,
    command_line,
    descriptors,
    first_process,
    inner_number,
    processes,
    until,
)


def where_the_node_is_ours(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that makes folders of the host; the user of a node that is somebody else's can make none."""
    return test if not BEST_RUNG.foreign else _nothing_of_the_node_is_ours


def _nothing_of_the_node_is_ours() -> None:
    assert not [name for name in ("", *SYSTEM_FOLDERS) if os.access(f"/{name}", os.W_OK)]


PRIVATE_TOP_FOLDERS = {path.split("/")[0] for path in PRIVATE_FOLDERS}


# ---------------------------------------------------------------- its own copy of everything
async def test_changes_stay_in_the_sandbox_that_made_them(rig: Rig) -> None:
    sandboxes = [await rig.create() for _ in range(3)]
    paths = ("/tmp/f", "/root/f", "/etc/f", "/home/f", "/var/tmp/f", "/run/f", "/usr/local/bin/f", "/dev/shm/f", "/f")
    for number, sandbox in enumerate(sandboxes):
        script = f"for f in {' '.join(paths)}; do [ -e $f ] && echo found $f; echo {number} >$f || echo failed $f; done"
        assert (await rig.sh(sandbox, script)).output == ""
    for number, sandbox in enumerate(sandboxes):
        assert (await rig.sh(sandbox, f"cat {' '.join(paths)}")).lines == [str(number)] * len(paths)
    assert not any(Path(path).exists() for path in paths)


async def test_the_nodes_files_can_be_changed_and_removed_without_harm(rig: Rig) -> None:
    one, other = await rig.create(), await rig.create()
    before = [Path(path).read_bytes() for path in ("/etc/passwd", "/bin/cat")]
    chmod = "! chmod 0 /bin/cat 2>/dev/null" if BEST_RUNG.foreign else "chmod 0 /bin/cat"
    script = f"echo me >/etc/passwd && rm -r /etc/skel /bin/ls && mv /etc/apt /etc/apt2 && {chmod} && echo done"
    assert (await rig.sh(one, script)).output == "done\n"
    assert (await rig.sh(one, "wc -c </etc/passwd; [ -e /etc/apt2/sources.list.d ] && echo moved")).lines == [
        "3",
        "moved",
    ]
    script = "ls -d /etc/skel /etc/apt; stat -c %a /bin/cat; wc -c </etc/passwd"
    assert (await rig.sh(other, script)).lines == ["/etc/apt", "/etc/skel", "755", str(len(before[0]))]
    assert [Path(path).read_bytes() for path in ("/etc/passwd", "/bin/cat")] == before
    assert Path("/bin/cat").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)
async def test_etc_has_all_of_the_nodes_folders(start_rig: StartRig, rung: Rung) -> None:
    """Where it is a copy, too."""
    rig = await start_rig(rung=rung.name)
    walked = [f"{parent}/{name}" for parent, names, _ in os.walk("/etc") for name in names]
    ours = {path for path in walked if not os.path.islink(path)}  # noqa: PTH114
    assert set((await rig.sh(await rig.create(), "find /etc -mindepth 1 -type d")).lines) == ours


async def test_private_folders_are_empty_at_first(rig: Rig) -> None:
    sandbox = await rig.create()
    folders = [
        "tmp",
        "var/tmp",
        "home",
        "mnt",
        "media",
        "tests",
        "logs/verifier",
        "logs/toolchain",
        "run/lock",
        "dev/shm",
    ]
    assert (await rig.sh(sandbox, "find " + " ".join(f"/{path}" for path in folders) + " -mindepth 1")).output == ""
    assert (await rig.sh(sandbox, "ls -A /root /run")).lines == ["/root:", ".bashrc", ".profile", "", "/run:", "lock"]
    for path, mode in PRIVATE_FOLDERS.items():
        if path not in ("proc", "sys", "dev"):
            assert (await rig.sh(sandbox, f"stat -c '%a %u %g' /{path}")).output == f"{mode:o} 0 0\n", path


async def test_it_is_root_and_may_use_other_ids(rig: Rig) -> None:
    sandbox = await rig.create()
    assert (await rig.sh(sandbox, "id -u; id -g; id -G; whoami")).lines == ["0", "0", "0", "root"]
    script = "touch /srv/f && chown 33:1000 /srv/f && stat -c '%u %g' /srv/f && setpriv --reuid 33 --clear-groups id -u"
    others = (
        ["33 1000", "33"] if BEST_RUNG.has_id_range else ["chown: changing ownership of '/srv/f': Invalid argument"]
    )
    assert (await rig.sh(sandbox, script)).lines == (["0 0", "0"] if IDS_ARE_FAKED else others)
    owners = ["nobody", "root"] if BEST_RUNG.foreign else ["root", "root"]
    assert (await rig.sh(sandbox, "stat -c %U /usr/bin/env /etc/passwd")).lines == owners


async def test_its_name_is_its_own(rig: Rig) -> None:
    sandbox = await rig.create()
    done = await rig.sh(sandbox, "hostname; cat /etc/hostname; getent hosts tbench")
    assert done.lines[:2] == ["tbench", "tbench"]
    assert "tbench" in done.lines[2]
    assert os.uname().nodename != "tbench"


async def test_proc_shows_its_own_processes_only(rig: Rig) -> None:
    sandbox, other = await rig.create(), await rig.create()
    rig.start_sh(other, "exec sleep 1000")
    service = rig.start_sh(sandbox, "echo $$; exec sleep 2000")
    pid = (await service.said("\n")).strip()
    await rig.sh(sandbox, f"until [ $(cat /proc/{pid}/comm) = sleep ]; do :; done")
    done = await rig.sh(sandbox, "cd /proc; for p in [0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done; exit")
    seen = [line.strip() for line in done.lines]
    assert seen[0] == "init"
    assert "sleep 2000" in seen
    assert len(seen) <= 5, "the two commands and this one's own helpers"
    assert not [line for line in seen if "1000" in line.split()]
    assert int(pid) < 10


async def test_ipc_objects_are_its_own(rig: Rig) -> None:
    one, other = await rig.create(), await rig.create()
    assert (await rig.sh(one, "ipcmk -Q >/dev/null; ipcs -q | grep -c 0x")).output == "1\n"
    assert (await rig.sh(other, "ipcs -q | grep -c 0x")).output == "0\n"


async def test_devices(rig: Rig) -> None:
    sandbox = await rig.create()
    done = await rig.sh(
        sandbox, "ls /dev; echo x >/dev/null; head -c 2 /dev/zero | wc -c; head -c 9 /dev/urandom | wc -c"
    )
    names = [
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    ]
    assert done.lines == [*names, "2", "9"]
    assert (await rig.sh(sandbox, "echo x >/dev/full")).output.endswith("No space left on device\n")
    assert (await rig.sh(sandbox, "echo out | cat /dev/stdin")).output == "out\n"


async def test_sys_is_read_only(rig: Rig) -> None:
    done = await rig.sh(await rig.create(), "ls -d /sys/kernel; echo 1 >/sys/kernel/profiling; mkdir /sys/x")
    assert done.lines[0] == "/sys/kernel"
    assert done.output.count("Read-only file system") == 2


# ---------------------------------------------------------------- what is hidden
async def test_of_the_hosts_root_only_system_folders_are_seen(rig: Rig) -> None:
    seen = set((await rig.sh(await rig.create(), "ls -A /")).lines)
    host = {path.name for path in Path("/").iterdir()}
    assert seen == (host & SYSTEM_FOLDERS) | PRIVATE_TOP_FOLDERS
    assert host - seen, "this host has nothing to hide, so this test says nothing"


async def test_the_hosts_private_folders_are_not_seen(rig: Rig, host_folder: HostFolder) -> None:
    parents = ("/tmp", "/var/tmp", "/root", "/home", "/run", "/mnt", "/dev/shm")
    secrets = [host_folder(parent) for parent in parents if os.access(parent, os.W_OK)]
    assert len(secrets) > 2
    sandbox = await rig.create()
    done = await rig.sh(sandbox, f"ls {' '.join(map(str, secrets))}")
    assert done.output.count("No such file or directory") == len(secrets)


async def test_a_part_of_the_node_is_hidden(start_rig: StartRig) -> None:
    rig = await start_rig(hide=["/usr/share/doc", "/etc/debian_version"])
    seen = set((await rig.sh(await rig.create(), "ls -A /usr/share /etc /usr/share/doc /etc/debian_version")).lines)
    assert {
        f"ls: cannot access '{path}': No such file or directory" for path in ("/usr/share/doc", "/etc/debian_version")
    } <= seen
    assert "passwd" in seen
    assert {path.name for path in Path("/usr/share").iterdir()} - seen == {"doc"}


@where_the_node_is_ours
@pytest.mark.parametrize("parent", ["/opt", "/var/lib", "/usr/share", "/etc", "/srv"])
async def test_hidden_paths_are_not_seen(start_rig: StartRig, host_folder: HostFolder, parent: str) -> None:
    hidden, neighbour = host_folder(parent), host_folder(parent)
    (hidden / "sub").mkdir()
    rig = await start_rig(hide=[str(hidden), str(neighbour / "secret")])
    sandbox = await rig.create()
    assert (await rig.sh(sandbox, f"ls {hidden} {hidden}/secret {neighbour}/secret")).output.count("No such file") == 3
    names = {path.name for path in Path(parent).iterdir()} - {hidden.name}
    assert set((await rig.sh(sandbox, f"ls -A {parent}")).lines) == names
    seen = (await rig.sh(sandbox, f"stat -c '%a %u %g' {parent}")).output
    info = Path(parent).stat()
    assert seen == f"{info.st_mode & 0o7777:o} {info.st_uid} {info.st_gid}\n"
    assert (await rig.sh(sandbox, f"mkdir {hidden} && ls -A {hidden}")).output == "", "its own, empty"
    assert (hidden / "secret").read_text() == "host secret\n"


@where_the_node_is_ours
@pytest.mark.parametrize("order", [1, -1])
async def test_a_hidden_path_inside_another(start_rig: StartRig, host_folder: HostFolder, order: int) -> None:
    """As with a cache folder inside the output folder."""
    outer = host_folder("/opt")
    (outer / "inner/deep").mkdir(parents=True)
    rig = await start_rig(hide=[str(outer), str(outer / "inner")][::order])
    assert (await rig.sh(await rig.create(), f"ls {outer}")).output.endswith("No such file or directory\n")


@where_the_node_is_ours
async def test_a_hidden_path_given_by_a_link(start_rig: StartRig, host_folder: HostFolder, tmp_path: Path) -> None:
    hidden = host_folder("/opt")
    (tmp_path / "link").symlink_to(hidden)
    rig = await start_rig(hide=[str(tmp_path / "link"), "/opt/nowhere/at/all"])
    assert (await rig.sh(await rig.create(), f"ls {hidden}")).output.endswith("No such file or directory\n")


@where_the_node_is_ours
async def test_a_new_folder_at_the_top_is_hidden_from_the_next_sandbox(rig: Rig, host_folder: HostFolder) -> None:
    await rig.create()
    new = host_folder("/")
    sandbox = await rig.create()
    assert (await rig.sh(sandbox, f"cat {new}/secret; ls -d {new}")).output.count("No such file or directory") == 2
    assert (await rig.sh(sandbox, f"mkdir {new} && ls -A {new}")).output == ""


@where_the_node_is_ours
async def test_the_scratch_folder_is_not_seen_wherever_it_is(start_rig: StartRig, host_folder: HostFolder) -> None:
    """It holds the worktrees of other servers, too."""
    parent = host_folder("/var/lib")
    if ROOT_IS_OVERLAY:  # which cannot hold another overlay's upper
        with pytest.raises(IsolationUnavailable, match="not supported as upperdir"):
            await start_rig(scratch=parent / "scratch")
        assert list((parent / "scratch").iterdir()) == []
        return
    rigs = [await start_rig(scratch=parent / "scratch") for _ in range(2)]
    sandboxes = [await rig.create() for rig in rigs]
    assert len(list((parent / "scratch").iterdir())) == 2
    for rig, sandbox in zip(rigs, sandboxes, strict=True):
        assert (await rig.sh(sandbox, f"ls -A {parent}")).lines == ["secret"]


async def test_no_path_of_the_host_shows_in_the_mounts(rig: Rig) -> None:
    mounts = (await rig.sh(await rig.create(), "cat /proc/self/mountinfo")).output
    assert " / / " in mounts
    assert str(rig.scratch) not in mounts


# ---------------------------------------------------------------- layers
async def test_layers_lie_over_the_node_and_what_it_hides(rig: Rig) -> None:
    files = {"app/data": "A", "root/hello": "A", "tmp/x": "A", "etc/hosts": "A", "usr/share/new": "A", "new/x": "A"}
    sandbox = await rig.create(rig.layer(files))
    assert (await rig.sh(sandbox, "cat " + " ".join(f"/{path}" for path in files))).output == "A" * len(files)
    assert (await rig.sh(sandbox, "ls /root/.bashrc /usr/share/doc | head -1; stat -c %U /app/data")).lines == [
        "/root/.bashrc",
        "root",
    ]
    assert "new" not in (await rig.sh(await rig.create(), "ls /")).lines


async def test_the_topmost_layer_comes_first(rig: Rig) -> None:
    below, above = rig.layer({"app/x": "below", "app/y": "below"}), rig.layer({"app/x": "above"})
    assert (await rig.sh(await rig.create(above, below), "cat /app/x /app/y")).output == "abovebelow"


async def test_a_layer_is_not_changed_by_who_uses_it(rig: Rig) -> None:
    layer = rig.layer({"app/data": "v1", "app/sub/file": "x"})
    sandbox, other = await rig.create(layer), await rig.create(layer)
    done = await rig.sh(sandbox, "echo v2 >/app/data; rm -r /app/sub; touch /app/more; chmod 700 /app; cat /app/data")
    assert done.output == "v2\n"
    host = rig.spawner.layers / layer / "root/app"
    assert sorted(path.name for path in host.rglob("*")) == ["data", "file", "sub"]
    assert (host / "data").read_text() == "v1"
    assert host.stat().st_mode & 0o777 == 0o755
    script = "cat /app/data /app/sub/file; ls /app"
    assert (
        (await rig.sh(other, script)).output
        == (await rig.sh(await rig.create(layer), script)).output
        == "v1xdata\nsub\n"
    )


async def test_an_unknown_layer_is_an_error_that_leaves_nothing(rig: Rig) -> None:
    with pytest.raises(SandboxError, match="nosuchlayer"):
        await rig.create("nosuchlayer", name="again")
    await until(lambda: not rig.worktrees(), 2, rig.worktrees)
    assert (await rig.sh(await rig.create(name="again"), "echo fine")).output == "fine\n"


async def test_a_name_that_is_taken_is_an_error_and_the_first_lives_on(rig: Rig) -> None:
    first = await rig.create(name="twin")
    with pytest.raises(SandboxError, match="twin"):
        await rig.create(name="twin")
    assert (await rig.sh(first, "echo fine")).output == "fine\n"
    pid_namespace = await rig.pid_namespace(first)
    await first.destroy()
    assert not processes([pid_namespace])
    await until(lambda: not rig.worktrees(), 2, rig.worktrees)


# ---------------------------------------------------------------- limits
async def test_the_number_of_processes_is_capped_for_all_users_together(rig: Rig) -> None:
    sandbox, other = [await rig.create(limits=Limits(processes_max=40)) for _ in range(2)]
    bomb = """
import os, signal, sys
started = 0
try:
    while started < 60:
        if os.fork() == 0:
            if started % 2 and OTHERS:
                os.setuid(33)
            signal.pause()
        started += 1
except BlockingIOError:
    pass
print("started", started, flush=True)
signal.pause()
"""
    running = rig.start_sh(sandbox, f"exec python3 -c 'OTHERS = {bool(AS_ANOTHER_USER)}{bomb}'")
    started = int((await running.said("\n")).split()[1])
    assert 20 < started <= 40
    assert (await rig.sh(other, "for i in {1..20}; do sleep 1000 & done; jobs -p | wc -l")).output == "20\n"
    layer = rig.layer(test="echo $(echo 1 | cat) >/logs/verifier/reward.txt")
    assert (await rig.verify(other, layer)).status == 0
    running.process.kill()
    assert (await running.done()).status == -9
    assert (await rig.sh(sandbox, "echo $(echo fine | cat)")).output == "fine\n"


# ---------------------------------------------------------------- the end
async def test_destroy_ends_everything_and_discards_the_worktree(rig: Rig) -> None:
    sandbox, neighbour = await rig.create(), await rig.create()
    running = rig.start_sh(
        sandbox, "setsid sleep 1000 & (setsid sleep 1000 &); mkdir -p /srv/{a..f}/{a..f}; echo up; wait"
    )
    await running.said("up")
    pid_namespace = await rig.pid_namespace(sandbox)
    assert len(processes([pid_namespace])) == 4
    begun = asyncio.get_running_loop().time()
    await sandbox.destroy()
    assert asyncio.get_running_loop().time() - begun < 1
    assert not processes([pid_namespace])
    assert await running.ended_with_its_sandbox()
    assert not (rig.spawner.folder / "episodes" / sandbox.spec.name).exists(), "renamed at once"
    await until(lambda: not list((rig.spawner.folder / "trash").iterdir()), 2)
    assert await sandbox.died == "the sandbox was destroyed"
    with pytest.raises(SandboxError, match="destroyed"):
        rig.start_sh(sandbox, "true")
    with pytest.raises(SandboxError, match="destroyed"):
        rig.start_verifier(sandbox, rig.layer())
    await sandbox.destroy()
    assert (await rig.sh(neighbour, "echo fine")).output == "fine\n"


async def test_destroying_a_sandbox_with_300_processes(rig: Rig) -> None:
    sandbox = await rig.create()
    running = rig.start_sh(sandbox, "for i in {1..300}; do setsid sleep 1000 & done; echo up; wait")
    await running.said("up")
    pid_namespace = await rig.pid_namespace(sandbox)
    assert len(processes([pid_namespace])) == 302
    begun = asyncio.get_running_loop().time()
    await sandbox.destroy()
    assert asyncio.get_running_loop().time() - begun < 1
    assert not processes([pid_namespace])


async def test_the_death_of_its_first_process_is_its_death(rig: Rig) -> None:
    sandbox, neighbour = await rig.create(), await rig.create()
    running = rig.start_sh(sandbox, "echo up; exec sleep 1000")
    await running.said("up")
    pid_namespace = await rig.pid_namespace(sandbox)
    first = first_process(pid_namespace)
    assert command_line(first) == "init"
    os.kill(first, 9)
    assert "PID 1 was killed" in await asyncio.wait_for(sandbox.died, 2)
    assert await running.ended_with_its_sandbox()
    assert not processes([pid_namespace])
    with pytest.raises(SandboxError, match="PID 1 was killed"):
        rig.start_sh(sandbox, "true")
    with pytest.raises(SandboxError, match="PID 1 was killed"):
        rig.start_verifier(sandbox, rig.layer())
    await until(lambda: sandbox.spec.name not in str(rig.worktrees()), 2, rig.worktrees)
    await sandbox.destroy()
    assert (await rig.sh(neighbour, "echo fine")).output == "fine\n"
    assert not neighbour.died.done()


async def test_a_verifier_ends_with_its_sandbox(rig: Rig) -> None:
    sandbox = await rig.create()
    running = rig.start_verifier(sandbox, rig.layer(test="echo up; sleep 1000"))
    await running.said("up")
    await sandbox.destroy()
    assert await running.ended_with_its_sandbox()


async def test_its_first_process_holds_nothing_of_the_hosts(rig: Rig) -> None:
    first = first_process(await rig.pid_namespace(await rig.create()))
    assert inner_number(first) == 1
    assert set(descriptors(first)) <= {0, 1, 2}, descriptors(first)
    assert Path(f"/proc/{first}/environ").read_bytes() == b""
