"""Worktrees: an episode's upper over a stack of layers (see `stack`), and the ground that they stand on.

The ground is what all worktrees of one server share. It lives in a folder of the scratch, which is the spawner's
working directory, because paths given to overlayfs may have 255 characters at most (fsconfig(2)):

    lock          held with flock while the server lives; a folder whose lock is free is a dead server's
    base/         the node's root, cloned without what is mounted on it (and idmapped on rung 1); where an episode's
                  root is made folder by folder, only the system folders, each a clone
    sysfs/        the host's /sys, read-only
    shared/       a tmpfs: mask/, frame/, layers/NAME/, and overlays that are mounted in it: node/, views/NAME/
    episodes/NAME/  upper/ and work/ of the overlay (upper.usr/ and work.usr/ for a folder of its own), verifier/ for
                  /logs/verifier, and what a verifier writes elsewhere: tests/, provided.N/, cover.N/; a tmpfs of its
                  own where the scratch is one, which bounds it
    trash/        discarded worktrees, to be deleted by the server

Why a tmpfs: a lower layer inside another lower layer's filesystem tree is ELOOP, and / holds the scratch.
"""

import contextlib
import errno
import fcntl
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tbench2_env.isolation import frame, mask, stack, userns
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Limits, Rung, SandboxSpec
from tbench2_env.isolation.stack import Ground

_READ_ONLY = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
# linux/fs.h; see chattr(1) for the flag T
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_TOPDIR_FL = 0x8008_6601, 0x4008_6602, 0x2_0000
PREFIX = "tbench2-"
_MOUNT_POINTS = ("base", "sysfs", "shared")
_VERIFIER_ATTRIBUTES = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
#: Characters of a path from which on `delete` shortens it.
_DEEP = 300
#: Folders of episodes/NAME that are a verifier's, up to a dot.
_OF_VERIFIERS = ("verifier", "tests", "provided", "cover")


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
    # By any name: a removal that was interrupted, or that another one was in the way of, left parts beside `trash`.
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False) and entry.name not in ("base", "sysfs"):
                delete(entry.path)
        for name in _MOUNT_POINTS:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(f"{folder}/{name}")
        # The lock goes last: what cannot be removed now is found by a later sweep.
        if os.listdir(folder) == ["lock"]:
            os.unlink(f"{folder}/lock")
        os.rmdir(folder)


def delete(path: str) -> None:
    """Delete a tree that an agent made, however deep and whatever its modes; what cannot be deleted is left.

    Folders that are deep down are moved up beside `path`: so nothing recurses, and no path becomes too long. Another
    deletion of the same tree may be under way; what it is at is left to it.
    """
    folders, beside = [(path, False)], f"{path}.{os.urandom(8).hex()}"
    moved = 0
    while folders:
        folder, entered = folders.pop()
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            continue
        if not entered:
            folders.append((folder, True))
            for below in _delete_files(folder):
                if len(below) > _DEEP:
                    with contextlib.suppress(OSError):
                        _make_accessible(below)
                        os.rename(below, f"{beside}.{moved}")
                    below, moved = f"{beside}.{moved}", moved + 1
                folders.append((below, False))


def _delete_files(folder: str) -> list[str]:
    """Answers with the folders that are in it, too."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        _make_accessible(folder)
        with os.scandir(folder) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    found.append(entry.path)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
    return found


def _make_accessible(folder: str) -> None:
    """Root can do without, but the server may not be that."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(folder, 0o700)


def prepare(folder: str, rung: Rung, hide: tuple[str, ...]) -> Ground:
    """Make `folder` the working directory and build base, mask and shared layers in it.

    Raises: OSError naming the call that this host refuses.
    """
    os.chdir(folder)
    for name in (*_MOUNT_POINTS, "episodes", "trash"):
        Path(name).mkdir(exist_ok=True)
    _spread("episodes")
    own_folders = _attach_folders() if rung.by_folder else _attach_root(rung)
    _attach_sysfs()
    _attach_tmpfs(rung)
    mask.build(rung, hide, own_folders)
    frame.build(rung)
    return Ground(
        folder, rung, own_folders, in_memory=sc.filesystem_type(".") == sc.TMPFS_MAGIC,
        stacks=sc.filesystem_type("/") != sc.OVERLAYFS_SUPER_MAGIC,
    )  # fmt: skip


def _spread(folder: str) -> None:
    """Let ext4 place what is made in `folder` all over the disk, as far as it is ext4.

    In one place, each new folder's inode is looked for among those deleted in the last minute, if there is no journal.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = bytearray(8)
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        struct.pack_into("=i", flags, 0, struct.unpack_from("=i", flags)[0] | _FS_TOPDIR_FL)
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, flags)
    except OSError:
        pass  # another file system
    finally:
        os.close(fd)


def _attach_root(rung: Rung) -> tuple[str, ...]:
    base = sc.open_tree("/")
    if rung.idmapped:
        ids = userns.open_mapped(rung.map_line)
        sc.mount_setattr(base, sc.MOUNT_ATTR_IDMAP, ids)
        os.close(ids)
    # A lower layer is never written to; read-only, no mistake of ours can write to the host's root through it.
    sc.mount_setattr(base, sc.MOUNT_ATTR_RDONLY)
    _attach(base, "base")
    return ()


def _attach_folders() -> tuple[str, ...]:
    """One clone for each system folder: the root itself has mounts on it that this user namespace may not take off.

    /etc is a copy in the mask, so only /etc may have mounts on it (containers bind files there).
    """
    # Of a file system of its own, so that what is attached in it is gone with it.
    _attach(sc.mount_detached("tmpfs", [("mode", "755")]), "base")
    own_folders = tuple(name for name in mask.system_folders() if not os.path.islink(f"/{name}"))
    for name in own_folders:
        os.mkdir(f"base/{name}")
        if name != "etc":
            clone = sc.open_tree(f"/{name}")
            sc.mount_setattr(clone, sc.MOUNT_ATTR_RDONLY)
            _attach(clone, f"base/{name}")
    return own_folders


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


def _attach_tmpfs(rung: Rung) -> None:
    _attach(sc.mount_detached("tmpfs", [("mode", "755")]), "shared")
    for name in ("shared/mask", "shared/layers", *stack.NOTHING):
        Path(name).mkdir()
        mask.own(rung, name)
    Path("shared/empty").touch(0o444)


def _attach(mount_fd: int, name: str) -> None:
    sc.move_mount(mount_fd, name)
    os.close(mount_fd)


# ---------------------------------------------------------------- one worktree
def create(ground: Ground, spec: SandboxSpec) -> list[tuple[int, str]]:
    """Mount a new worktree, detached; returns descriptors and where each belongs in the episode, the root first.

    Raises: OSError; nothing is left then.
    """
    _hide_new_names(ground, spec)
    folder = f"episodes/{spec.name}"
    os.mkdir(folder, 0o755)
    mounts: list[tuple[int, str]] = []
    try:
        if ground.in_memory:
            _attach(sc.mount_detached("tmpfs", _bounds(spec.limits)), folder)
        _make(ground.rung, folder)
        _make(ground.rung, f"{folder}/verifier")
        for name in ("", *stack.own_folders(ground, spec)):
            mounts.append((_overlay(ground, spec, name), f"/{name}" if name else ""))
    except OSError:
        for fd, _ in mounts:
            os.close(fd)
        discard(ground, spec.name)
        raise
    return mounts


def _hide_new_names(ground: Ground, spec: SandboxSpec) -> None:
    if spec.over_node and not ground.own_folders and mask.hide_new_names():
        stack.forget_merged_node()


def _bounds(limits: Limits) -> list[tuple[str, str | None]]:
    """A worktree in memory ends with ENOSPC; without bounds it would take half of the memory, as every tmpfs."""
    bounds = {"size": limits.storage_bytes, "nr_inodes": limits.files_max}
    return [("mode", "755"), *((key, str(value)) for key, value in bounds.items() if value is not None)]


def _make(rung: Rung, path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    mask.own(rung, path)


def create_view(ground: Ground, spec: SandboxSpec) -> str:
    """Mount the stored layers, and the node below them if the spec says so, read-only; answers with the folder.

    Raises: OSError; nothing is left then.
    """
    _hide_new_names(ground, spec)
    folder = f"shared/views/{spec.name}"
    os.makedirs(folder)
    try:
        for name in ("", *stack.own_folders(ground, spec)):
            options = [("source", "view"), *stack.view_options(ground, spec, name)]
            attributes = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
            _attach(stack.mount(spec, options, attributes), f"{folder}/{name}")
    except OSError:
        remove_view(spec.name)
        raise
    return folder


def remove_view(name: str) -> None:
    """One that is gone already is no error."""
    with contextlib.suppress(OSError):
        sc.umount(f"shared/views/{name}")
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(f"shared/views/{name}")


def describe(ground: Ground) -> list[str]:
    """The overlays of an episode, for people to read."""
    found = []
    for name in ("", *ground.own_folders):
        options = stack.overlay_options(ground, SandboxSpec("EPISODE", ("TASK",)), name)
        found.append(
            f"overlay on /{name} ({','.join(key if value is None else f'{key}={value}' for key, value in options)})"
        )
    return found


def _overlay(ground: Ground, spec: SandboxSpec, name: str) -> int:
    """The overlay of the root, or of the top-level folder `name`."""
    options = stack.overlay_options(ground, spec, name)
    for key, value in options:
        if key in ("upperdir", "workdir") and value is not None:
            _make(ground.rung, value)
    return stack.mount(spec, [("source", "episode"), *options], sc.MOUNT_ATTR_NODEV)


def verifier_mounts(ground: Ground, name: str, layer: str) -> tuple[int, int]:
    """Detached mounts of a task's tests and of an empty folder for /logs/verifier.

    The tests are pristine and may be written to, as some harnesses do: what is written is this verifier's alone.
    """
    tests = private_overlay(ground, f"episodes/{name}/tests", [f"shared/layers/{layer}/tests"])
    _make(ground.rung, f"episodes/{name}/verifier")
    logs = sc.open_tree(f"episodes/{name}/verifier")
    sc.mount_setattr(logs, _VERIFIER_ATTRIBUTES)
    return tests, logs


def private_overlay(ground: Ground, own: str, lowers: Sequence[str], attributes: int = _VERIFIER_ATTRIBUTES) -> int:
    """A detached overlay over `lowers`, topmost first; what is written to it is below `own`, which is made."""
    for folder in ("", "/upper", "/work"):
        _make(ground.rung, own + folder)
    uppers = [("upperdir", f"{own}/upper"), ("workdir", f"{own}/work")]
    options = [*stack.lower_options(lowers), *uppers, *ground.rung.overlay_pairs]
    return sc.mount_detached("overlay", [("source", "verifier"), *options], attributes)


def discard_verifiers(ground: Ground, name: str) -> None:
    """Throw away what the verifiers before wrote."""
    for entry in os.listdir(f"episodes/{name}"):
        if entry.partition(".")[0] in _OF_VERIFIERS and os.listdir(f"episodes/{name}/{entry}"):
            throw_away(ground, name, f"episodes/{name}/{entry}")


def throw_away(ground: Ground, name: str, path: str) -> None:
    """Put a part of worktree `name` out of the way: into the trash, which is on another file system than memory."""
    if ground.in_memory:
        delete(path)
    else:
        os.rename(path, f"trash/{name}.{os.urandom(4).hex()}")


def discard(ground: Ground, name: str) -> None:
    """Rename a worktree away, which takes no time whatever its size; the server deletes the trash."""
    with contextlib.suppress(FileNotFoundError):
        if ground.in_memory:
            with contextlib.suppress(OSError):  # it may not have been mounted yet
                sc.umount(f"episodes/{name}")
        os.rename(f"episodes/{name}", f"trash/{name}")


def held_bytes(ground: str, entries_max: int) -> int:
    """Bytes that all worktrees of a scratch folder hold, trash included; counts at most `entries_max` files."""
    total = 0
    for kind in ("episodes", "trash"):
        for parent, _, files in os.walk(f"{ground}/{kind}"):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            entries_max -= len(files)
            if entries_max < 0:
                return total
    return total
