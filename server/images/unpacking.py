"""ADD of a tar archive: its members into a layer."""

import errno
import posixpath
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

from tbench2_env.server.images.layer import Layer, Stamp, resolve


# Not by tarfile's filters: "data" refuses the absolute links of any root file system, "tar" drops setuid, and both ask
# the host's realpath (CVE-2025-4517) where the container's counts.
def unpack(archive: Path, dest: str, layer: Layer, chown: Stamp | None) -> bool:
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


def _extract(tar: tarfile.TarFile, dest: str, layer: Layer, chown: Stamp | None) -> None:
    directories = []
    for member in tar:
        if ".." in member.name.split("/"):
            raise ValueError(f"{member.name} may lie outside of it")
        folder, name = posixpath.split(posixpath.normpath(posixpath.join(dest, member.name.lstrip("/"))))
        path = posixpath.join(resolve(layer, folder), name)
        layer.make_directories(posixpath.dirname(path), chown or Stamp(layer.owner))
        stamp = Stamp(layer.owner, member.uid, member.gid) if chown is None else replace(chown, mode=None)
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
