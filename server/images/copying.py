"""Builds a task's layer: the files that COPY, ADD and WORKDIR would have created, as an overlayfs lower directory.

Nothing is run. Links are followed by `_resolve`, inside a root that it is given, and never by the kernel: so neither a
context nor an archive reaches the host through one. Semantics are those of the Dockerfile reference and, where that is
silent, of BuildKit's copier (tonistiigi/fsutil copy/copy.go).
"""

import errno
import os
import posixpath
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tbench2_env.server.images.dockerfile import BuildPlan, Copy, DockerfileError, Workdir

# What a task's author can cause (None: a decompressor's). The rest is the node's: ENOSPC, EACCES, EINVAL of chown.
_AUTHORS = (None, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.ENOTSUP)
# Every image has these so, and a sandbox does where it hides the base's.
_MODES = {"/root": 0o700, "/tmp": 0o1777, "/var/tmp": 0o1777}
_Admit = Callable[[Path, Path], bool]


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
    `root`; nothing is found beyond a link, as in overlayfs, which merges real directories only.
    """

    root: Path
    hidden: frozenset[str] = frozenset()

    def lstat(self, path: str) -> os.stat_result | None:
        """The status of `path` itself, or None where nothing is visible."""
        *parents, last = _prefixes(path)
        if not self.hidden.isdisjoint((*parents, last)):
            return None
        return _lstat(self.host(last)) if all(_is_dir(_lstat(self.host(each))) for each in parents) else None

    def readlink(self, path: str) -> str:
        return str(self.host(path).readlink())

    def host(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def build_layer(plan: BuildPlan, context: Path, target: Path, base: BaseView, owner: Owner) -> None:
    """Carry out `plan.steps` from the folder `context` into the empty directory `target`.

    Raises:
        DockerfileError: a step cannot be done as written.
        OSError: the node failed (no space, no permission).
    """
    layer, files = _Layer(target, base, owner), _Context(context)
    for step in plan.steps:
        try:
            if isinstance(step, Workdir):
                layer.make_directories(_resolve(layer, step.path), _Stamp(owner))
            else:
                _copy(step, files, layer)
        except OSError as error:
            if error.errno not in _AUTHORS:
                raise
            name = "WORKDIR" if isinstance(step, Workdir) else "ADD" if step.is_add else "COPY"
            raise DockerfileError(step.line, f"{name}: {error.filename}: {error.strerror or error}") from error


def copy_tree(source: Path, target_dir: Path, owner: Owner, skip: frozenset[str] = frozenset()) -> None:
    """Copy the content of the folder `source` into `target_dir`, made if absent, as the sandbox's root.

    Links stay links, modes and times are kept, directories merge, files are replaced. `skip` are names at the top.

    Raises:
        OSError: ENOTSUP for a pipe, socket or device, EEXIST for a directory over a file; else the node failed.
    """
    target_dir.mkdir(parents=True, exist_ok=True)
    _copy_content(source, target_dir, _Stamp(owner), lambda path, _: path.parent != source or path.name not in skip)


@dataclass(frozen=True)
class _Stamp:
    """Owner (ids of the sandbox) and mode that a step gives to what it writes; without `mode` they keep theirs."""

    owner: Owner
    uid: int = 0
    gid: int = 0
    mode: int | None = None

    def mark(self, path: Path, mode: int, mtime_ns: int | None = None) -> None:
        self.owner.give(path, self.uid, self.gid)  # before chmod: chown drops setuid
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(mode) if self.mode is None else self.mode)
        if mtime_ns is not None:
            os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def _copy_content(source: Path, target: Path, stamp: _Stamp, admit: _Admit) -> None:
    for entry in sorted(source.iterdir()):
        if admit(entry, target / entry.name):
            _copy_entry(entry, target / entry.name, stamp, admit)


def _copy_entry(source: Path, target: Path, stamp: _Stamp, admit: _Admit) -> None:
    status = source.lstat()
    if stat.S_ISDIR(status.st_mode):
        if not _is_dir(_lstat(target)):
            target.mkdir()
        _copy_content(source, target, stamp, admit)
    else:
        target.unlink(missing_ok=True)
        if stat.S_ISLNK(status.st_mode):
            target.symlink_to(os.readlink(source))  # noqa: PTH115 - Path would drop its "./"
        elif stat.S_ISREG(status.st_mode):
            shutil.copyfile(source, target, follow_symlinks=False)
        else:
            raise OSError(errno.ENOTSUP, "neither file, directory nor link: remove it", str(source))
    stamp.mark(target, status.st_mode, status.st_mtime_ns)


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_dir(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _prefixes(path: str) -> list[str]:
    """`/a/b` gives `/a` and `/a/b`."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]


def _resolve(root: "BaseView | _Layer", path: str) -> str:
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


class _Layer:
    """The layer over its base, seen as one tree. Paths are the container's, resolved by `_resolve`."""

    def __init__(self, target: Path, base: BaseView, owner: Owner) -> None:
        self.target, self.base, self.owner = target, base, owner
        # The topmost directory of an overlay lends its mode and owner to the merged one; so does the root.
        status = base.root.stat()
        _Stamp(owner, status.st_uid, status.st_gid).mark(target, status.st_mode)

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
        return str(self.host(path).readlink()) if _lstat(self.host(path)) else self.base.readlink(path)

    def read_text(self, path: str) -> str:
        host = self.host(path) if _lstat(self.host(path)) else self.base.host(path)
        return host.read_text(errors="replace") if self.lstat(path) else ""

    def make_directories(self, path: str, stamp: _Stamp) -> None:
        """Have `path` and its parents in the layer: as the base has them, else 0755 and of the stamp's owner."""
        for prefix in _prefixes(path):
            self.check(prefix, is_dir=True)
            status, host = self.lstat(prefix), self.host(prefix)
            if _lstat(host):
                continue
            host.mkdir()
            mode = status.st_mode if status else _MODES.get(prefix, 0o755)
            uid, gid = (status.st_uid, status.st_gid) if status else (stamp.uid, stamp.gid)
            _Stamp(self.owner, uid, gid).mark(host, mode)

    def room_for_file(self, path: str) -> Path:
        """The host's path for a new file at `path` in a directory of the layer, an old one gone."""
        self.check(path, is_dir=False)
        self.host(path).unlink(missing_ok=True)
        return self.host(path)

    def check(self, path: str, is_dir: bool) -> None:
        """Raises: OSError when a directory would replace something else, or the reverse. Docker refuses both."""
        status = self.lstat(path)
        if status and is_dir and not _is_dir(status):
            raise NotADirectoryError(errno.ENOTDIR, "this is no directory: choose another destination", path)
        if not is_dir and _is_dir(status):
            raise IsADirectoryError(errno.EISDIR, "a file cannot replace this directory: rename one of them", path)


def _copy(step: Copy, context: "_Context", layer: _Layer) -> None:
    """A directory gives its content; a file goes into `dest` if that is a directory, else it becomes `dest`."""
    stamp = _stamp(step, layer)
    sources = context.find(step.sources)
    dest = _resolve(layer, posixpath.join(step.workdir, step.dest))
    into = step.dest.endswith(("/", "/.")) or step.dest in ("", ".", "..") or len(sources) + len(step.inline) > 1

    def place(name: str) -> Path:
        path = posixpath.join(dest, name) if into or _is_dir(layer.lstat(dest)) else dest
        layer.make_directories(posixpath.dirname(path), stamp)
        return layer.room_for_file(path)

    def admit(entry: Path, target: Path) -> bool:
        if shown := context.shows(entry):
            layer.check("/" + str(target.relative_to(layer.target)), is_dir=_is_dir(_lstat(entry)))
        return shown

    for name, source in sources:
        if _is_dir(_lstat(source)):
            is_new = layer.lstat(dest) is None
            layer.make_directories(dest, stamp)
            _copy_content(source, layer.host(dest), stamp, admit)
            if is_new and step.chmod:  # it applies here, but not to what had to be made above
                stamp.mark(layer.host(dest), 0)
        elif not (step.is_add and source.is_file() and _unpack(source, dest, layer, stamp if step.chown else None)):
            _copy_entry(source, place(name), stamp, admit)
    for name, content in step.inline:
        host = place(name)
        host.write_bytes(content.encode())
        stamp.mark(host, 0o644)


def _stamp(step: Copy, layer: _Layer) -> _Stamp:
    user, _, group = (step.chown or "0").partition(":")
    uid, gid = _look_up(user, "/etc/passwd", layer)
    gid = _look_up(group, "/etc/group", layer)[0] if group else gid
    return _Stamp(layer.owner, uid, gid, int(step.chmod, 8) if step.chmod else None)


def _look_up(name: str, file: str, layer: _Layer) -> tuple[int, int]:
    """(uid, primary gid) from /etc/passwd, (gid, gid) from /etc/group; a number stands for itself."""
    if re.fullmatch("[0-9]{1,9}", name):
        return int(name), int(name)
    for fields in (line.split(":") for line in layer.read_text(_resolve(layer, file)).split("\n")):
        numbers = [int(each) for each in fields[2:4] if each.isdecimal()]
        if fields[0] == name and numbers:
            return numbers[0], numbers[-1]
    raise OSError(errno.ENOTSUP, f"the node's {file} does not have it: use a number", f"--chown={name}")


# Not by tarfile's filters: "data" refuses the absolute links of any root file system, "tar" drops setuid, and both ask
# the host's realpath (CVE-2025-4517) where the container's counts.
def _unpack(archive: Path, dest: str, layer: _Layer, chown: _Stamp | None) -> bool:
    """Extract `archive` into the directory `dest` if its content, not its name, says it is one."""
    is_archive = False
    try:
        with tarfile.open(archive) as tar:
            is_archive = tar.next() is not None
            _extract(tar, dest, layer, chown)
    except OSError:
        raise
    except Exception as error:  # for broken data tarfile, zlib and lzma each have their own
        if is_archive:
            raise OSError(errno.ENOTSUP, f"a broken archive: {error}", str(archive)) from error
    return is_archive


def _extract(tar: tarfile.TarFile, dest: str, layer: _Layer, chown: _Stamp | None) -> None:
    directories = []
    for member in tar:
        if ".." in member.name.split("/"):
            raise ValueError(f"{member.name} may lie outside of it")
        folder, name = posixpath.split(posixpath.normpath(posixpath.join(dest, member.name.lstrip("/"))))
        path = posixpath.join(_resolve(layer, folder), name)
        layer.make_directories(posixpath.dirname(path), chown or _Stamp(layer.owner))
        stamp = _Stamp(layer.owner, member.uid, member.gid) if chown is None else replace(chown, mode=None)
        if member.isdir():
            layer.make_directories(path, stamp)
            directories.append((stamp, layer.host(path), member))
        else:
            host = layer.room_for_file(path)
            _extract_file(tar, member, host)
            stamp.mark(host, member.mode, int(member.mtime * 1e9))
    for stamp, host, member in reversed(directories):  # last: writing into them moves their times
        stamp.mark(host, member.mode, int(member.mtime * 1e9))


def _extract_file(tar: tarfile.TarFile, member: tarfile.TarInfo, host: Path) -> None:
    if member.issym():
        host.symlink_to(member.linkname)
    elif (member.isreg() or member.islnk()) and (content := tar.extractfile(member)):
        with content, host.open("xb") as out:  # a hard link becomes a copy
            shutil.copyfileobj(content, out)
    else:
        raise ValueError(f"{member.name} is neither file, directory nor link")


class _Context:
    """The build context without what its .dockerignore hides."""

    def __init__(self, folder: Path) -> None:
        # Not resolved: the folder may be reached by a descriptor of another mount namespace, whose paths lead nowhere.
        self.root = folder.absolute()
        self.rules = list(_ignore_rules(folder / ".dockerignore"))

    def shows(self, entry: Path) -> bool:
        """Whether `entry` is not ignored; an ignored directory is shown for what a later `!` brings back in it."""
        path, ignored = "/" + str(entry.relative_to(self.root)), False
        for ignores, pattern in self.rules:
            ignored = ignores if pattern.fullmatch(path) else ignored
        return not ignored or entry == self.root or (_is_dir(_lstat(entry)) and any(map(self.shows, entry.iterdir())))

    def find(self, sources: tuple[str, ...]) -> list[tuple[str, Path]]:
        """(name, file) of every match, links followed inside the context.

        Raises:
            OSError: ENOENT for a path that is not there, or if no source matches. A glob may match nothing beside
                others that do: authors write `COPY a.txt b.tx[t] /` for an optional file.
        """
        found = [(source, self._matches(posixpath.normpath("/" + source.lstrip("/")))) for source in sources]
        for source, matches in found:
            if not matches and not (_WILD.search(source) and any(others for _, others in found)):
                raise FileNotFoundError(errno.ENOENT, "not in the build context, or ignored: add it there", source)
        return [pair for _, matches in found for pair in matches]

    def _matches(self, path: str) -> list[tuple[str, Path]]:
        tree = BaseView(self.root)
        paths = [path] if tree.lstat(_resolve(tree, path)) else []
        if _WILD.search(path):
            pattern = re.compile(_regex(path), re.DOTALL)
            every = ("/" + str(entry.relative_to(self.root)) for entry in sorted(self.root.rglob("*")))
            paths = [each for each in every if pattern.fullmatch(each)]
        found = [(each, tree.host(_resolve(tree, each))) for each in paths if self.shows(tree.host(each))]
        return [(posixpath.basename(each), file) for each, file in found if self.shows(file)]


def _ignore_rules(file: Path) -> Iterator[tuple[bool, re.Pattern[str]]]:
    """(ignores, pattern over `/path`) of each line; the last one that matches decides (moby/patternmatcher)."""
    for line in map(str.strip, file.read_text(errors="replace").split("\n") if file.is_file() else []):
        if line and not line.startswith("#"):
            pattern = posixpath.normpath("/" + line.removeprefix("!").strip().lstrip("/"))
            yield not line.startswith("!"), re.compile(_regex(pattern, deep=True) + "(?:/.*)?", re.DOTALL)


_WILD = re.compile(r"[*?\[]")
_CHAR = r"(?:\\.|[^\\\]\-])"
_RANGE = re.compile(rf"({_CHAR})(?:-({_CHAR}))?")
_TOKEN = re.compile(rf"\*\*+/?|\[\^?+(?:{_CHAR}(?:-{_CHAR})?)+\]|\\.|.", re.DOTALL)


def _regex(glob: str, deep: bool = False) -> str:
    """Go's path.Match as a regular expression. `deep`: `**` crosses directories, as in .dockerignore."""
    out = ""
    for token in _TOKEN.findall(glob):
        if token.startswith("**") and deep:
            out += "(?:.*/)?" if token.endswith("/") else ".*"
        elif token[0] == "*":
            out += "[^/]*" + token.lstrip("*")
        elif token in ("?", "[", "\\"):  # the last two are malformed, and match nothing
            out += "[^/]" if token == "?" else "(?!)"
        else:
            out += _class(token) if token[0] == "[" else re.escape(token[-1])
    return out


def _class(token: str) -> str:
    ranges = [(low[-1], (high or low)[-1]) for low, high in _RANGE.findall(token[1:-1].removeprefix("^"))]
    body = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in ranges if low <= high)
    return f"[{'^' if token[1] == '^' else ''}\\0{body}]"  # NUL is in no name, and keeps it from being empty
