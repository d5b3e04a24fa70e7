"""The size of a folder tree that somebody else is changing, a slice of time at a time.

Not seen: files deleted while a process has them open, and what lies in folders that we may not read (`unread`).
"""

import contextlib
import os
import stat
import time
from collections.abc import Generator, Iterator

from tbench2_env.isolation import syscalls as sc

#: Entries between two looks at the clock: at most a millisecond.
_ENTRIES_PER_LOOK = 128
#: Beyond this, a path is begun anew at a folder that is kept open: the kernel takes 4,095 bytes (PATH_MAX).
_PATH_MAX = 2048
_BLOCK = 512  # st_blocks, stat(3type)


class _Folder:
    """A folder kept open as long as places below it are yet to be visited."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


#: A folder to visit: an open one, and below it a path up to the last slash, and a name.
_Place = tuple[_Folder, bytes, bytes]


class Tree:
    """`size` in bytes on the disk and `files` (entries of any kind, folders too) as found so far.

    It stops early, with `advance` true, once `size_max` or `files_max` is exceeded: how much more there is does not
    matter then. Hard links to one file are counted as files each, but their size once. Folders are left out whose path
    from the root of the tree begins with one of `left_out`.
    """

    def __init__(
        self,
        path: str,
        size_max: int | None = None,
        files_max: int | None = None,
        left_out: tuple[bytes, ...] = (),
    ) -> None:
        """Raises: OSError."""
        root = _Folder(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        self._size_max, self._files_max = size_max, files_max
        self._left_out = tuple(b"./" + path for path in left_out)
        self._linked: set[int] = set()
        self._steps = self._visit([(root, b"", b".")])
        self.size = self.files = self.unread = 0
        #: Seconds that it took.
        self.took_s = 0.0

    def advance(self, budget_s: float) -> bool:
        """Go on for about `budget_s` seconds. Answers whether it is complete."""
        begun = time.monotonic()
        complete = True
        for _ in self._steps:
            if self.is_over:
                break
            if time.monotonic() - begun >= budget_s:
                complete = False
                break
        self.took_s += time.monotonic() - begun
        if complete:
            self.close()
        return complete

    def close(self) -> None:
        """Close the open folders; the numbers stay."""
        self._steps.close()

    @property
    def is_over(self) -> bool:
        too_large = self._size_max is not None and self.size > self._size_max
        return too_large or (self._files_max is not None and self.files > self._files_max)

    def _visit(self, places: list[_Place]) -> Generator[None, None, None]:
        """Depth first, with a list and not by recursion: agents make trees deeper than any stack."""
        while places:
            start, prefix, name = places.pop()
            path = prefix + name
            if path.startswith(self._left_out):
                continue
            try:
                here = _Folder(sc.open_folder_beneath(start.fd, path))
            except FileNotFoundError:
                continue
            except OSError:
                self.unread += 1
                continue
            below = (here, b"") if len(path) > _PATH_MAX else (start, path + b"/")
            yield from self._list(here, below, places)

    def _list(self, here: _Folder, below: tuple[_Folder, bytes], places: list[_Place]) -> Iterator[None]:
        """Count what one folder holds and add its folders to `places`."""
        with os.scandir(here.fd) as entries:
            for number, entry in enumerate(entries, 1):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    self._count(info)
                    if stat.S_ISDIR(info.st_mode):
                        places.append((*below, os.fsencode(entry.name)))
                if number % _ENTRIES_PER_LOOK == 0:
                    yield
        yield

    def _count(self, info: os.stat_result) -> None:
        self.files += 1
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            if info.st_ino in self._linked:
                return
            self._linked.add(info.st_ino)
        self.size += info.st_blocks * _BLOCK
