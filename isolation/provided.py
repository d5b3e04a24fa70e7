"""Folders of the host that a verifier alone sees, read-only or with an upper of its own, at places of the episode.

`/logs/toolchain` is pinned, so agents can neither remove nor fake it. Any other place is in the agent's reach: its
links are not followed, and where it removes a place while the verifier runs, what is mounted there is gone.
"""

import os

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import worktree
from tbench2_env.isolation.program import SPARE_FD, Program
from tbench2_env.isolation.spec import Provided, Rung
from tbench2_env.isolation.stack import Ground

_ATTRIBUTES = sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
_AT_SYMLINK_NOFOLLOW = 0x100  # linux/fcntl.h
_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def detach(ground: Ground, provided: Provided, own: str) -> int:
    """A detached mount of the host's folder. What may be written to it is below the folder `own`. Raises: OSError."""
    if provided.writable:
        return worktree.private_overlay(ground, own, [provided.folder])
    folder = sc.open_tree(provided.folder)
    sc.mount_setattr(folder, _ATTRIBUTES)
    return folder


def attach(program: Program, rung: Rung, mount_fd: int, place: str) -> None:
    """Mount at `place`, which is made if it is missing, in a mount namespace of the verifier's own.

    It fails when something else than folders is in the way.
    """
    here, path = SPARE_FD, ""
    program.keep(here, program.call("openat", sc.AT_FDCWD, program.text(b"/"), _OPEN))
    for part in place.strip("/").split("/"):
        path, name = f"{path}/{part}", program.text(part.encode())
        what = f"a verifier's {place} cannot be made: {path}"
        # Never what a link leads to; what is no folder is in the way.
        there = program.call("openat", here, name, _OPEN, optional=True)
        there.error = program.here()
        program.call("mkdirat", here, name, 0o755, what=what)
        if rung.has_id_range:
            owner = rung.owner_shift
            program.call("fchownat", here, name, owner, owner, _AT_SYMLINK_NOFOLLOW, what=what)
        there.then = program.here()
        program.keep(here, program.call("openat", here, name, _OPEN, what=what))
    flags = sc.MOVE_MOUNT_F_EMPTY_PATH | sc.MOVE_MOUNT_T_EMPTY_PATH
    empty = program.text(b"")
    program.call("move_mount", mount_fd, empty, here, empty, flags, what=f"mount {place}")
