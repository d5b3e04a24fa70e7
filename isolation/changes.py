"""What an episode changed: the upper of its overlay, compared with what lies below it.

    with Worktree(spawner.ground, sandbox.spec, spawner.rung) as worktree:
        for change in worktree.walk(worktree.root, Budget(100_000)): ...

An overlay's upper holds exactly what was touched (Documentation/filesystems/overlayfs.rst): new and copied-up entries,
whiteouts (character devices 0:0; the kernel makes no other kind) where something was deleted, opaque folders, which
hide what is below, folders with a redirect to where they were, and files without data of their own (metacopy). What
was copied up and is still the same is no change.

The agent may change all of it while we look: folders are opened one component at a time or beneath the upper, links
are never followed, and files are read only if they are regular. On rungs 4 and 5 the server is not root of the
episode's user namespace, so that folders whose mode forbids it are `UNREADABLE`. The attributes of the worktree's root,
extended attributes of files, and changed times are not looked at.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from tbench2_env.isolation import stack
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Rung, SandboxSpec

#: Longer paths are not walked: nobody could ask for them (PATH_MAX). Every folder above stays open meanwhile.
_PATH_MAX, _DEPTH_MAX = 4095, 200
#: Files of equal size are compared byte by byte up to this size; beyond it, those of equal time are taken as equal.
_COMPARED_MAX_BYTES = 1 << 20
#: The same for who must not be fooled by a time set back; beyond it they count as modified.
_THOROUGH_MAX_BYTES = 64 << 20
_CHUNK = 1 << 18
Wanted = Callable[["os.DirEntry[str]"], bool]
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Kind(StrEnum):
    """What was done to an entry."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"
    #: Only the mode or the owner is another.
    METADATA = "metadata"
    #: A new folder where there was another one, or something else.
    REPLACED = "replaced"
    #: A folder with all that was in it is here now; `origin` is where it was.
    RENAMED = "renamed"
    #: The server may not look into this folder, or its path is too long.
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Change:
    """`path` is absolute, as the episode sees it, decoded as `os.fsdecode` does. `now` is None for what is gone."""

    path: str
    kind: Kind
    now: os.stat_result | None
    before: os.stat_result | None = None
    origin: str = ""


class Budget:
    """How many entries may still be looked at."""

    def __init__(self, entries_max: int) -> None:
        self._left = entries_max

    def take(self) -> bool:
        self._left -= 1
        return self._left >= 0

    @property
    def exceeded(self) -> bool:
        return self._left < 0


@dataclass(frozen=True)
class _Below:
    """An entry of the merged layers below the upper: of a folder, every path that is merged; else just one."""

    info: os.stat_result
    paths: tuple[str, ...]


@dataclass(eq=False)
class Folder:
    """A folder of the upper, kept open. `path` is empty for the root.

    `below` are the folders of the layers that it is compared with; they show through unless it is `alone`. `moved` is
    the rename of it or of a folder above, if there was one.
    """

    fd: int
    path: str
    below: tuple[str, ...]
    alone: bool = False
    moved: Change | None = None

    def __del__(self) -> None:
        os.close(self.fd)


class Worktree:
    """The changes of one live episode. A context manager: it keeps folders open.

    `thorough`: compare the bytes of files whatever their times say.
    """

    def __init__(self, ground: Path, spec: SandboxSpec, rung: Rung, *, thorough: bool = False) -> None:
        """Raises: FileNotFoundError when the episode is over."""
        self._xattr = f"{rung.xattr_prefix}.overlay."
        self._compares_owners, self._thorough = rung.has_id_range, thorough
        self._folder = str(ground / "episodes" / spec.name)
        self._layers = tuple(str(ground / root) for root in stack.lowers(spec))
        # Where the root is made folder by folder, it is the same with the folders that have an upper of their own.
        own = [name.partition(".")[2] for name in os.listdir(self._folder) if name.startswith("upper.")]
        self.root = self._open_upper("upper", "", self._layers[:-1] if own else self._layers)
        self._own = {
            name: self._open_upper(f"upper.{name}", f"/{name}", tuple(f"{layer}/{name}" for layer in self._layers))
            for name in own
        }

    def _open_upper(self, name: str, path: str, below: tuple[str, ...]) -> Folder:
        fd = os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return Folder(fd, path, tuple(layer for layer in below if os.path.isdir(layer)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self.root, self._own

    # ------------------------------------------------------------ one entry
    def look(self, folder: Folder, name: str) -> Change | None:
        """What was done to the entry `name` itself, whatever is in it; None if nothing was."""
        now, path = _lstat(name, folder.fd), f"{folder.path}/{name}"
        if not folder.path and name in self._own:
            return None
        if now is None and not folder.alone:  # most of what is asked for was not touched: the layers below need no look
            return None
        before = self._below(folder.below, name)
        if now is None or _is_whiteout(now):
            return None if before is None else Change(path, Kind.DELETED, None, before.info)
        if stat.S_ISDIR(now.st_mode):
            return self._look_at_folder(folder, name, now, before)
        if before is None:
            return Change(path, Kind.ADDED, now)
        same_type = stat.S_IFMT(before.info.st_mode) == stat.S_IFMT(now.st_mode)
        if not same_type or not self._is_same_content(folder, name, now, before):
            return Change(path, Kind.MODIFIED, now, before.info)
        return None if self._is_same_metadata(now, before.info) else Change(path, Kind.METADATA, now, before.info)

    def _look_at_folder(self, folder: Folder, name: str, now: os.stat_result, before: _Below | None) -> Change | None:
        path, info = f"{folder.path}/{name}", before.info if before is not None else None
        if redirect := self._get(folder, name, "redirect"):
            return Change(path, Kind.RENAMED, now, info, self._origin(folder, redirect))
        if info is None:
            return Change(path, Kind.ADDED, now)
        if not stat.S_ISDIR(info.st_mode) or self._get(folder, name, "opaque") == "y":
            return Change(path, Kind.REPLACED, now, info)
        return None if self._is_same_metadata(now, info) else Change(path, Kind.METADATA, now, info)

    def _is_same_metadata(self, now: os.stat_result, before: os.stat_result) -> bool:
        same_owner = (now.st_uid, now.st_gid) == (before.st_uid, before.st_gid)
        same_mode = stat.S_ISLNK(now.st_mode) or now.st_mode == before.st_mode
        return same_mode and (same_owner or not self._compares_owners)

    def _is_same_content(self, folder: Folder, name: str, now: os.stat_result, before: _Below) -> bool:
        if stat.S_ISLNK(now.st_mode):
            return _readlink(name, folder.fd) == _readlink(before.paths[0])
        if not stat.S_ISREG(now.st_mode):
            return now.st_rdev == before.info.st_rdev
        if now.st_size != before.info.st_size:
            return False
        if self._data_below(folder, name) == before.paths[0]:
            return True
        if now.st_size > (_THOROUGH_MAX_BYTES if self._thorough else _COMPARED_MAX_BYTES):
            return not self._thorough and now.st_mtime_ns == before.info.st_mtime_ns
        try:
            return _are_equal(self.open_file(folder, name), os.open(before.paths[0], _OPEN_FILE))
        except OSError:  # it is being replaced, or nobody may read it: not the same then
            return False

    def open_file(self, folder: Folder, name: str) -> int:
        """A descriptor of the content of a regular file of the upper. Raises: OSError; EINVAL if it is none."""
        below = self._data_below(folder, name)
        fd = os.open(name, _OPEN_FILE, dir_fd=folder.fd) if below is None else os.open(below, _OPEN_FILE)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, f"{name} is not a regular file")
        return fd

    def _data_below(self, folder: Folder, name: str) -> str | None:
        """Where the data of a file is that has none of its own in the upper."""
        if self._get(folder, name, "metacopy") is None:
            return None
        redirect = self._get(folder, name, "redirect")
        below = self._below(folder.below, name) if redirect is None else self._redirected(folder, redirect)
        return below.paths[0] if below is not None else None

    def _get(self, folder: Folder, name: str, attribute: str) -> str | None:
        try:
            path = f"/proc/self/fd/{folder.fd}/{name}"
            return os.fsdecode(os.getxattr(path, self._xattr + attribute, follow_symlinks=False))
        except OSError:
            return None

    # ------------------------------------------------------------ the layers below
    def _below(self, layers: Sequence[str], name: str) -> _Below | None:
        """An entry of merged folders. Other than the upper, what is below the mask and the layers does not change."""
        info, paths = None, []
        for depth, layer in enumerate(layers, 1):
            path = f"{layer}/{name}"
            found = _lstat(path)
            if found is None:
                continue
            if not stat.S_ISDIR(found.st_mode):
                if info is None and not _is_whiteout(found):
                    return _Below(found, (path,))
                break
            info = info or found
            paths.append(path)
            if depth < len(layers) and self._is_opaque(path):
                break
        return None if info is None else _Below(info, tuple(paths))

    def _is_opaque(self, path: str) -> bool:
        try:
            return os.getxattr(path, self._xattr + "opaque", follow_symlinks=False) == b"y"
        except OSError:
            return False

    def _redirected(self, folder: Folder, redirect: str) -> _Below | None:
        """What a redirect leads to: a name in the same folder, or a path from the root."""
        layers: Sequence[str] = self.root.below if redirect.startswith("/") else folder.below
        *parents, last = redirect.strip("/").split("/")
        for name in parents:
            found = self._below(layers, name)
            layers = found.paths if found is not None else ()
        return self._below(layers, last)

    def _origin(self, folder: Folder, redirect: str) -> str:
        return redirect if redirect.startswith("/") else f"{folder.path}/{redirect}"

    # ------------------------------------------------------------ folders
    def enter(self, folder: Folder, name: str) -> Folder | None:
        """The folder `name` of the upper; None if there is none. Raises: OSError when it may not be read."""
        if not folder.path and name in self._own:
            return self._own[name]
        info = _lstat(name, folder.fd)
        if info is None or not stat.S_ISDIR(info.st_mode):
            return None
        path = f"{folder.path}/{name}"
        if len(os.fsencode(path)) > _PATH_MAX or path.count("/") > _DEPTH_MAX:
            raise OSError(errno.ENAMETOOLONG, "the path is too long")
        inner = Folder(sc.open_folder_beneath(folder.fd, os.fsencode(name)), path, (), folder.alone, folder.moved)
        before = self._below(folder.below, name)
        if redirect := self._get(folder, name, "redirect"):
            inner.moved = self.look(folder, name)
            before = self._redirected(folder, redirect)
        if before is not None and stat.S_ISDIR(before.info.st_mode):
            inner.below = before.paths
            inner.alone = folder.alone or self._get(folder, name, "opaque") == "y"
        return inner

    def find(self, path: str) -> Folder | Change | None:
        """The folder at an absolute path, if the upper has it; or what was done to it, or to a folder above it.

        None: it is as it was, and so is all in it.
        """
        folder = self.root
        for name in path.strip("/").split("/"):
            try:
                inner = self.enter(folder, name)
            except OSError:
                return Change(f"{folder.path}/{name}", Kind.UNREADABLE, None)
            if inner is None:
                return self.look(folder, name)
            folder = inner
        return folder

    # ------------------------------------------------------------ by path, and what was there before
    def below(self, path: str) -> os.stat_result | None:
        """What the episode was given at an absolute path, of which no component is a link."""
        found = self._find_below(path)
        return found.info if found is not None else None

    def read_below(self, path: str, max_bytes: int) -> bytes:
        """The content of the file that the episode was given there, empty if there was none. Raises: OSError."""
        found = self._find_below(path)
        if found is None or not stat.S_ISREG(found.info.st_mode):
            return b""
        with open(os.open(found.paths[0], _OPEN_FILE), "rb") as file:
            return file.read(max_bytes)

    def read(self, path: str, max_bytes: int) -> bytes:
        """The content of a file as it is now, changed or not; empty if there is none. Raises: OSError."""
        parent, _, name = path.rpartition("/")
        folder = self.find(parent) if parent else self.root
        if not isinstance(folder, Folder) or _lstat(name, folder.fd) is None:
            gone = isinstance(folder, Change) or (folder is not None and folder.alone)
            return b"" if gone else self.read_below(path, max_bytes)
        try:
            with open(self.open_file(folder, name), "rb") as file:
                return file.read(max_bytes)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ELOOP, errno.ENXIO):  # a whiteout, a link, a socket
                return b""
            raise

    def readlink(self, path: str) -> str:
        """The text of a link as it is now, changed or not; empty if there is none."""
        parent, _, name = path.rpartition("/")
        folder = self.find(parent) if parent else self.root
        text = _readlink(name, folder.fd) if isinstance(folder, Folder) else None
        below = self._find_below(path)
        if text is None and folder is None and below is not None:
            text = _readlink(below.paths[0])
        return text or ""

    def _find_below(self, path: str) -> _Below | None:
        top, _, rest = path.strip("/").partition("/")
        own = self._own.get(top)
        layers, names = (own.below, rest) if own is not None else (self.root.below, f"{top}/{rest}")
        found: _Below | None = None
        for name in names.strip("/").split("/"):
            found = self._below(layers, name)
            layers = found.paths if found is not None and stat.S_ISDIR(found.info.st_mode) else ()
        return found

    # ------------------------------------------------------------ all of a folder
    def names(self, folder: Folder, budget: Budget, wanted: Wanted | None = None) -> list[str]:
        """What the upper has in a folder, sorted, and what is gone with a replaced folder."""
        found = set() if folder.path else set(self._own)
        with os.scandir(folder.fd) as entries:
            for entry in entries:
                if not budget.take():
                    break
                if wanted is None or wanted(entry):
                    found.add(entry.name)
        for layer in folder.below if folder.alone else ():
            with os.scandir(layer) as entries:
                found.update(entry.name for entry in entries if budget.take())
        return sorted(found)

    def walk(self, folder: Folder, budget: Budget, wanted: Wanted | None = None) -> Iterator[Change]:
        """The changes in a folder and below, each folder before what is in it, until the budget is used up.

        `wanted` says of each entry of the upper whether it is looked at, so that the rest costs next to nothing.
        """
        places: list[tuple[Folder, str]] = [(folder, name) for name in reversed(self.names(folder, budget, wanted))]
        while places and not budget.exceeded:
            parent, name = places.pop()
            change = self.look(parent, name)
            if change is not None:
                yield change
            if change is not None and change.now is None:
                continue
            try:
                inner = self.enter(parent, name)
            except OSError:
                yield Change(f"{parent.path}/{name}", Kind.UNREADABLE, None)
                continue
            if inner is not None:
                places += [(inner, each) for each in reversed(self.names(inner, budget, wanted))]


def _lstat(path: str, folder_fd: int | None = None) -> os.stat_result | None:
    try:
        return os.stat(path, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return None


def _readlink(path: str, folder_fd: int | None = None) -> str | None:
    try:
        return os.readlink(path, dir_fd=folder_fd)
    except OSError:
        return None


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _are_equal(fd: int, other_fd: int) -> bool:
    with open(fd, "rb", buffering=0) as one, open(other_fd, "rb", buffering=0) as other:
        while chunk := one.read(_CHUNK):
            if chunk != other.read(_CHUNK):
                return False
        return not other.read(1)
