"""What a stored layer holds, as one digest, and the space that it takes."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tbench2_env.server.images.kind import Kind
from tbench2_env.server.threads import Stop

_CHUNK = 1 << 20
_BLOCK = 512  # st_blocks, stat(3type)
CAPABILITY = "security.capability"


@dataclass(frozen=True)
class Content:
    """`digest` is "sha256:" and hex; `bytes` are those allocated on the disk, of hard links once."""

    digest: str
    bytes: int


def measure(root: Path, kind: Kind, stop: Stop) -> Content:
    """Read the layer's folder `root`, every file once.

    The digest covers paths, types, modes, owners as the image's ids, sizes, targets of links, device numbers, which
    names are hard links of each other, opaque folders, file capabilities and the bytes of files; times it does not.
    Where all files belong to one id, that may not be root, so what its owner may not read (a folder without rx, a
    file without r) counts with its attributes only, whoever looks.

    Raises:
        Stopped: by `stop`.
        OSError: a file cannot be read.
    """
    hashed, size = hashlib.sha256(), 0
    first_names: dict[int, str] = {}
    for path, info in walk(root, lambda info: _is_read(info, kind)):
        stop.check()
        name = str(path.relative_to(root))
        first = first_names.setdefault(info.st_ino, name) if may_be_linked(info) else name
        is_again = first != name
        size += 0 if is_again else info.st_blocks * _BLOCK
        parts = [os.fsencode(name), os.fsencode(first) if is_again else b"", *_attributes(path, info, kind)]
        hashed.update(b"".join(b"%d:%s," % (len(part), part) for part in parts))
        if stat.S_ISREG(info.st_mode) and not is_again and _is_read(info, kind):
            _hash_file(path, hashed, stop)
    return Content(f"sha256:{hashed.hexdigest()}", size)


def walk(root: Path, enters: Callable[[os.stat_result], bool]) -> Iterator[tuple[Path, os.stat_result]]:
    """`root` and everything below in folders that `enters` admits, a folder before what is in it, names sorted."""
    pending = [root]
    while pending:
        path = pending.pop()
        info = path.lstat()
        yield path, info
        if stat.S_ISDIR(info.st_mode) and enters(info):
            pending += sorted(path.iterdir(), key=lambda entry: os.fsencode(entry.name), reverse=True)


def is_whiteout(info: os.stat_result) -> bool:
    """Whether the entry hides one of the layers below (Documentation/filesystems/overlayfs.rst)."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def may_be_linked(info: os.stat_result) -> bool:
    """Whether it can have another name in the layer; the kernel's whiteouts are links of one, which means nothing."""
    return info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode) and not is_whiteout(info)


def is_opaque(folder: Path, kind: Kind) -> bool:
    return attribute(folder, kind.opaque) == b"y"


def attribute(path: Path, name: str) -> bytes:
    """The extended attribute of `path` itself; empty when it has none."""
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EPERM, errno.EACCES):
            raise
        return b""


def _attributes(path: Path, info: os.stat_result, kind: Kind) -> Iterator[bytes]:
    if is_whiteout(info):  # its mode and owner are nobody's choice
        yield b"whiteout"
        return
    yield b"%o" % info.st_mode
    yield b"%d:%d" % kind.image_ids(info)
    if stat.S_ISREG(info.st_mode):
        yield b"%d" % info.st_size
        yield attribute(path, CAPABILITY) if kind.has_ids else b""
    elif stat.S_ISLNK(info.st_mode):
        yield os.fsencode(os.readlink(path))  # noqa: PTH115 - Path would drop its "./"
    elif stat.S_ISDIR(info.st_mode):
        yield b"opaque" if _is_read(info, kind) and is_opaque(path, kind) else b""
    else:
        yield b"%d" % info.st_rdev


def _is_read(info: os.stat_result, kind: Kind) -> bool:
    needed = 0o500 if stat.S_ISDIR(info.st_mode) else 0o400
    return kind.has_ids or info.st_mode & needed == needed


def _hash_file(path: Path, hashed: "hashlib._Hash", stop: Stop) -> None:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            stop.check()
            hashed.update(chunk)
