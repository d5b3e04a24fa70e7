"""Locks that processes of one node share: flock(2) on files that anybody may open, released when their holder dies."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def try_lock(path: Path, kind: int, create: bool = False) -> int | None:
    """A descriptor that holds the lock `kind` (LOCK_SH or LOCK_EX) of the file `path`, or None: another holds it.

    Raises:
        FileNotFoundError: there is no such file, or no longer, and none was to be created.
        OSError: also where the file system has no locks, which then says what to do.
    """
    while True:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        fd = os.open(path, flags, 0o600)
        try:
            if not _lock(fd, kind, path):
                os.close(fd)
                return None
            if is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed by whoever had locked it


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is what has the name `path` now."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False


def _lock(fd: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EBADF and kind == fcntl.LOCK_EX:  # NFS gives it only to who can write: flock(2)
            return False
        if error.errno in _UNSUPPORTED:
            advice = "its file system has no flock: let TB2_CACHE_DIR be on a local disk"
            raise OSError(error.errno, f"{os.strerror(error.errno)}; {advice}", str(path)) from None
        raise
    return True
