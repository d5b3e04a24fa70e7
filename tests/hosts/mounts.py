"""What the imitated nodes mount, all of it in mount namespaces that end with them."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import userns

_AS_ROOT_OF_CONTAINER = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
#: Source and target, flags: enroot 4.1.2's own list for a container started with --root --rw.
_BINDS = (
    ("/proc", _AS_ROOT_OF_CONTAINER | sc.MOUNT_ATTR_NOEXEC),
    ("/sys", _AS_ROOT_OF_CONTAINER | sc.MOUNT_ATTR_NOEXEC | sc.MOUNT_ATTR_RDONLY),
    ("/dev", 0),
    *((f"/etc/{name}", _AS_ROOT_OF_CONTAINER) for name in ("hosts", "hostname", "resolv.conf", "machine-id")),
)
CHECKOUT = Path(__file__).resolve().parents[2]


def private_namespace(more: int = 0) -> None:
    """Leave the namespace of the node's mounts: what is mounted from here on, only we and our children see."""
    sc.unshare(sc.CLONE_NEWNS | more)
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)


def suite_folders() -> list[Path]:
    """The checkout, and where the interpreter is that runs us, with what it imports."""
    folders = [CHECKOUT]
    for prefix in (Path(sys.prefix), Path(sys.base_prefix)):
        if prefix != Path("/usr") and not prefix.is_relative_to(CHECKOUT):
            folders.append(prefix)
    return folders


def give(folders: Iterable[Path], uid: int) -> None:
    """Let the files of root in `folders` belong to `uid`, who can reach them although root's home is closed to it."""
    shift = userns.open_mapped(f"0 {uid} 1\n")
    trees = {folder: sc.open_tree(str(folder)) for folder in folders}
    for folder, tree in trees.items():
        sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, shift)
        closed = [parent for parent in reversed(folder.parents) if not parent.stat().st_mode & stat.S_IXOTH]
        if closed:
            sc.mount("tmpfs", str(closed[0]), "tmpfs", options="mode=755")
            folder.mkdir(parents=True)
        sc.move_mount(tree, str(folder))


def mount_container_root(root: Path, lower: Path | None, tmpfs: Path) -> None:
    """The folder `root`, bound on itself; or an overlay of `lower` there, with the upper on a tmpfs."""
    flags = sc.MS_NOSUID | sc.MS_NODEV
    if lower is None:
        sc.mount(str(root), str(root), flags=sc.MS_BIND)
        sc.mount("", str(root), flags=sc.MS_BIND | sc.MS_REMOUNT | flags)
        return
    sc.mount("tmpfs", str(tmpfs), "tmpfs", flags, "mode=755")
    upper, work = tmpfs / "upper", tmpfs / "work"
    upper.mkdir()
    work.mkdir()
    sc.mount("overlay", str(root), "overlay", flags, f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")


def enter_container(root: Path, folders: Iterable[Path]) -> None:
    """Mount the node's parts below `root`, and `folders` at their own paths, and make it the root."""
    for source, attributes in _BINDS:
        if Path(source).exists():
            _bind(source, f"{root}{source}", attributes)
    sc.mount("tmpfs", f"{root}/tmp", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "mode=1777")
    sc.mount("tmpfs", f"{root}/run", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "mode=755")
    for folder in folders:
        Path(f"{root}{folder}").mkdir(parents=True, exist_ok=True)
        _bind(str(folder), f"{root}{folder}", _AS_ROOT_OF_CONTAINER)
    os.chdir(root)
    sc.pivot_root(".", ".")
    sc.umount(".")
    os.chdir("/")


def _bind(source: str, target: str, attributes: int) -> None:
    """With all that is mounted below; the kernel allows nothing less to root of a user namespace."""
    if not Path(source).is_dir():
        with contextlib.suppress(FileExistsError):
            Path(target).touch(exist_ok=False)
    tree = sc.open_tree(source, sc.OPEN_TREE_CLONE | sc.AT_RECURSIVE)
    if attributes:
        sc.mount_setattr(tree, attributes, recursive=True)
    sc.move_mount(tree, target)
    os.close(tree)
