"""Covers: folders in which a verifier sees something else than what the agent left there.

A cover is one more overlay, mounted on the folder in the verifier's own mount namespace: over the same layers as the
episode's worktree, with what is hidden or restored on top, and an upper of its own, so that a harness can install its
tools there as ever and neither the agent nor the next verifier sees it.

The layers are looked at from outside, by their own rules (overlayfs.rst, "whiteouts and opaque directories"): a folder
is merged from the layers that have it, down to the first in which it, or one above it, is opaque or something else.
"""

import errno
import os
import shutil
import stat

from tbench2_env.isolation import mask, stack, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Cover, Rung, SandboxSpec
from tbench2_env.isolation.stack import Ground

#: Larger files are not restored: no program that a verifier runs is that large.
_RESTORED_MAX_BYTES = 64 << 20
#: What a path is in one layer: a folder, one through which nothing below shines, anything that hides what is below.
_NONE, _FOLDER, _OPAQUE, _OTHER = "none", "folder", "opaque", "other"


#: A layer's root, and a folder below it.
_Place = tuple[str, str]
#: What stands in the place of a file that is blanked.
_EMPTY = "shared/empty"


class CannotCover(OSError):
    """A folder cannot be covered as it is now, because the agent made something else of it."""


def make(ground: Ground, spec: SandboxSpec, cover: Cover) -> list[tuple[int, str]]:
    """Detached mounts for `cover` on a worktree and where they belong. Raises: CannotCover, OSError."""
    made = [(_make(ground, spec, cover), cover.folder)] if cover.hidden or cover.restored else []
    return [*made, *((_empty_file(), f"{cover.folder.rstrip('/')}/{entry}") for entry in cover.blank)]


def _make(ground: Ground, spec: SandboxSpec, cover: Cover) -> int:
    name = spec.name
    upper, below = _places(ground, spec, cover.folder)
    pristine, present = _merged(ground.rung, below), _merged(ground.rung, [upper, *below])
    if not present:
        raise CannotCover(errno.ENOTDIR, f"{cover.folder} is no folder that can be covered")
    own = f"episodes/{name}/cover.{len(os.listdir(f'episodes/{name}'))}"
    for part in ("", "/top"):
        os.mkdir(own + part, 0o755)
        mask.own(ground.rung, own + part)
    for entry in cover.hidden:
        os.mknod(f"{own}/top/{entry}", stat.S_IFCHR, os.makedev(0, 0))
    for entry in cover.restored:
        _restore(ground.rung, pristine, entry, f"{own}/top")
    return worktree.private_overlay(ground, own, [f"{own}/top", *present], sc.MOUNT_ATTR_NODEV)


def _places(ground: Ground, spec: SandboxSpec, folder: str) -> tuple[_Place, list[_Place]]:
    """Where the upper has a folder of the episode, and where the layers below have it, topmost first."""
    top, _, rest = folder.strip("/").partition("/")
    upper = f"episodes/{spec.name}/upper"
    own = top in stack.own_folders(ground, spec)
    return (f"{upper}.{top}", rest) if own else (upper, folder), [
        (root, folder) for root in stack.lowers_of(ground, spec, top)
    ]


def _empty_file() -> int:
    """Read-only: it is the same for all."""
    empty = sc.open_tree(_EMPTY)
    sc.mount_setattr(empty, sc.MOUNT_ATTR_RDONLY)
    return empty


def _merged(rung: Rung, places: list[_Place]) -> list[str]:
    """The folders that a folder of the episode is merged from, topmost first."""
    found = []
    for root, folder in places:
        path, ends = root, False
        for part in folder.strip("/").split("/"):
            path = f"{path}/{part}"
            kind = _kind(path, rung)
            ends = ends or kind in (_OPAQUE, _OTHER)
            if kind in (_NONE, _OTHER):
                break
        else:
            found.append(path.rstrip("/"))
        if ends:
            break
    return found


def _kind(path: str, rung: Rung) -> str:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return _NONE
    if not stat.S_ISDIR(mode) or _attribute(path, rung, "redirect"):
        return _OTHER
    return _OPAQUE if _attribute(path, rung, "opaque") == b"y" else _FOLDER


def _attribute(path: str, rung: Rung, name: str) -> bytes:
    try:
        return os.getxattr(path, f"{rung.xattr_prefix}.overlay.{name}", follow_symlinks=False)
    except OSError:
        return b""


def _restore(rung: Rung, pristine: list[str], entry: str, target: str) -> None:
    """Lay the pristine `entry`, a file or a link, over what the agent made of it; there may be none any more."""
    for folder in pristine:
        source = f"{folder}/{entry}"
        if not os.path.lexists(source):
            continue
        info = os.lstat(source)
        if stat.S_ISCHR(info.st_mode):
            return
        if stat.S_ISLNK(info.st_mode) or (stat.S_ISREG(info.st_mode) and info.st_size <= _RESTORED_MAX_BYTES):
            shutil.copy2(source, f"{target}/{entry}", follow_symlinks=False)
            _own_like(rung, f"{target}/{entry}", info)
        return


def _own_like(rung: Rung, path: str, info: os.stat_result) -> None:
    if rung.has_id_range:
        os.chown(path, info.st_uid, info.st_gid, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            os.chmod(path, stat.S_IMODE(info.st_mode))  # chown takes the setuid bit
