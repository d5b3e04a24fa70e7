"""Whether an episode's worktree exceeds its storage: walked only when it can, by what was taken of the file system."""

import os
import time
from dataclasses import dataclass

from tbench2_env.isolation.spec import Limits
from tbench2_env.isolation.tree import Tree

#: After a walk, rest this many times as long as it took: while the limit may be exceeded, and in any case. The second
#: is for writes that nobody sees in the file system's free space, because as much was deleted at the same time.
_REST_FACTOR, _REST_FACTOR_UNSEEN = 4, 20
_REST_UNSEEN_S = 5.0

#: What is not walked of a worktree: the kernel's own folders, in which nobody can leave anything.
_OF_OVERLAYS = (b"work", b"tests/work")


@dataclass
class Drain:
    """How much of the scratch folder's file system was ever taken, by anybody: numbers that only grow."""

    size: int = 0
    files: int = 0
    _free_size: int = 0
    _free_files: int = 0

    def look(self) -> None:
        info = os.statvfs(".")
        free_size, free_files = info.f_bfree * info.f_frsize, info.f_ffree
        self.size += max(0, self._free_size - free_size)
        self.files += max(0, self._free_files - free_files)
        self._free_size, self._free_files = free_size, free_files


class Storage:
    """The worktree of one episode. `size` in bytes and `files`, folders included, are those of the last whole walk.

    A file deleted while it is open is not seen, though it takes space until it is closed.
    """

    def __init__(self, path: str, limits: Limits, drain: Drain) -> None:
        self._path, self._drain = path, drain
        self._size_max, self._files_max = limits.storage_bytes, limits.files_max
        self.size = self.files = 0
        self._walk: Tree | None = None
        self._ended_at = time.monotonic()
        self._took_s = 0.0
        self._drained = (drain.size, drain.files)
        #: Whether a process of the episode was seen since the walk began: without one nothing is written.
        self.touched = False

    def is_due(self) -> bool:
        """Whether a walk is under way, or one should begin."""
        if self._walk is not None:
            return True
        if self._size_max is None and self._files_max is None:
            return False
        rested_s = time.monotonic() - self._ended_at
        if self._may_be_exceeded():
            return rested_s >= _REST_FACTOR * self._took_s
        return self.touched and rested_s >= max(_REST_UNSEEN_S, _REST_FACTOR_UNSEEN * self._took_s)

    def _may_be_exceeded(self) -> bool:
        size, files = self._drained
        size_now = self.size + self._drain.size - size
        files_now = self.files + self._drain.files - files
        too_large = self._size_max is not None and size_now > self._size_max
        return too_large or (self._files_max is not None and files_now > self._files_max)

    def advance(self, budget_s: float) -> bool:
        """Go on with the walk, beginning one if there is none. Answers whether it is complete."""
        if self._walk is None:
            self.touched = False
            self._drained = (self._drain.size, self._drain.files)
            try:
                self._walk = Tree(self._path, self._size_max, self._files_max, _OF_OVERLAYS)
            except OSError:  # it is being discarded
                return True
        if not self._walk.advance(budget_s):
            return False
        self.size, self.files, self._took_s = self._walk.size, self._walk.files, self._walk.took_s
        self._walk, self._ended_at = None, time.monotonic()
        return True

    def exceeded(self) -> str | None:
        """Which limit the last whole walk found exceeded: "storage" or "files"."""
        if self._size_max is not None and self.size > self._size_max:
            return "storage"
        if self._files_max is not None and self.files > self._files_max:
            return "files"
        return None

    def close(self) -> None:
        if self._walk is not None:
            self._walk.close()
            self._walk = None
