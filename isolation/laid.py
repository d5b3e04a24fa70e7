"""What is laid out on the node's own files where nothing isolates, and exactly that removed again.

Only what is not there yet is made. Each file or folder that is new in a folder of the node's is recorded, a line of
JSON in a file of the server's scratch folder, once it is made and before it is filled: what lies below it is ours. A
folder of the node's is known by its device and inode, so that nothing is removed where an agent put another.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import worktree

#: In a server's folder, with `worktree.remove` to end it.
RECORD = "shared/laid"
_Identity = tuple[int, int]


@dataclass(frozen=True)
class _Made:
    """Something made in a folder of the node's: device and inode of that folder and of itself."""

    path: str
    parent: _Identity
    itself: _Identity

    @classmethod
    def at(cls, path: str) -> "_Made":
        return cls(path, _identity(os.path.dirname(path)), _identity(path))

    @classmethod
    def from_line(cls, line: str) -> "_Made":
        path, parent, itself = json.loads(line)
        return cls(path, tuple(parent), tuple(itself))

    def to_line(self) -> str:
        return json.dumps([self.path, self.parent, self.itself]) + "\n"


class Laid:
    """State: what was made and is not removed yet. `chown`: whether files get the owners they have at the source."""

    def __init__(self, record: str, *, chown: bool) -> None:
        self._record, self._chown = record, chown
        self._made: list[_Made] = []

    def __len__(self) -> int:
        return len(self._made)

    def lay(self, source: str, target: str) -> None:
        """Merge the folder `source` into `target`. Raises: OSError naming the path; nothing of it is left then."""
        with self._all_or_nothing():
            for new, path in list(_missing(source, target)):
                self._put(new, path)

    def copy(self, source: str, path: str) -> None:
        """Copy `source` to `path`, where nothing may be. Raises: OSError naming the path; nothing is left then."""
        with self._all_or_nothing():
            refuse_existing(path)
            self._put(source, path)

    def link(self, path: str, to: str) -> None:
        """Make the symbolic link `path` and folders above it. Raises: OSError naming the path; nothing is left."""
        with self._all_or_nothing():
            missing = [str(parent) for parent in Path(path).parents if not os.path.lexists(parent)]
            for parent in reversed(missing):
                os.mkdir(parent, 0o755)
                self._note(parent)
            refuse_existing(path)
            os.symlink(to, path)
            self._note(path)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        mark = len(self)
        try:
            yield
        except OSError as error:
            self.undo(mark)
            raise _explained(error) from None

    def _put(self, source: str, path: str) -> None:
        _make(source, path)
        self._note(path)
        self._fill(source, path)

    def _note(self, path: str) -> None:
        self._made.append(_Made.at(path))
        with open(self._record, "a", encoding="utf-8") as record:
            record.write(self._made[-1].to_line())

    def _fill(self, source: str, path: str) -> None:
        """Give what was made its content, owner, mode and times."""
        info = os.lstat(source)
        if stat.S_ISDIR(info.st_mode):
            for name in os.listdir(source):
                _make(f"{source}/{name}", f"{path}/{name}")
                self._fill(f"{source}/{name}", f"{path}/{name}")
        elif stat.S_ISREG(info.st_mode):
            shutil.copyfile(source, path, follow_symlinks=False)
        if self._chown:
            os.chown(path, info.st_uid, info.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(info.st_mode):
            os.chmod(path, stat.S_IMODE(info.st_mode))
        os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns), follow_symlinks=False)

    def undo(self, mark: int = 0) -> None:
        """Remove what was made since there were `mark` things; what cannot be removed is told of, and kept to be tried
        again."""
        made, self._made = self._made[mark:], self._made[:mark]
        left = [one for one in reversed(made) if not _remove(one)]
        self._made += reversed(left)
        with open(self._record, "w", encoding="utf-8") as record:
            record.writelines(one.to_line() for one in self._made)


def refuse_existing(path: str) -> None:
    """Raises: FileExistsError."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists on this node already, and nothing there is overwritten", path)


def sweep(scratch: Iterable[str]) -> None:
    """Remove what servers laid out that were killed with their helper; what was replaced since is left."""
    for record in (path for folder in scratch for path in Path(folder).glob(f"{worktree.PREFIX}*/{RECORD}")):
        with contextlib.suppress(OSError), open(record.parents[1] / "lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            whole_lines = record.read_text(encoding="utf-8").split("\n")[:-1]
            for one in reversed([_Made.from_line(line) for line in whole_lines]):
                if not os.path.lexists(one.path) or _identity(one.path) == one.itself:
                    _remove(one)
                else:
                    _tell(f"{one.path} is not removed: it is not what a server laid out there before it was killed")


# ---------------------------------------------------------------- making
def _missing(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Each (source, path) that is to be made in a folder that is there."""
    for name in sorted(os.listdir(source)):
        new, path = f"{source}/{name}", os.path.join(target, name)
        if os.path.isdir(path) and not os.path.islink(path) and stat.S_ISDIR(os.lstat(new).st_mode):
            yield from _missing(new, path)
        else:
            refuse_existing(path)
            yield new, path


def _make(source: str, path: str) -> None:
    """Make the empty file, the folder or the link; never anything else than a new one."""
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.mkdir(path, 0o700)
    elif stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _explained(error: OSError) -> OSError:
    """Of which path, and what that has to do with isolation."""
    path = error.filename2 or error.filename
    why = "without isolation (TB2_ISOLATION=none) a task's files are made on the node itself"
    return type(error)(error.errno, f"{path}: {error.strerror}: {why}")


# ---------------------------------------------------------------- removing
def _identity(path: str) -> _Identity:
    info = os.lstat(path)
    return info.st_dev, info.st_ino


def _remove(made: _Made) -> bool:
    """Whether it is gone, or no longer ours to remove."""
    try:
        parent = os.path.dirname(made.path)
        if _identity(parent) != made.parent:
            _tell(f"{made.path} is not removed: {parent} is not the folder that it was made in")
        elif os.path.isdir(made.path) and not os.path.islink(made.path):
            _remove_folder(made.path, parent)
        else:
            os.unlink(made.path)
    except FileNotFoundError:
        return True
    except OSError as error:
        _tell(f"{made.path} cannot be removed: {error}")
        return False
    return True


def _remove_folder(path: str, parent: str) -> None:
    """From a folder of its own, where nothing else bears the names that `worktree.delete` moves folders to."""
    for point in _mount_points_below(path):
        sc.umount(point)
    aside = tempfile.mkdtemp(prefix=".tbench2-", dir=parent)
    os.rename(path, f"{aside}/it")
    worktree.delete(f"{aside}/it")
    os.rmdir(aside)


def _mount_points_below(path: str) -> list[str]:
    """Innermost first; what an agent mounted must not be taken for ours."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [os.fsdecode(line.split()[4].encode().decode("unicode_escape").encode("latin-1")) for line in lines]
    return [point for point in reversed(points) if point == path or point.startswith(path + "/")]


def _tell(text: Any) -> None:
    sys.stderr.write(f"tbench2_env: {text}\n")
