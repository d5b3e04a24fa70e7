"""Layers as OCI images carry them, tar archives with whiteouts, to and from layers of the store.

The format is opencontainers/image-spec layer.md: `.wh.NAME` hides NAME of the layers below, `.wh..wh..opq` all that
they have in its folder. Archives come from anybody, so no link in one is ever followed by the kernel: parents are
resolved here, inside the layer's root, as a chroot would.
"""

import contextlib
import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any, Protocol, Self

from tbench2_env.server.images import content
from tbench2_env.server.images.compression import BROKEN, ArchiveError, Readable, decompressed
from tbench2_env.server.images.kind import Kind
from tbench2_env.server.images.layer import MODES, lstat

__all__ = ["ArchiveError", "Unpacked", "pack", "unpack"]

_CHUNK, _WRITTEN_AT_ONCE, _HOLE = 1 << 20, 1 << 16, 1 << 16
_HIDES, _OPAQUE, _BOOKKEEPING = ".wh.", ".wh..wh..opq", ".wh..wh."
_XATTR = "SCHILY.xattr."
_SKIPPED_MAX = 100


class Writable(Protocol):
    def write(self, data: bytes, /) -> int: ...


@dataclass
class Unpacked:
    """`entries` of the archive, and the first hundred that this kind of store or this node cannot hold, with why."""

    entries: int = 0
    skipped: list[str] = field(default_factory=list)

    def skip(self, name: str, why: str) -> None:
        if len(self.skipped) < _SKIPPED_MAX:
            self.skipped.append(f"{name}: {why}")


def unpack(stream: Readable, root: Path, kind: Kind, watch: Callable[[bytes], object] = lambda data: None) -> Unpacked:
    """Unpack a layer's archive, compressed or not, into `root`, which is made; reads `stream` to its end.

    `watch` is given all of the uncompressed archive, to hash it.

    Of a name that occurs twice the last entry counts, but folders merge. Absolute names and `..` are taken inside
    `root`. Device nodes and file capabilities need a kind with ids, and the right to make them. Of extended attributes
    only user.* and security.capability are kept, and none that overlayfs would read.

    Raises:
        ArchiveError: the archive is broken, cut off, or not to be had in a file system.
        OSError: the node failed (no space).
    """
    try:
        with decompressed(stream) as data:
            unpacking = _Unpacking(root, kind)
            forward: Any = _Forward(data, watch)
            with tarfile.TarFile(fileobj=forward, tarinfo=_Member, encoding="utf-8", errors="surrogateescape") as tar:
                for member in tar:
                    unpacking.add(tar, member)
            while forward.read(_CHUNK):  # so that whoever hashes the stream, or checks its sum, has seen all of it
                pass
            unpacking.finish()
    except (tarfile.TarError, *BROKEN) as error:
        raise ArchiveError(f"the archive is broken or cut off: {error}") from error
    except ValueError as error:
        raise error if isinstance(error, ArchiveError) else ArchiveError(f"a name in the archive: {error}") from error
    except OSError as error:
        if error.errno in (None, errno.ELOOP, errno.ENAMETOOLONG):
            raise ArchiveError(f"the archive is broken: {error}") from error
        raise
    return unpacking.result


class _Member(tarfile.TarInfo):
    """tarfile takes a broken or missing header for the archive's end; an end without its mark is one cut off."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


class _Forward:
    """A file for tarfile that can only be read on: skipping is reading."""

    def __init__(self, stream: Readable, watch: Callable[[bytes], object]) -> None:
        self._stream, self._watch, self._position = stream, watch, 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < self._position:
            raise tarfile.StreamError("seeking backwards is not allowed")
        while self._position < position and self.read(min(_CHUNK, position - self._position)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._watch(data)
        self._position += len(data)
        return data


class _Unpacking:
    """One archive on its way into `root`. Attributes of folders come last: writing into them needs and changes them."""

    def __init__(self, root: Path, kind: Kind) -> None:
        self.result = Unpacked()
        self._root, self._kind = root, kind
        self._folders: dict[Path, tarfile.TarInfo | None] = {}
        self._parent = ("", root)  # the last one resolved, which is mostly the next one's
        self._make_folder(root)

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.result.entries += 1
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if any(part.startswith(_BOOKKEEPING) and part != _OPAQUE for part in parts):
            return  # aufs kept its own files so
        if parts and parts[-1] == "..":
            raise ArchiveError(f"{member.name}: is no name of an entry")
        parent = self._resolve(parts[:-1])
        name = parts[-1] if parts else ""
        if name == _OPAQUE:
            self._mark_opaque(self._make_folder(parent))
        elif name.startswith(_HIDES):
            self._hide(self._make_folder(parent), name.removeprefix(_HIDES), member)
        elif member.isdir() or not parts:
            self._folders[self._make_folder(parent / name)] = member
        else:
            self._add_file(tar, member, self._make_folder(parent) / name)

    def finish(self) -> None:
        """Raises: OSError."""
        for path in sorted(self._folders, key=lambda path: len(path.parts), reverse=True):
            if member := self._folders[path]:
                self._mark(path, member)
            else:
                # The archive has something in it without having it itself; the layers below would lend it no mode.
                self._kind.owner.give(path, 0, 0)
                path.chmod(MODES.get(f"/{path.relative_to(self._root)}", 0o755))

    # ---------------------------------------------------------------- places
    def _resolve(self, parts: list[str]) -> Path:
        """The folder `parts`, all links taken inside the root; what is absent is taken as it is."""
        name = "/".join(parts)
        if self._parent[0] != name:
            self._parent = (name, self._resolve_links(parts))
        return self._parent[1]

    def _resolve_links(self, parts: list[str]) -> Path:
        pending, done, links = parts[::-1], self._root, 0
        while pending:
            part = pending.pop()
            if part == "..":
                done = done if done == self._root else done.parent
            elif part not in ("", "."):
                done /= part
                if done.is_symlink():
                    links += 1
                    if links > 40:  # the kernel's MAXSYMLINKS
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "/".join(parts))
                    link = os.readlink(done)  # noqa: PTH115 - Path would drop its "./"
                    done = self._root if link.startswith("/") else done.parent
                    pending += link.split("/")[::-1]
        return done

    def _make_folder(self, path: Path) -> Path:
        """`path` as a folder, with what is missing above it; anything else in its place goes, as do links."""
        missing = [path] if path not in self._folders else []
        while missing and missing[-1] != self._root and missing[-1].parent not in self._folders:
            missing.append(missing[-1].parent)
        for each in reversed(missing):
            info = lstat(each)
            if info is None or not stat.S_ISDIR(info.st_mode):
                self._clear(each)
                each.mkdir()
            self._folders[each] = None
            if info is not None and content.is_whiteout(info):  # what was below is hidden, and this is new
                self._mark_opaque(each)
        return path

    def _clear(self, path: Path) -> None:
        """Make room for an entry."""
        info = lstat(path)
        if info is None:
            return
        self._parent = ("", self._root)
        if stat.S_ISDIR(info.st_mode):
            shutil.rmtree(path)
            self._folders = {each: member for each, member in self._folders.items() if not each.is_relative_to(path)}
        else:
            path.unlink()

    # ---------------------------------------------------------------- entries
    def _mark_opaque(self, folder: Path) -> None:
        os.setxattr(folder, self._kind.opaque, b"y", follow_symlinks=False)

    def _hide(self, folder: Path, name: str, member: tarfile.TarInfo) -> None:
        """What this layer itself has under the name stays: a whiteout hides what is below (layer.md, Whiteouts)."""
        if name in ("", ".", ".."):
            raise ArchiveError(f"{member.name}: hides nothing")
        info = lstat(folder / name)
        if info is None:
            os.mknod(folder / name, stat.S_IFCHR, 0)
        elif stat.S_ISDIR(info.st_mode):
            self._mark_opaque(folder / name)

    def _add_file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        if member.islnk():
            self._link(member, path)
            return
        self._clear(path)
        if member.isreg() and (data := tar.extractfile(member)):
            with data, path.open("xb") as file:
                _copy(data, file, member)
        elif member.issym():
            path.symlink_to(member.linkname)
        elif member.isfifo():
            os.mkfifo(path)
        elif not self._make_device(member, path):
            return
        self._mark(path, member)

    def _link(self, member: tarfile.TarInfo, path: Path) -> None:
        parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
        target = self._resolve_links(parts[:-1]) / (parts[-1] if parts else "")
        info = lstat(target)
        if info is None or stat.S_ISDIR(info.st_mode) or content.is_whiteout(info) or parts[-1] == "..":
            raise ArchiveError(f"{member.name}: is a hard link to {member.linkname}, which is no file of this layer")
        if target != path:
            self._clear(path)
            os.link(target, path, follow_symlinks=False)

    def _make_device(self, member: tarfile.TarInfo, path: Path) -> bool:
        kinds = {tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK}
        device = os.makedev(member.devmajor, member.devminor) if member.type in kinds else 0
        if not device:  # 0:0 would be a whiteout
            self.result.skip(member.name, "of a type that a layer cannot hold")
            return False
        if self._kind.has_ids:
            with contextlib.suppress(PermissionError):
                os.mknod(path, kinds[member.type], device)
                return True
        self.result.skip(member.name, "a device, which cannot be made here")
        return False

    def _mark(self, path: Path, member: tarfile.TarInfo) -> None:
        """chown drops setuid and capabilities; attributes of one's own read-only file cannot be set."""
        self._kind.owner.give(path, member.uid, member.gid)
        if member.isreg() or member.isdir():
            for key, value in member.pax_headers.items():
                if key.startswith(_XATTR):
                    self._set_attribute(path, member.name, key.removeprefix(_XATTR), value)
        if not member.issym():
            path.chmod(stat.S_IMODE(member.mode))
        with contextlib.suppress(OverflowError):
            os.utime(path, ns=(_mtime_ns(member),) * 2, follow_symlinks=False)

    def _set_attribute(self, path: Path, entry: str, name: str, value: str) -> None:
        if not _is_kept(name):
            return
        if name == content.CAPABILITY and not self._kind.has_ids:
            self.result.skip(entry, f"{name}, which this rung cannot give")
            return
        try:
            os.setxattr(path, name, value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EINVAL):
                raise
            self.result.skip(entry, f"{name} ({error.strerror})")


def _is_kept(name: str) -> bool:
    """Whether a layer may have the extended attribute: with overlayfs' own it could show other files than its own."""
    return name == content.CAPABILITY or (name.startswith("user.") and not name.startswith("user.overlay."))


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """tarfile makes a float of it, which has no nanoseconds."""
    with contextlib.suppress(InvalidOperation, ValueError, OverflowError):
        return int(Decimal(member.pax_headers.get("mtime", "x")) * 10**9)
    return int(member.mtime) * 10**9


def _copy(source: IO[bytes], target: IO[bytes], member: tarfile.TarInfo) -> None:
    """The holes of a sparse file stay holes."""
    size = _HOLE if member.issparse() else _CHUNK
    while chunk := source.read(size):
        if member.issparse() and not chunk.strip(b"\0"):
            target.seek(len(chunk), os.SEEK_CUR)
        else:
            target.write(chunk)
    target.truncate(member.size)


# ---------------------------------------------------------------- packing
def pack(root: Path, out: Writable, kind: Kind) -> None:
    """Write the layer `root` as an uncompressed archive, the same bytes for the same layer and times.

    Sockets are left out. Owners are ids of the image, and all 0 in a kind without ids.

    Raises:
        ArchiveError: a name cannot be told from a whiteout's.
        OSError: a file cannot be read.
    """
    first_names: dict[int, str] = {}
    target: Any = out
    with tarfile.open(
        fileobj=target, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", bufsize=_WRITTEN_AT_ONCE
    ) as tar:
        for path, info in content.walk(root, lambda _: True):
            name = str(path.relative_to(root))
            if content.is_whiteout(info):
                tar.addfile(tarfile.TarInfo(str(Path(name).with_name(_HIDES + path.name))))
            elif path.name.startswith(_HIDES) and path != root:
                raise ArchiveError(f"{name}: an image cannot hold this name, it would hide another: rename it")
            elif not stat.S_ISSOCK(info.st_mode):
                first = first_names.setdefault(info.st_ino, name) if content.may_be_linked(info) else name
                _add(tar, path, _header(name, path, info, kind), first)
                if stat.S_ISDIR(info.st_mode) and content.is_opaque(path, kind):
                    tar.addfile(tarfile.TarInfo(f"{name}/{_OPAQUE}"))


def _add(tar: tarfile.TarFile, path: Path, header: tarfile.TarInfo, first_name: str) -> None:
    if first_name != header.name:
        header.type, header.linkname, header.size, header.pax_headers = tarfile.LNKTYPE, first_name, 0, {}
    if header.isreg():
        with path.open("rb") as file:
            tar.addfile(header, file)
    else:
        tar.addfile(header)


_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE, stat.S_IFCHR: tarfile.CHRTYPE, stat.S_IFBLK: tarfile.BLKTYPE,
}  # fmt: skip


def _header(name: str, path: Path, info: os.stat_result, kind: Kind) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.mode = _TYPES[stat.S_IFMT(info.st_mode)], stat.S_IMODE(info.st_mode)
    header.uid, header.gid = (max(0, number) for number in kind.image_ids(info))
    header.mtime, fraction = divmod(info.st_mtime_ns, 10**9)
    extended = {"mtime": f"{header.mtime}.{fraction:09}"} if fraction and header.mtime >= 0 else {}
    if header.isreg():
        header.size = info.st_size
    elif header.issym():
        header.linkname = os.readlink(path)  # noqa: PTH115 - Path would drop its "./"
    elif header.isdev():
        header.devmajor, header.devminor = os.major(info.st_rdev), os.minor(info.st_rdev)
    if header.isreg() or header.isdir():
        for attribute in sorted(filter(_is_kept, os.listxattr(path, follow_symlinks=False))):
            value = os.getxattr(path, attribute, follow_symlinks=False)
            extended[_XATTR + attribute] = value.decode("utf-8", "surrogateescape")
    header.pax_headers = extended
    return header
