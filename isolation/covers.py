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

from tbench2_env.isolation import mask, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Cover, Rung
from tbench2_env.isolation.worktree import Ground

#: Larger files are not restored: no program that a verifier runs is that large.
_RESTORED_MAX_BYTES = 64 << 20
#: What a path is in one layer: a folder, one through which nothing below shines, anything that hides what is below.
_NONE, _FOLDER, _OPAQUE, _OTHER = "none", "folder", "opaque", "other"


#: What stands in the place of a file that is blanked.
_EMPTY = "shared/empty"


class CannotCover(OSError):
    """A folder cannot be covered as it is now, because the agent made something else of it."""


def make(ground: Ground, name: str, layers: tuple[str, ...], cover: Cover) -> list[tuple[int, str]]:
    """Detached mounts for `cover` on worktree `name` and where they belong. Raises: CannotCover, OSError."""
    made = [(_make(ground, name, layers, cover), cover.folder)] if cover.hidden or cover.restored else []
    return [*made, *((_empty_file(), f"{cover.folder.rstrip('/')}/{entry}") for entry in cover.blank)]


def _make(ground: Ground, name: str, layers: tuple[str, ...], cover: Cover) -> int:
    pristine = _merged(ground, cover.folder, _pristine_roots(layers))
    present = _merged(ground, cover.folder, [f"episodes/{name}/upper", *_pristine_roots(layers)])
    if not present:
        raise CannotCover(errno.ENOTDIR, f"{cover.folder} is no folder that can be covered")
    own = f"episodes/{name}/cover.{len(os.listdir(f'episodes/{name}'))}"
    for part in ("", "/top", "/upper", "/work"):
        os.mkdir(own + part, 0o755)
        mask.own(ground.rung, own + part)
    for entry in cover.hidden:
        os.mknod(f"{own}/top/{entry}", stat.S_IFCHR, os.makedev(0, 0))
    for entry in cover.restored:
        _restore(ground.rung, pristine, entry, f"{own}/top")
    options: list[tuple[str, str | None]] = [("source", "cover")]
    options += [("lowerdir+", path) for path in (f"{own}/top", *present)]
    options += [("upperdir", f"{own}/upper"), ("workdir", f"{own}/work")]
    options += ground.rung.overlay_pairs
    return sc.mount_detached("overlay", options, sc.MOUNT_ATTR_NODEV)


def _empty_file() -> int:
    """Read-only: it is the same for all."""
    empty = sc.open_tree(_EMPTY)
    sc.mount_setattr(empty, sc.MOUNT_ATTR_RDONLY)
    return empty


def discard_old(ground: Ground, name: str) -> None:
    """Those of the verifiers before."""
    for entry in os.listdir(f"episodes/{name}"):
        if entry.startswith("cover."):
            worktree.throw_away(ground, name, f"episodes/{name}/{entry}")


def _pristine_roots(layers: tuple[str, ...]) -> list[str]:
    """Roots of the layers below the agent's, topmost first."""
    return [*(f"shared/layers/{layer}/root" for layer in layers), "shared/mask", "base"]


def _merged(ground: Ground, folder: str, roots: list[str]) -> list[str]:
    """The folders that `folder` of the episode is merged from, topmost first."""
    found = []
    for root in roots:
        path, ends = "", False
        for part in folder.strip("/").split("/"):
            path = f"{path}/{part}"
            kind = _kind(_in_layer(ground, root, path), ground.rung)
            ends = ends or kind in (_OPAQUE, _OTHER)
            if kind in (_NONE, _OTHER):
                break
        else:
            found.append(_in_layer(ground, root, path))
        if ends:
            break
    return found


def _in_layer(ground: Ground, root: str, path: str) -> str:
    """Where a layer has the episode's `path`: an upper of its own for each top-level folder that has an overlay."""
    top, _, below = path.strip("/").partition("/")
    if root.endswith("/upper") and top in ground.own_folders:
        return f"{root}.{top}/{below}".rstrip("/")
    return root + path


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
