"""Harvesting: making a stored layer of what an episode left in its upper. Runs in a fork of the spawner, which may do
all that an episode's root may, once nothing is left running in it.

Kept are owners, modes, times, hard links, extended attributes, holes, device nodes, whiteouts and opaque folders. Lost
are sockets, of no use without their server, and what overlayfs notes for itself in an upper.
"""

import errno
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from tbench2_env.isolation import mask, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.reactor import End
from tbench2_env.isolation.spec import Rung

_REASON_MAX = 4000
_CHUNK = 1 << 30


@dataclass(frozen=True)
class Harvester:
    """A process that makes a stored layer of worktree `name`; `reason` is the read end of a pipe."""

    request: int
    name: str
    reason: int

    def why(self, end: End) -> str | None:
        """Once it has ended, why it failed; None if it did not."""
        with open(self.reason, encoding="utf-8", errors="replace") as pipe:
            reason = pipe.read() or f"its process ended with status {end.status}"
        return None if end.status == 0 else f"cannot keep what the sandbox made: {reason}"


class Harvesters:
    """Those of the spawner that are at work, by process id."""

    def __init__(self, rung: Rung) -> None:
        self._rung = rung
        self._working: dict[int, Harvester] = {}

    def start(self, name: str, target: str, request: int) -> None:
        """Raises: OSError."""
        pid, reason = _start(f"episodes/{name}", target, self._rung)
        self._working[pid] = Harvester(request, name, reason)

    def kill(self, name: str | None = None) -> None:
        """End at once what is done with worktree `name`; without a name, all."""
        for pid, harvester in self._working.items():
            if name is None or harvester.name == name:
                os.kill(pid, signal.SIGKILL)

    def pop(self, pid: int) -> Harvester | None:
        """None: that process was none."""
        return self._working.pop(pid, None)

    def __len__(self) -> int:
        return len(self._working)


def _start(folder: str, target: str, rung: Rung) -> tuple[int, int]:
    """Fork a process that makes `target`; answers with its id and the read end of a pipe that has the reason if it
    fails. `folder` is that of the worktree."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _work(write_end, folder, target, rung)
    os.close(write_end)
    return pid, read_end


def _work(answer: int, folder: str, target: str, rung: Rung) -> NoReturn:
    status = 1
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        # The server must be able to tell that the spawner has ended.
        os.closerange(3, answer)
        os.closerange(answer + 1, os.sysconf("SC_OPEN_MAX"))
        make_layer(folder, target, rung)
        status = 0
    except BaseException as error:
        os.write(answer, f"{error}".encode(errors="replace")[:_REASON_MAX])
    finally:
        # Whatever happened: a fork must never go on as a second spawner.
        os._exit(status)


def make_layer(folder: str, target: str, rung: Rung) -> None:
    """Make the absent `target` of the upper in `folder`. Raises: OSError; FileExistsError when it is there."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    upper = f"{folder}/upper"
    _join(folder, upper)
    os.chmod(upper, 0o755)
    mask.own(rung, upper)
    for path, info in _walk(upper):
        _clean(path, info, f"{rung.xattr_prefix}.overlay.")
    try:
        os.rename(upper, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_all(upper, target, rung)


def _join(folder: str, upper: str) -> None:
    """Put the uppers of top-level folders that had an overlay each where they belong; an empty one is no change."""
    for own in (name for name in os.listdir(folder) if name.startswith("upper.")):
        place = f"{upper}/{own.removeprefix('upper.')}"
        if os.listdir(f"{folder}/{own}"):
            if os.path.lexists(place):
                os.rmdir(place)  # what was mounted over can only be empty
            os.rename(f"{folder}/{own}", place)


def _walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """All of a tree, each folder before what is in it. Not by recursion: nobody knows how deep it is."""
    yield root, os.lstat(root)
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            info = entry.stat(follow_symlinks=False)
            yield entry.path, info
            if stat.S_ISDIR(info.st_mode):
                folders.append(entry.path)


def _clean(path: str, info: os.stat_result, prefix: str) -> None:
    """Remove what is of no use in a lower layer: sockets, and notes of overlayfs about the layers that were below."""
    if stat.S_ISSOCK(info.st_mode):
        parent = os.path.dirname(path)
        times = os.lstat(parent)
        os.unlink(path)
        os.utime(parent, ns=(times.st_atime_ns, times.st_mtime_ns))
        return
    for name in os.listxattr(path, follow_symlinks=False):
        note = name.removeprefix(prefix)
        # `overlay.overlay.x` is an attribute `overlay.x` of the episode's own: of an overlay in it.
        if note == name or note.startswith("overlay."):
            continue
        if note in ("redirect", "metacopy"):
            raise OSError(f"{path} has no content of its own ({name}): only what was made `building` can be a layer")
        if note != "opaque":
            os.removexattr(path, name, follow_symlinks=False)


# ---------------------------------------------------------------- to another file system
def _copy_all(source: str, target: str, rung: Rung) -> None:
    linked: dict[tuple[int, int], str] = {}
    folders = []
    try:
        for path, info in _walk(source):
            copied = target + path[len(source) :]
            inode = (info.st_dev, info.st_ino)
            if inode in linked:
                os.link(linked[inode], copied, follow_symlinks=False)
                continue
            _copy(path, info, copied)
            if stat.S_ISDIR(info.st_mode):
                folders.append((path, info, copied))
                continue
            _copy_attributes(path, info, copied, rung)
            if info.st_nlink > 1:
                linked[inode] = copied
        # What is made in a folder changes its times, and its mode may forbid it.
        for path, info, copied in reversed(folders):
            _copy_attributes(path, info, copied, rung)
    except BaseException:
        worktree.delete(target)
        raise


def _copy(source: str, info: os.stat_result, target: str) -> None:
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(target, 0o700)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(info.st_mode):
        _copy_data(source, target, info.st_size)
    else:
        _make_node(target, info)


def _make_node(target: str, info: os.stat_result) -> None:
    try:
        os.mknod(target, info.st_mode, info.st_rdev)
    except PermissionError as error:
        if info.st_rdev:
            raise
        advice = "this file system allows no whiteouts (overlayfs is such a one): let TB2_CACHE_DIR be on another"
        raise OSError(error.errno, advice, target) from None


def _copy_data(source: str, target: str, size: int) -> None:
    """What is not a hole."""
    old = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(new, size)
        end = 0
        while (start := _next_data(old, end, size)) < size:
            end = os.lseek(old, start, os.SEEK_HOLE)
            os.lseek(new, start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(new, old, start, min(end - start, _CHUNK))
    finally:
        os.close(old)
        os.close(new)


def _next_data(fd: int, position: int, size: int) -> int:
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size


def _copy_attributes(source: str, info: os.stat_result, target: str, rung: Rung) -> None:
    """In this order: a change of owner takes the setuid bit and capabilities."""
    if rung.has_id_range:
        os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        value = os.getxattr(source, name, follow_symlinks=False)
        os.setxattr(target, name, value, follow_symlinks=False)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
