"""Worktrees: an episode's upper over the task's layers, over the mask, over the node's root.

The ground is what all worktrees of one server share. It lives in a folder of the scratch, which is the spawner's
working directory, because paths given to overlayfs may have 255 characters at most (fsconfig(2)):

    lock          held with flock while the server lives; a folder whose lock is free is a dead server's
    base/         the node's root, cloned without what is mounted on it (and idmapped on rung 1)
    sysfs/        the host's /sys, read-only
    shared/       a tmpfs: mask/ and layers/NAME/
    episodes/NAME/  upper/ and work/ of the overlay, verifier/ for /logs/verifier
    trash/        discarded worktrees, to be deleted by the server

Why a tmpfs: a lower layer inside another lower layer's filesystem tree is ELOOP, and / holds the scratch.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import userns
from tbench2_env.isolation.spec import HOSTNAME, PRIVATE_FOLDERS, SYSTEM_FOLDERS, Rung

_READ_ONLY = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
_HOSTS = f"127.0.0.1\tlocalhost {HOSTNAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
PREFIX = "tbench2-"
_MOUNT_POINTS = ("base", "sysfs", "shared")


@dataclass(frozen=True)
class Ground:
    """What all worktrees of a server stand on. Its folder is the spawner's working directory."""

    folder: str
    rung: Rung

    def shift(self, uid: int) -> int:
        return uid + self.rung.owner_shift


def claim_folder(scratch: str) -> str:
    """A new folder in `scratch` that belongs to this server as long as the spawner lives.

    What dead servers left there is removed first; a live neighbour holds the lock of its folder.
    """
    Path(scratch).mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(scratch)
    # Locked before it bears a name that a neighbour's sweep looks for.
    unnamed = tempfile.mkdtemp(prefix=".new-", dir=scratch)
    lock = os.open(f"{unnamed}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = f"{scratch}/{PREFIX}{os.path.basename(unnamed).removeprefix('.new-')}"
    os.rename(unnamed, folder)
    return folder


def sweep(scratch: str) -> None:
    """Remove the folders of servers that are gone."""
    for folder in Path(scratch).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                demolish(str(folder))
            finally:
                os.close(lock)


def demolish(folder: str) -> None:
    """Remove a ground's folder. What is mounted in it is unmounted, never descended into: base/ is the host's root."""
    os.chdir("/")
    for name in _MOUNT_POINTS:
        with contextlib.suppress(OSError):
            sc.umount(f"{folder}/{name}")
    remove(folder)


def remove(folder: str) -> None:
    """Remove a ground's folder in which nothing is mounted, as seen from here; mount points are only ever rmdir'ed."""
    for name in ("episodes", "trash"):
        shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
    # The lock goes last: what cannot be removed now is found by a later sweep.
    with contextlib.suppress(OSError):
        for name in _MOUNT_POINTS:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(f"{folder}/{name}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/lock")
        os.rmdir(folder)


def prepare(folder: str, rung: Rung, hide: tuple[str, ...]) -> Ground:
    """Make `folder` the working directory and build base, mask and shared layers in it.

    Raises: OSError naming the call that this host refuses.
    """
    os.chdir(folder)
    ground = Ground(folder, rung)
    for name in (*_MOUNT_POINTS, "episodes", "trash"):
        Path(name).mkdir(exist_ok=True)
    _attach_base(rung)
    _attach_sysfs()
    _attach_tmpfs(ground)
    build_mask(ground, hide)
    return ground


def _attach_base(rung: Rung) -> None:
    base = sc.open_tree("/")
    if rung.idmapped:
        ids = userns.open_mapped(rung.map_line)
        sc.mount_setattr(base, sc.MOUNT_ATTR_IDMAP, ids)
        os.close(ids)
    # A lower layer is never written to; read-only, no mistake of ours can write to the host's root through it.
    sc.mount_setattr(base, sc.MOUNT_ATTR_RDONLY)
    _attach(base, "base")


def _attach_sysfs() -> None:
    sysfs = open_sysfs("/sys")
    sc.mount_setattr(sysfs, _READ_ONLY | sc.MOUNT_ATTR_NOEXEC, recursive=True)
    _attach(sysfs, "sysfs")


def open_sysfs(path: str) -> int:
    """A detached clone of /sys: alone, or with its children where an outer user namespace locked them to it."""
    try:
        return sc.open_tree(path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return sc.open_tree(path, sc.OPEN_TREE_CLONE | sc.AT_RECURSIVE)


def _attach_tmpfs(ground: Ground) -> None:
    _attach(sc.mount_detached("tmpfs", [("mode", "755")]), "shared")
    for name in ("shared/mask", "shared/layers"):
        Path(name).mkdir()
        own(ground, name)


def _attach(mount_fd: int, name: str) -> None:
    sc.move_mount(mount_fd, name)
    os.close(mount_fd)


def own(ground: Ground, path: str, uid: int = 0, gid: int = 0) -> None:
    """Give `path` to an id as the episode sees it."""
    if ground.rung.has_id_range:
        os.chown(path, ground.shift(uid), ground.shift(gid), follow_symlinks=False)


# ---------------------------------------------------------------- the mask
def build_mask(ground: Ground, hide: tuple[str, ...]) -> None:
    """Fill the mask: whiteouts over what the episode must not see, opaque folders it has to itself, a few files."""
    hide_new_names()
    for path, mode in PRIVATE_FOLDERS.items():
        _mask_folder(ground, path, mode)
    for host_path in sorted({os.path.realpath(path) for path in hide}):
        _hide(ground, host_path)
    _mask_file(ground, "etc/hosts", _HOSTS)
    _mask_file(ground, "etc/hostname", HOSTNAME + "\n")
    _mask_file(ground, "etc/resolv.conf", _read_or_empty("/etc/resolv.conf"))
    for name in (".bashrc", ".profile"):
        _mask_file(ground, f"root/{name}", _read_or_empty(f"/etc/skel/{name}"))


def hide_new_names() -> None:
    """White out top-level names that are neither system folders nor private ones; again at each create, cheaply."""
    top = {path.split("/")[0] for path in PRIVATE_FOLDERS}
    for name in os.listdir("base"):
        if name not in SYSTEM_FOLDERS and name not in top:
            _whiteout(name)


def is_hidden_already(path: str) -> bool:
    """Whether an absolute host path lies in a folder that no episode sees anyway."""
    relative = path.lstrip("/")
    inside = any(relative == folder or relative.startswith(folder + "/") for folder in PRIVATE_FOLDERS)
    return inside or relative.split("/")[0] not in SYSTEM_FOLDERS


def _hide(ground: Ground, path: str) -> None:
    if is_hidden_already(path) or _is_below_whiteout(path):
        return
    _mask_parents(ground, path.lstrip("/"))
    _whiteout(path.lstrip("/"))


def _is_below_whiteout(path: str) -> bool:
    masked = (f"shared/mask/{parent}" for parent in Path(path.lstrip("/")).parents[:-1])
    return any(os.path.lexists(each) and stat.S_ISCHR(os.lstat(each).st_mode) for each in masked)


def _whiteout(relative: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mknod(f"shared/mask/{relative}", stat.S_IFCHR, os.makedev(0, 0))


def _mask_folder(ground: Ground, relative: str, mode: int) -> None:
    _mask_parents(ground, relative)
    path = f"shared/mask/{relative}"
    os.mkdir(path)
    os.chmod(path, mode)
    own(ground, path)
    os.setxattr(path, f"{ground.rung.xattr_prefix}.overlay.opaque", b"y")


def _mask_parents(ground: Ground, relative: str) -> None:
    """Folders above a masked path look as they do below it: a merged folder's attributes are the topmost's."""
    for parent in reversed(Path(relative).parents[:-1]):
        path = f"shared/mask/{parent}"
        if not os.path.lexists(path):
            info = os.stat(f"/{parent}") if os.path.isdir(f"/{parent}") else None
            os.mkdir(path)
            os.chmod(path, stat.S_IMODE(info.st_mode) if info else 0o755)
            own(ground, path, info.st_uid if info else 0, info.st_gid if info else 0)


def _mask_file(ground: Ground, relative: str, text: str) -> None:
    _mask_parents(ground, relative)
    path = Path("shared/mask", relative)
    path.write_text(text)
    path.chmod(0o644)
    own(ground, str(path))


def _read_or_empty(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- one worktree
def create(ground: Ground, name: str, layers: tuple[str, ...]) -> int:
    """Mount a new worktree, detached, over `layers` (topmost first); returns its descriptor.

    Raises: OSError; nothing is left then.
    """
    hide_new_names()
    os.mkdir(f"episodes/{name}", 0o755)
    try:
        for part in ("", "/upper", "/work", "/verifier"):
            os.makedirs(f"episodes/{name}{part}", 0o755, exist_ok=True)
            own(ground, f"episodes/{name}{part}")
        return sc.mount_detached("overlay", _overlay_options(ground, name, layers))
    except OSError:
        discard(name)
        raise


def _overlay_options(ground: Ground, name: str, layers: tuple[str, ...]) -> list[tuple[str, str | None]]:
    lower = ":".join([*(f"shared/layers/{layer}/root" for layer in layers), "shared/mask", "base"])
    options: list[tuple[str, str | None]] = [
        ("source", "episode"),
        ("lowerdir", lower),
        ("upperdir", f"episodes/{name}/upper"),
        ("workdir", f"episodes/{name}/work"),
    ]
    for option in ground.rung.overlay_options:
        key, _, value = option.partition("=")
        options.append((key, value or None))
    return options


def verifier_mounts(ground: Ground, name: str, layer: str) -> tuple[int, int]:
    """Detached mounts of a task's pristine tests, read-only, and of an empty folder for /logs/verifier."""
    folder = f"episodes/{name}/verifier"
    if os.listdir(folder):
        os.rename(folder, f"trash/{name}.{os.urandom(4).hex()}")
        os.mkdir(folder, 0o755)
        own(ground, folder)
    tests = sc.open_tree(f"shared/layers/{layer}/tests")
    sc.mount_setattr(tests, _READ_ONLY)
    logs = sc.open_tree(folder)
    sc.mount_setattr(logs, sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV)
    return tests, logs


def discard(name: str) -> None:
    """Rename a worktree away, which takes no time whatever its size; the server deletes the trash."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(f"episodes/{name}", f"trash/{name}")
