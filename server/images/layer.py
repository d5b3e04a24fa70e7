"""A layer that is being made, over what lies below it, seen as one tree whose paths are the container's.

Links are followed by `resolve`, inside a root that it is given, and never by the kernel: so nothing reaches the host
through one.
"""

import errno
import os
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path

#: Every image has these folders so, and a sandbox does where it hides the base's; other new ones are 0755.
MODES = {"/root": 0o700, "/tmp": 0o1777, "/var/tmp": 0o1777}


@dataclass(frozen=True)
class Owner:
    """Maps ids of the sandbox to the host's: its root is `uid_offset`. `change` false: a node with one id, no chown."""

    uid_offset: int
    change: bool

    def give(self, path: Path, uid: int, gid: int) -> None:
        """chown `path` itself. Ids that the sandbox does not map become 65534, nobody."""
        if self.change:
            uid, gid = (self.uid_offset + (each if 0 <= each < 65536 else 65534) for each in (uid, gid))
            os.lchown(path, uid, gid)


@dataclass(frozen=True)
class BaseView:
    """What lies under the layer: the folder `root` ("/" on a node) without what the sandbox masks.

    `hidden` are absolute paths; they and all below count as absent. Arguments are absolute, normalised paths inside
    `root`; nothing is found beyond a link, as in overlayfs, which merges real directories only. The owners of its
    files are ids of the container + `shift`.
    """

    root: Path
    hidden: frozenset[str] = frozenset()
    shift: int = 0

    def lstat(self, path: str) -> os.stat_result | None:
        """The status of `path` itself, or None where nothing is visible."""
        *parents, last = prefixes(path)
        if not self.hidden.isdisjoint((*parents, last)):
            return None
        return lstat(self.host(last)) if all(is_dir(lstat(self.host(each))) for each in parents) else None

    def readlink(self, path: str) -> str:
        return str(self.host(path).readlink())

    def host(self, path: str) -> Path:
        return self.root / path.lstrip("/")


@dataclass(frozen=True)
class Stamp:
    """Owner (ids of the sandbox) and mode that a step gives to what it writes; without `mode` they keep theirs.

    `mode` is octal digits or like `u+x,go-w`. With `keep_from` copies keep their owner too, which is that id higher.
    """

    owner: Owner
    uid: int = 0
    gid: int = 0
    mode: str | None = None
    keep_from: int | None = None

    def of(self, status: os.stat_result) -> "Stamp":
        """This stamp for a copy of a file with that status."""
        if self.keep_from is None:
            return self
        return replace(self, uid=status.st_uid - self.keep_from, gid=status.st_gid - self.keep_from)

    def mark(self, path: Path, mode: int, mtime_ns: int | None = None) -> None:
        self.owner.give(path, self.uid, self.gid)  # before chmod: chown drops setuid
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(mode) if self.mode is None else changed_mode(self.mode, mode))
        if mtime_ns is not None:
            os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def changed_mode(change: str, mode: int) -> int:
    """The permissions that `chmod change` gives to a file of `mode`, with an umask of 0 (chmod(1), as in BuildKit)."""
    if change.isdecimal():
        return int(change, 8)
    bits = stat.S_IMODE(mode)
    for clause in change.split(","):
        found = re.match("[ugoa]*", clause)
        who = found[0].replace("a", "ugo") if found and found[0] else "ugo"
        reach = sum(_BITS[each] for each in set(who)) & ~(0o6000 if stat.S_ISDIR(mode) else 0)
        for operator, letters in re.findall("([-+=])([rwxXst]*)", clause):
            can_run = stat.S_ISDIR(mode) or bits & 0o111
            named = sum(_LETTERS[each] for each in set(letters.replace("X", "x" if can_run else "")))
            named &= sum(_BITS[each] for each in set(who))
            kept = bits & ~reach if operator == "=" else bits
            bits = kept & ~named if operator == "-" else kept | named
    return bits


_BITS = {"u": 0o4700, "g": 0o2070, "o": 0o1007}
_LETTERS = {"r": 0o444, "w": 0o222, "x": 0o111, "s": 0o6000, "t": 0o1000}


def lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_dir(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def prefixes(path: str) -> list[str]:
    """`/a/b` gives `/a` and `/a/b`."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]


def resolve(root: "BaseView | Layer", path: str) -> str:
    """`path` without links and dots, all taken inside `root`, and the absent as it is. Raises: OSError ELOOP."""
    pending, done, links = path.split("/")[::-1], list[str](), 0
    while pending:
        part = pending.pop()
        here = "/" + "/".join([*done, part])
        status = root.lstat(here) if part not in ("", ".", "..") else None
        if status and stat.S_ISLNK(status.st_mode):
            links += 1
            if links > 40:  # the kernel's MAXSYMLINKS
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            link = root.readlink(here)
            done = [] if link.startswith("/") else done
            pending += link.split("/")[::-1]
        elif part == "..":
            del done[-1:]
        elif part not in ("", "."):
            done.append(part)
    return "/" + "/".join(done)


class Layer:
    """The layer over its base, seen as one tree. Paths are the container's, resolved by `resolve`."""

    def __init__(self, target: Path, base: BaseView, owner: Owner) -> None:
        self.target, self.base, self.owner = target, base, owner
        # The topmost directory of an overlay lends its mode and owner to the merged one; so does the root.
        status = base.root.stat()
        Stamp(owner, keep_from=base.shift).of(status).mark(target, status.st_mode)

    def host(self, path: str) -> Path:
        return self.target / path.lstrip("/")

    def lstat(self, path: str) -> os.stat_result | None:
        try:
            return self.host(path).lstat()
        except FileNotFoundError:
            return self.base.lstat(path)
        except NotADirectoryError:  # a file of the layer hides a directory of the base
            return None

    def readlink(self, path: str) -> str:
        return str(self.host(path).readlink()) if lstat(self.host(path)) else self.base.readlink(path)

    def read_text(self, path: str) -> str:
        host = self.host(path) if lstat(self.host(path)) else self.base.host(path)
        return host.read_text(errors="replace") if self.lstat(path) else ""

    def make_directories(self, path: str, stamp: Stamp) -> None:
        """Have `path` and its parents in the layer: as the base has them, else 0755 and of the stamp's owner."""
        for prefix in prefixes(path):
            self.check(prefix, folder=True)
            status, host = self.lstat(prefix), self.host(prefix)
            if lstat(host):
                continue
            host.mkdir()
            mode = status.st_mode if status else MODES.get(prefix, 0o755)
            kept = Stamp(self.owner, keep_from=self.base.shift).of(status) if status else replace(stamp, mode=None)
            kept.mark(host, mode)

    def room_for_file(self, path: str) -> Path:
        """The host's path for a new file at `path` in a directory of the layer, an old one gone."""
        self.check(path, folder=False)
        self.host(path).unlink(missing_ok=True)
        return self.host(path)

    def check(self, path: str, folder: bool) -> None:
        """Raises: OSError when a directory would replace something else, or the reverse. Docker refuses both."""
        status = self.lstat(path)
        if status and folder and not is_dir(status):
            raise NotADirectoryError(errno.ENOTDIR, "this is no directory: choose another destination", path)
        if not folder and is_dir(status):
            raise IsADirectoryError(errno.EISDIR, "a file cannot replace this directory: rename one of them", path)
