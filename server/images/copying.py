"""Builds a task's layer: the files that COPY, ADD and WORKDIR would have created, as an overlayfs lower directory.

Nothing is run. Links are followed by `resolve`, inside a root that it is given, and never by the kernel: so neither a
context nor an archive reaches the host through one. Semantics are those of the Dockerfile reference and, where that is
silent, of BuildKit's copier (tonistiigi/fsutil copy/copy.go).
"""

import errno
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tbench2_env.server.images.context import Context, Rules, View
from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.layer import BaseView, Layer, Owner, Stamp, is_dir, lstat, resolve
from tbench2_env.server.images.steps import Copy, Workdir
from tbench2_env.server.images.unpacking import unpack

# What a task's author can cause (None: a decompressor's). The rest is the node's: ENOSPC, EACCES, EINVAL of chown.
_AUTHORS = (None, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.ENOTSUP)
_Admit = Callable[[Path, Path], bool]
_CAPABILITY = "security.capability"


def build_layer(
    steps: Iterable[Workdir | Copy], source: Context | View, target: Path, base: BaseView, owner: Owner
) -> None:
    """Carry out `steps`, copying from `source`, into the empty directory `target`.

    Raises:
        DockerfileError: a step cannot be done as written.
        OSError: the node failed (no space, no permission).
    """
    layer = Layer(target, base, owner)
    for step in steps:
        with blamed(step):
            if isinstance(step, Workdir):
                path = resolve(layer, step.path)
                if not is_dir(layer.lstat(path)):  # else there is nothing to add to what is below
                    layer.make_directories(path, _stamp(step.user, None, layer))
            else:
                _copy(step, source, layer)


@contextmanager
def blamed(step: Workdir | Copy) -> Iterator[None]:
    """What of an OSError is the task's author's doing is a DockerfileError that names the step."""
    try:
        yield
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
    _copy_content(source, target_dir, Stamp(owner), lambda path, _: path.parent != source or path.name not in skip)


def _copy_content(source: Path, target: Path, stamp: Stamp, admit: _Admit) -> None:
    for entry in sorted(source.iterdir()):
        if admit(entry, target / entry.name):
            _copy_entry(entry, target / entry.name, stamp, admit)


def _copy_entry(source: Path, target: Path, stamp: Stamp, admit: _Admit) -> None:
    status = source.lstat()
    if stat.S_ISDIR(status.st_mode):
        if not is_dir(lstat(target)):
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
    stamp.of(status).mark(target, status.st_mode, status.st_mtime_ns)
    if stamp.keep_from is not None and stat.S_ISREG(status.st_mode):
        with suppress(OSError):  # a file system that has none, or another one's
            os.setxattr(target, _CAPABILITY, os.getxattr(source, _CAPABILITY))  # after chown, which drops it


def _copy(step: Copy, source: Context | View, layer: Layer) -> None:
    """A directory gives its content; a file goes into `dest` if that is a directory, else it becomes `dest`."""
    stamp = _stamp(step.chown, step.chmod, layer)
    kept = stamp if step.chown or isinstance(source, Context) else replace(stamp, keep_from=source.shift)
    found = source.find(step.sources, step.parents)
    dest = resolve(layer, posixpath.join(step.workdir, step.dest))
    into = step.dest.endswith(("/", "/.")) or step.dest in ("", ".", "..") or len(found) + len(step.inline) > 1
    excluded = Rules(step.exclude)

    def place(name: str) -> Path:
        is_folder = into or step.parents or is_dir(layer.lstat(dest))
        path = posixpath.join(dest, name) if is_folder else dest
        layer.make_directories(posixpath.dirname(path), stamp)
        return layer.room_for_file(path)

    def copy_folder(top: Path, name: str) -> None:
        def admit(entry: Path, target: Path) -> bool:
            shown = source.shows(entry) and not excluded.hide(str(entry.relative_to(top)))
            if shown:
                layer.check("/" + str(target.relative_to(layer.target)), folder=is_dir(lstat(entry)))
            return shown

        path = posixpath.normpath(posixpath.join(dest, name)) if step.parents else dest
        is_new = layer.lstat(path) is None
        layer.make_directories(path, stamp)
        _copy_content(top, layer.host(path), kept, admit)
        if is_new and step.chmod:  # it applies here, but not to what had to be made above
            stamp.mark(layer.host(path), stat.S_IFDIR | 0o755)

    for name, file in found:
        if is_dir(lstat(file)):
            copy_folder(file, name)
        elif excluded.hide(name):
            continue
        elif not (step.is_add and file.is_file() and unpack(file, dest, layer, stamp if step.chown else None)):
            _copy_entry(file, place(name), kept, lambda entry, _: source.shows(entry))
    for name, content in step.inline:
        host = place(name)
        host.write_bytes(content.encode())
        stamp.mark(host, 0o644)


def _stamp(owner: str | None, mode: str | None, layer: Layer) -> Stamp:
    """`owner` is `user[:group]`. Raises: OSError ENOTSUP for a name that the layer's /etc does not know."""
    user, _, group = (owner or "0").partition(":")
    uid, gid = _look_up(user, "/etc/passwd", layer)
    gid = _look_up(group, "/etc/group", layer)[0] if group else gid
    return Stamp(layer.owner, uid, gid, mode)


def _look_up(name: str, file: str, layer: Layer) -> tuple[int, int]:
    """(uid, primary gid) from /etc/passwd, (gid, gid) from /etc/group; a number stands for itself."""
    if re.fullmatch("[0-9]{1,9}", name):
        return int(name), int(name)
    for fields in (line.split(":") for line in layer.read_text(resolve(layer, file)).split("\n")):
        numbers = [int(each) for each in fields[2:4] if each.isdecimal()]
        if fields[0] == name and numbers:
            return numbers[0], numbers[-1]
    raise OSError(errno.ENOTSUP, f"{file} does not have it: use a number, or add the user before", f"user {name}")
