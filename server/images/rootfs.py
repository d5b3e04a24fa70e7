"""A root file system that is a folder, as a stored layer."""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tbench2_env.server.images.content import is_whiteout
from tbench2_env.server.images.kind import Kind
from tbench2_env.server.threads import Stop

_FORBIDDEN = (errno.EACCES, errno.EPERM)


def fingerprint(folder: Path, stop: Stop) -> str:
    """A digest ("sha256:" and hex) that changes with names, types, modes, owners, sizes or mtimes below `folder`.

    Raises: Stopped; OSError, where `folder` itself cannot be read.
    """
    hashed = hashlib.sha256()
    for path, info in _walk(folder, stop):
        fields = (info.st_mode, info.st_uid, info.st_gid, info.st_rdev, info.st_mtime_ns)
        size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
        hashed.update(os.fsencode(path.relative_to(folder)) + f"\0{fields} {size}\0".encode())
    return f"sha256:{hashed.hexdigest()}"


def copy_rootfs(source: Path, target: Path, kind: Kind, stop: Stop) -> dict[str, int]:
    """Copy the folder `source` to `target`, which is made, with owners, modes, times, capabilities and hard links.

    The ids of `source` itself stand for root's: who unpacked an image without privilege owns all of it. Folders that
    something is mounted on are empty in the copy. Answers with what was left out, how many of each: what may not be
    read, devices where they may not be made, sockets.

    Raises: Stopped; OSError, where the node fails.
    """
    copier = _Copier(source, target, kind)
    for path, info in _walk(source, stop):
        copier.copy(path, info)
    copier.finish()
    return dict(copier.left_out)


def _walk(folder: Path, stop: Stop) -> Iterator[tuple[Path, os.stat_result]]:
    """`folder` and all below of its file system, a folder before what is in it, in the order of names."""
    device = folder.stat().st_dev
    pending = [(folder, folder.stat())]
    while pending:
        stop.check()
        path, info = pending.pop()
        yield path, info
        if not stat.S_ISDIR(info.st_mode) or info.st_dev != device:
            continue
        try:
            with os.scandir(path) as entries:
                found = sorted(entries, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            if error.errno not in _FORBIDDEN or path == folder:
                raise
            continue
        pending += [(path / entry.name, entry.stat(follow_symlinks=False)) for entry in found]


@dataclass
class _Copier:
    source: Path
    target: Path
    kind: Kind
    left_out: Counter[str] = field(default_factory=Counter)
    _first: dict[tuple[int, int], Path] = field(default_factory=dict)
    _folders: list[tuple[Path, os.stat_result]] = field(default_factory=list)

    def __post_init__(self) -> None:
        top = self.source.stat()
        self._root_ids = (top.st_uid, top.st_gid)

    def copy(self, path: Path, info: os.stat_result) -> None:
        target = self.target / path.relative_to(self.source)
        first = self._first.get((info.st_dev, info.st_ino))
        if first is not None:
            os.link(first, target, follow_symlinks=False)
        elif self._make(path, info, target):
            self._mark(path, info, target)
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                self._first[info.st_dev, info.st_ino] = target

    def finish(self) -> None:
        """Last, since what is written into a folder moves its time."""
        for target, info in reversed(self._folders):
            target.chmod(stat.S_IMODE(info.st_mode))
            os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))

    def _make(self, path: Path, info: os.stat_result, target: Path) -> bool:
        """Whether it could be made."""
        kind = stat.S_IFMT(info.st_mode)
        try:
            if kind == stat.S_IFDIR:
                target.mkdir(mode=0o700)
            elif kind == stat.S_IFLNK:
                target.symlink_to(os.readlink(path))  # noqa: PTH115 - Path would drop its "./"
            elif kind == stat.S_IFREG:
                _copy_bytes(path, target)
            elif kind == stat.S_IFIFO:
                os.mkfifo(target)
            elif kind in (stat.S_IFCHR, stat.S_IFBLK) and not is_whiteout(info):
                os.mknod(target, info.st_mode, info.st_rdev)
            else:
                return self._leave_out("sockets and whiteouts")
        except PermissionError:
            return self._leave_out("unreadable" if kind == stat.S_IFREG else "devices")
        return True

    def _leave_out(self, what: str) -> bool:
        self.left_out[what] += 1
        return False

    def _mark(self, path: Path, info: os.stat_result, target: Path) -> None:
        uid, gid = (id_ - root for id_, root in zip((info.st_uid, info.st_gid), self._root_ids, strict=True))
        self.kind.owner.give(target, uid, gid)  # before chmod and capabilities, which chown(2) takes away
        if stat.S_ISDIR(info.st_mode):
            self._folders.append((target, info))
            if not os.access(path, os.R_OK | os.X_OK):
                self._leave_out("unreadable")
        elif not stat.S_ISLNK(info.st_mode):
            target.chmod(stat.S_IMODE(info.st_mode))
        if stat.S_ISREG(info.st_mode):
            self._copy_attributes(path, target)
        if not stat.S_ISDIR(info.st_mode):
            os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns), follow_symlinks=False)

    def _copy_attributes(self, path: Path, target: Path) -> None:
        """File capabilities and user.*: what images have."""
        for name in os.listxattr(path):
            if name == "security.capability" or name.startswith("user."):
                try:
                    os.setxattr(target, name, os.getxattr(path, name))
                except OSError as error:
                    if error.errno not in (*_FORBIDDEN, errno.ENOTSUP):
                        raise
                    self._leave_out("attributes")


def _copy_bytes(path: Path, target: Path) -> None:
    """Raises: PermissionError, with nothing left, where `path` may not be read."""
    try:
        shutil.copyfile(path, target, follow_symlinks=False)
    except PermissionError:
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        raise
