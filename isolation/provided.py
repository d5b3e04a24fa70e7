"""Folders of the host that a verifier alone sees, read-only or with an upper of its own, at places of the episode.

`/logs/toolchain` is pinned, so agents can neither remove nor fake it. Any other place is in the agent's reach: its
links are not followed, and where it removes a place while the verifier runs, what is mounted there is gone.
"""

import errno
import os

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import worktree
from tbench2_env.isolation.spec import Provided, Rung
from tbench2_env.isolation.stack import Ground

_ATTRIBUTES = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def detach(ground: Ground, provided: Provided, own: str) -> int:
    """A detached mount of the host's folder. What may be written to it is below the folder `own`. Raises: OSError."""
    if provided.writable:
        return worktree.private_overlay(ground, own, [provided.folder])
    folder = sc.open_tree(provided.folder)
    sc.mount_setattr(folder, _ATTRIBUTES)
    return folder


def attach(rung: Rung, mount_fd: int, place: str) -> None:
    """Mount at `place`, which is made if it is missing, in a mount namespace of the verifier's own.

    Raises: OSError when something else than folders is in the way.
    """
    folder, path = os.open("/", _OPEN), ""
    for name in place.strip("/").split("/"):
        path = f"{path}/{name}"
        try:
            inner = _enter(rung, folder, name)
        except OSError as error:
            raise OSError(error.errno, f"a verifier's {place} cannot be made: {path}: {_explain(error)}") from None
        finally:
            os.close(folder)
        folder = inner
    sc.move_mount_onto(mount_fd, folder, place)
    os.close(folder)


def _explain(error: OSError) -> str:
    return "not a folder" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror or str(error)


def _enter(rung: Rung, folder: int, name: str) -> int:
    """The folder `name`, made if it is missing; never what a link leads to."""
    try:
        return os.open(name, _OPEN, dir_fd=folder)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=folder)
        if rung.has_id_range:
            os.chown(name, rung.owner_shift, rung.owner_shift, dir_fd=folder, follow_symlinks=False)
        return os.open(name, _OPEN, dir_fd=folder)
