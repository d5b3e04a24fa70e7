"""The rung none: what is laid out on the node, and a helper that isolates nothing. All within the test's folder."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from support.server import descendants
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.laid import RECORD, Laid, sweep
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox, Spawner
from tbench2_env.isolation.spec import Provided, SandboxSpec, SpawnerConfig
from tbench2_env.isolation.worktree import claim_folder

from .child import as_root
from .rig import Running, bash, is_alive, own_descriptors, until

StartSpawner = Callable[[], AbstractAsyncContextManager[Spawner]]


# ------------------------------------------------------------ laying out
@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder of the node's: etc/mine, and opt."""
    node = tmp_path / "node"
    (node / "etc").mkdir(parents=True)
    (node / "opt").mkdir()
    (node / "etc/mine").write_text("mine\n")
    return node


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """What a task lays out: app, app/run, etc/new, opt/link."""
    task = tmp_path / "task"
    for folder in ("app/empty", "etc", "opt"):
        (task / folder).mkdir(parents=True)
    (task / "app/run").write_text("#!/bin/sh\n")
    (task / "app/run").chmod(0o4711)
    (task / "app").chmod(0o1770)
    (task / "etc/new").write_text("new\n")
    (task / "opt/link").symlink_to("nowhere")
    os.utime(task / "app/run", (7, 7))
    return task


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    return Laid(str(tmp_path / "record"), chown=False)


def listing(folder: Path) -> dict[str, tuple[int, str]]:
    """Path -> mode, and the content or target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        text = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, text)
    return found


def test_what_is_missing_is_made_and_exactly_that_removed(node: Path, task: Path, laid: Laid, tmp_path: Path) -> None:
    before = listing(node)
    laid.lay(str(task), str(node))
    assert listing(node) == {**listing(task), **before}
    assert (node / "app/run").stat().st_mtime == 7
    (node / "app/more/deep").mkdir(parents=True)
    (node / "etc/agents").write_text("stays\n")
    laid.undo()
    assert (node / "etc/agents").read_text() == "stays\n"
    (node / "etc/agents").unlink()
    assert listing(node) == before
    assert (tmp_path / "record").read_text() == ""


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_there_already_is_named_and_nothing_is_made(node: Path, task: Path, laid: Laid, kind: str) -> None:
    taken = node / "etc/new"
    if kind == "link":
        taken.symlink_to("x")
    else:
        (Path.mkdir if kind == "folder" else Path.touch)(taken)
    before = listing(node)
    with pytest.raises(FileExistsError, match=rf"{taken}: exists on this node already"):
        laid.lay(str(task), str(node))
    assert listing(node) == before
    with pytest.raises(FileExistsError, match=rf"{taken}: exists on this node already"):
        laid.copy(str(task / "etc/new"), str(taken))
    with pytest.raises(FileExistsError, match=rf"{taken}: exists on this node already"):
        laid.link(str(taken), "x")
    assert listing(node) == before


def test_a_link_to_a_folder_is_not_followed(node: Path, task: Path, laid: Laid) -> None:
    (node / "app").symlink_to("etc")
    with pytest.raises(FileExistsError, match="app: exists on this node already"):
        laid.lay(str(task), str(node))


def test_a_failure_half_way_leaves_nothing(node: Path, task: Path, laid: Laid) -> None:
    before = listing(node)
    (task / "opt/pipe").symlink_to("x")
    name = "z" * 200
    (node / "opt" / name).mkdir()
    (task / "opt" / name).write_text("a file over a folder")
    before = listing(node)
    with pytest.raises(OSError, match=name):
        laid.lay(str(task), str(node))
    assert listing(node) == before


def test_a_folder_that_an_agent_put_in_the_place_of_the_nodes_is_left(
    node: Path, task: Path, laid: Laid, capfd: pytest.CaptureFixture[str]
) -> None:
    laid.lay(str(task), str(node))
    (node / "etc").rename(node / "old")
    (node / "etc").symlink_to("old")
    laid.undo()
    assert sorted(path.name for path in (node / "old").iterdir()) == ["mine", "new"]
    assert f"{node}/etc/new is not removed" in capfd.readouterr().err


def test_a_link_in_the_place_of_what_was_made_is_not_followed(node: Path, task: Path, laid: Laid) -> None:
    laid.lay(str(task), str(node))
    (node / "app").rename(node / "etc/moved")
    (node / "app").symlink_to("etc")
    laid.undo()
    assert not os.path.lexists(node / "app")
    assert (node / "etc/mine").read_text() == "mine\n"


@as_root
def test_what_an_agent_mounted_is_unmounted_and_not_removed(node: Path, task: Path, laid: Laid) -> None:
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    laid.lay(str(task), str(node))
    (node / "app/a folder, été").mkdir()
    for place in ("app/empty", "app/a folder, été", "app"):
        sc.mount(str(node / "etc"), str(node / place), flags=sc.MS_BIND)
    laid.undo()
    assert sorted(path.name for path in node.iterdir()) == ["etc", "opt"]
    assert (node / "etc/mine").read_text() == "mine\n"


def test_very_deep_and_closed_trees_are_removed(node: Path, task: Path, laid: Laid) -> None:
    laid.lay(str(task), str(node))
    deep = os.open(node / "app", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=deep)
        deeper = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    os.close(deep)
    (node / "app/empty").chmod(0)
    laid.undo()
    assert sorted(path.name for path in node.iterdir()) == ["etc", "opt"]


def test_what_a_killed_server_laid_out_is_swept(node: Path, task: Path, tmp_path: Path) -> None:
    before = listing(node)
    folder = Path(claim_folder(str(tmp_path / "scratch")))
    (folder / "shared").mkdir()
    laid = Laid(str(folder / RECORD), chown=False)
    laid.lay(str(task), str(node))
    sweep([str(tmp_path / "scratch")])
    assert (node / "app/run").exists(), "its server lives: it holds the lock"
    os.close(next(fd for fd, path in own_descriptors().items() if path == f"{folder}/lock"))
    (node / "opt/link").rename(node / "opt/kept")
    (node / "opt/link").write_text("somebody else's\n")
    sweep([str(tmp_path / "scratch")])
    assert (node / "opt/link").read_text() == "somebody else's\n"
    (node / "opt/link").unlink()
    (node / "opt/kept").unlink()
    assert listing(node) == before


def test_a_link_and_the_folders_above_it(laid: Laid, node: Path) -> None:
    before = listing(node)
    laid.link(str(node / "opt/a/b/link"), "/usr")
    assert (node / "opt/a/b/link").resolve() == Path("/usr")
    laid.undo()
    assert listing(node) == before


# ------------------------------------------------------------ the helper
@pytest.fixture
def started(tmp_path: Path) -> Iterator[StartSpawner]:
    before = own_descriptors()

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Spawner]:
        spawner = await Spawner.start(SpawnerConfig("none", (str(tmp_path / "scratch"),)))
        try:
            yield spawner
        finally:
            await spawner.stop()
        assert not list((tmp_path / "scratch").iterdir())

    yield start
    assert len(own_descriptors()) == len(before)


async def run(sandbox: Sandbox, script: str) -> str:
    running = Running(lambda fds: sandbox.start(bash(script), fds))
    try:
        return (await running.done()).output
    finally:
        running.close()


async def test_a_command_is_the_servers_equal(started: StartSpawner) -> None:
    async with started() as spawner:
        assert not spawner.rung.isolated
        sandbox = await spawner.create(SandboxSpec("one"))
        namespaces = " ".join(f"/proc/self/ns/{name}" for name in ("mnt", "pid", "net", "ipc", "uts", "user"))
        ours = [os.readlink(path) for path in namespaces.split()]  # noqa: PTH115
        assert (await run(sandbox, f"readlink {namespaces}; id -u")).split() == [*ours, str(os.geteuid())]
        with pytest.raises(SandboxError, match="one episode at a time"):
            await spawner.create(SandboxSpec("two"))
        await sandbox.destroy()
        await (await spawner.create(SandboxSpec("two"))).destroy()


async def test_whatever_became_of_a_process_it_ends_with_the_episode(started: StartSpawner, tmp_path: Path) -> None:
    async with started() as spawner:
        sandbox = await spawner.create(SandboxSpec("one"))
        # Daemons, and one whose first thread has ended, which looks like a zombie.
        threads = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(999,)).start()"
        leader = f"{threads}; open('{tmp_path}/up', 'w').close(); ctypes.CDLL(None).syscall({_EXIT}, 0)"
        script = f'setsid sleep 999 & (setsid setsid sleep 999 &); python3 -c "{leader}" & sleep 0.2; echo done'
        assert await run(sandbox, script) == "done\n"
        await until(lambda: (tmp_path / "up").exists())
        assert len(descendants(spawner._process.pid)) == 3
        await sandbox.destroy()
        await until(lambda: not descendants(spawner._process.pid))


_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]


async def test_a_timeout_kills_the_commands_tree_and_nothing_else(started: StartSpawner) -> None:
    async with started() as spawner:
        sandbox = await spawner.create(SandboxSpec("one"))
        await run(sandbox, "setsid sleep 998 & true")
        running = Running(lambda fds: sandbox.start(bash("setsid sleep 997 & (setsid sleep 997 &) ; sleep 997"), fds))
        await until(lambda: list(descendants(spawner._process.pid).values()).count("sleep 997 ") == 3)
        running.process.kill()
        assert (await running.done()).status == -signal.SIGKILL
        running.close()
        await until(lambda: list(descendants(spawner._process.pid).values()) == ["sleep 998 "])


async def test_a_layer_is_laid_out_for_each_episode_anew(started: StartSpawner, node: Path, task: Path) -> None:
    before = listing(node)
    async with started() as spawner:
        root = Path(f"{spawner.layers}/task/root{node}")
        root.parent.mkdir(parents=True)
        (spawner.folder / "shared/layers/task").chmod(0o755)
        await asyncio.to_thread(task.rename, root)
        for name in ("one", "two"):
            sandbox = await spawner.create(SandboxSpec(name, ("task",)))
            assert (
                await run(sandbox, f"cat {node}/etc/new; echo more >>{node}/etc/new; ls {node}/app")
                == "new\nempty\nrun\n"
            )
            await sandbox.destroy()
            assert listing(node) == before
        (node / "app").mkdir()
        (node / "app/run").touch()
        with pytest.raises(SandboxError, match=rf"{node}/app/run: exists on this node already"):
            await spawner.create(SandboxSpec("three", ("task",)))


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_the_helper_leaves_nothing(started: StartSpawner, how: str, tmp_path: Path) -> None:
    async with started() as spawner:
        sandbox = await spawner.create(SandboxSpec("one"))
        await run(sandbox, "setsid sleep 996 & true")
        (left,) = descendants(spawner._process.pid)
        if how == "kill":  # of the server: all that the helper hears is that its channels close
            spawner.conversation.close()
            await until(lambda: not is_alive(left))
    assert not is_alive(left)


async def test_there_are_no_layers(started: StartSpawner, tmp_path: Path) -> None:
    async with started() as spawner:
        refused = pytest.raises(SandboxError, match="there are no layers on this rung")
        for spec in (SandboxSpec("one", stored=("/opt",)), SandboxSpec("one", over_node=False)):
            with refused:
                await spawner.create(spec)
        with refused:
            async with spawner.view(["/opt"], over_node=False):
                pass
        sandbox = await spawner.create(SandboxSpec("one"))
        with refused:
            await sandbox.harvest(tmp_path / "layer")
        provided = [Provided("/opt", "/logs/toolchain", writable=True)]
        with refused:
            Running(lambda fds: sandbox.start_verifier(bash("true"), fds, "task", (), provided))
        assert await run(sandbox, "echo lives") == "lives\n"
