"""The ground of the worktrees: what is hidden, who may remove a folder, and what removing never touches."""

import fcntl
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tbench2_env.isolation import mask, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS

from .child import as_root, drop_capabilities, in_own_process, own_mounts, own_user_namespace
from .rig import USER_NAMESPACES


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("/work/tasks", True),
        ("/data", True),
        ("/tmp/x", True),
        ("/tmp", True),
        ("/root/.cache", True),
        ("/var/tmp/x", True),
        ("/run/lock/x", True),
        ("/home/me", True),
        ("/proc/1", True),
        ("/", True),
        ("/usr/share/tasks", False),
        ("/opt", False),
        ("/var", False),
        ("/var/lib/tasks", False),
        ("/var/tmpfiles", False),
        ("/etc/tasks", False),
        ("/srv/x", False),
        ("/opt/tmp/x", False),
    ],
)
def test_what_no_episode_sees_anyway(path: str, hidden: bool) -> None:
    assert mask.is_hidden_already(path) is hidden


def test_every_private_folder_is_hidden_and_every_system_folder_is_not() -> None:
    assert all(mask.is_hidden_already(f"/{path}/x") for path in PRIVATE_FOLDERS)
    assert not any(mask.is_hidden_already(f"/{path}/x") for path in SYSTEM_FOLDERS)


# ---------------------------------------------------------------- whose folder it is
def claim_in_a_child(scratch: Path) -> tuple[Path, Callable[[], None]]:
    """A folder claimed by another process, as a live neighbour has it; the function ends that process."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, worktree.claim_folder(str(scratch)).encode())
        signal.pause()
    folder = Path(os.read(read_end, 4096).decode())

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return folder, end


def furnish(folder: Path) -> None:
    """As a ground looks with two worktrees."""
    for name in ("base", "sysfs", "shared", "episodes/a/upper/deep/er", "episodes/a/work", "trash/b/upper"):
        (folder / name).mkdir(parents=True)
    (folder / "episodes/a/upper/deep/file").write_text("x")


@in_own_process
def test_a_dead_servers_folder_is_swept_and_a_live_neighbours_is_not(tmp_path: Path) -> None:
    (alive, end_alive), (dead, end_dead) = claim_in_a_child(tmp_path), claim_in_a_child(tmp_path)
    for folder in (alive, dead):
        furnish(folder)
    end_dead()
    worktree.sweep(str(tmp_path))
    assert not dead.exists()
    assert (alive / "episodes/a/upper/deep/file").read_text() == "x"
    assert (alive / "lock").exists()
    end_alive()
    worktree.sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@in_own_process
def test_what_an_interrupted_removal_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / f"{worktree.PREFIX}dead"
    for left in ("trash.1/a/b", "trash.2", "trash/x/y", "episodes.1/z", "base"):
        (folder / left).mkdir(parents=True)
        (folder / left / "file").write_text("")
    (folder / "lock").write_text("")
    worktree.sweep(str(tmp_path))
    assert {path.name for path in folder.iterdir()} == {"lock", "base"}, "with the lock, as base/ cannot go"
    (folder / "base/file").unlink()
    worktree.sweep(str(tmp_path))
    assert not folder.exists()


def test_two_removals_of_one_folder_are_not_in_each_others_way(tmp_path: Path) -> None:
    folder = tmp_path / f"{worktree.PREFIX}dead"
    for number in range(400):
        (folder / f"trash/{number % 20}/{number}/c").mkdir(parents=True)
        (folder / f"trash/{number % 20}/{number}/c/file").write_text("")
    (folder / "lock").write_text("")
    with ThreadPoolExecutor() as pool:
        list(pool.map(worktree.remove, [str(folder)] * 3))
    worktree.sweep(str(tmp_path))
    assert not folder.exists()


def test_a_new_server_sweeps_and_claims_a_folder_of_its_own(tmp_path: Path) -> None:
    scratch = tmp_path / "made/on/demand"
    dead, end = claim_in_a_child(scratch)
    end()
    folder = Path(worktree.claim_folder(str(scratch)))
    assert list(scratch.iterdir()) == [folder] != [dead]
    assert scratch.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o777 == 0o700
    with (folder / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@in_own_process
def test_what_is_not_a_servers_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "tbench2-file").write_text("x")
    (tmp_path / "tbench2-nolock").mkdir()
    before = sorted(tmp_path.rglob("*"))
    worktree.sweep(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- demolish
def precious(tmp_path: Path) -> dict[str, str]:
    """What must survive: file -> text. It stands for the host's root."""
    root = tmp_path / "host"
    (root / "usr/lib").mkdir(parents=True)
    for name in ("passwd", "usr/lib/libc.so"):
        (root / name).write_text(name)
    return {str(path): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["base", "sysfs", "shared"])
@as_root
def test_what_is_mounted_is_unmounted_and_never_emptied(tmp_path: Path, name: str) -> None:
    own_mounts()
    files = precious(tmp_path)
    folder = Path(worktree.claim_folder(str(tmp_path / "scratch")))
    furnish(folder)
    sc.mount(str(tmp_path / "host"), str(folder / name), flags=sc.MS_BIND)
    assert (folder / name / "passwd").exists()
    worktree.demolish(str(folder))
    assert not folder.exists()
    assert {path: Path(path).read_text() for path in files} == files


@as_root
def test_what_cannot_be_unmounted_is_not_emptied_either(tmp_path: Path) -> None:
    """Mounts that came from a more privileged namespace are locked: umount is EINVAL (mount_namespaces(7))."""
    own_mounts()
    files = precious(tmp_path)
    folder = Path(worktree.claim_folder(str(tmp_path / "scratch")))
    furnish(folder)
    sc.mount(str(tmp_path / "host"), str(folder / "base"), flags=sc.MS_BIND)
    own_user_namespace(sc.CLONE_NEWNS) if USER_NAMESPACES else drop_capabilities()
    with pytest.raises(OSError, match="Invalid argument" if USER_NAMESPACES else "Operation not permitted"):
        sc.umount(str(folder / "base"))
    worktree.demolish(str(folder))
    assert sorted(path.name for path in (folder / "base").iterdir()) == ["passwd", "usr"]
    assert {path: Path(path).read_text() for path in files} == files
    assert (folder / "lock").exists(), "without its lock, no later sweep would find the folder"


@in_own_process
def test_links_in_a_worktree_are_not_followed(tmp_path: Path) -> None:
    files = precious(tmp_path)
    folder = Path(worktree.claim_folder(str(tmp_path / "scratch")))
    furnish(folder)
    for place in ("episodes/a/upper", "episodes", "trash"):
        (folder / place / "link").symlink_to(tmp_path / "host")
    worktree.demolish(str(folder))
    assert not folder.exists()
    assert {path: Path(path).read_text() for path in files} == files


@in_own_process
def test_a_half_built_folder_is_demolished(tmp_path: Path) -> None:
    folder = Path(worktree.claim_folder(str(tmp_path)))
    worktree.demolish(str(folder))
    worktree.demolish(str(folder))
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == Path("/")


def test_deleting_whatever_an_agent_made(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "link to a folder").parent.mkdir()
    (top / "link to a folder").symlink_to("/etc")
    deep = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 200, dir_fd=deep)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    os.close(deep)
    os.mkfifo(top / "fifo")
    (top / "closed").mkdir()
    (top / "closed/file").touch()
    (top / "closed").chmod(0)
    worktree.delete(str(top))
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc/passwd").exists()


@in_own_process
def test_deleting_as_somebody_without_power() -> None:
    if os.geteuid() == 0:
        os.setresuid(12345, 12345, 12345)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    (folder / "top/closed/below").mkdir(parents=True)
    (folder / "top/closed/below/file").touch()
    (folder / "top/closed/below").chmod(0o500)
    (folder / "top/closed").chmod(0)
    worktree.delete(str(folder / "top"))
    assert list(folder.iterdir()) == []
    folder.rmdir()
