"""Bases that the operator gives: folders, tars, squashfs files and OCI layouts, each taken into the store once.

A base is taken anew when its source changes: layers are named after a digest of what they were made of.
"""

import contextlib
import hashlib
import shutil
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from tbench2_env.isolation import worktree
from tbench2_env.server import threads
from tbench2_env.server.images.archive import ArchiveError, unpack
from tbench2_env.server.images.compression import BROKEN, decompressed
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.layout import Layout, LayoutError, import_layout
from tbench2_env.server.images.rootfs import copy_rootfs, fingerprint
from tbench2_env.server.images.store import Store, StoreError
from tbench2_env.server.images.tools import run_tool

_TARS = (".tar", ".tgz", ".txz", ".tzst", ".tar.gz", ".tar.xz", ".tar.zst", ".tar.bz2")
_SQUASHED = (".sqsh", ".squashfs")
#: One of these every root file system has.
_ROOT_FOLDERS = ("usr", "bin", "etc")
#: unsquashfs(1): 1 is a fatal error, 2 means that some attributes or devices could not be made.
_UNSQUASHED = (0, 2)
_CHUNK = 1 << 20


class GivenError(ValueError):
    """What the operator gives as a base is none; the text says what to change."""


@dataclass(frozen=True)
class Given(ABC):
    """A base at `path`."""

    path: Path

    @staticmethod
    def at(path: Path) -> "Given":
        """Raises: GivenError."""
        if not path.is_absolute():
            raise GivenError(f"{path} is not absolute: give the whole path")
        if path == Path("/"):
            raise GivenError("/ is the node's own root, with all that runs on it: give a folder made for this")
        if path.is_dir():
            return _Layout(path) if (path / "oci-layout").is_file() else Folder(path).checked()
        if not path.is_file():
            raise GivenError(f"there is neither a folder nor a file {path}")
        if path.name.endswith(_TARS):
            return _Tar(path)
        if path.name.endswith(_SQUASHED):
            return _Squashed(path)
        raise GivenError(f"{path} is neither a folder, nor a {', '.join((*_TARS, *_SQUASHED))}")

    @abstractmethod
    async def load(self, store: Store, source: str) -> Image:
        """The image, its layers being in the store. `source` is what people call it.

        Raises: GivenError, LayoutError, ArchiveError, StoreError, OSError.
        """


class _Layout(Given):
    async def load(self, store: Store, source: str) -> Image:
        return await import_layout(Layout(self.path), store, source=source)


class _Rootfs(Given):
    """One layer, and no configuration."""

    async def load(self, store: Store, source: str) -> Image:
        digest = await self.digest(store)
        layer_id = f"base-{digest.removeprefix('sha256:')}"
        note: dict[str, Any] = {"base": str(self.path)}

        async def fill(folder: Path) -> None:
            if left_out := await self.fill(folder, store, digest):
                note["left_out"] = left_out

        await store.make(layer_id, fill, note)
        return Image((layer_id,), ImageConfig(), digest, source)

    @abstractmethod
    async def digest(self, store: Store) -> str:
        """Of what the layer is made of."""

    @abstractmethod
    async def fill(self, folder: Path, store: Store, digest: str) -> Any:
        """Make `folder`/root. Answers with what could not be taken, for people."""


class Folder(_Rootfs):
    """A folder of the host with all below it. `checked` says whether it is a root file system."""

    def checked(self) -> Given:
        if not any((self.path / name).is_dir() for name in _ROOT_FOLDERS):
            raise GivenError(
                f"{self.path} is no root file system: it has none of the folders {', '.join(_ROOT_FOLDERS)}"
            )
        return self

    async def digest(self, store: Store) -> str:
        return await threads.run(lambda stop: fingerprint(self.path, stop))

    async def fill(self, folder: Path, store: Store, digest: str) -> Any:
        left_out = await threads.run(lambda stop: copy_rootfs(self.path, folder / "root", store.kind, stop))
        if await self.digest(store) != digest:
            raise GivenError(f"{self.path} changed while it was being read: let nothing run in it")
        return left_out


class _File(_Rootfs):
    async def digest(self, store: Store) -> str:
        """Of the content, which is read again only when the file has another size or time."""
        info, name = self.path.stat(), f"base {self.path}"
        seen = {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "inode": info.st_ino}
        known = store.get_record(name) or {}
        if {key: known.get(key) for key in seen} == seen and isinstance(known.get("digest"), str):
            return str(known["digest"])
        digest = await threads.run(lambda stop: _hash(self.path, stop))
        with contextlib.suppress(StoreError):  # a store that can only be read
            store.put_record(name, {**seen, "digest": digest})
        return digest


class _Squashed(_File):
    async def fill(self, folder: Path, store: Store, digest: str) -> Any:
        program = shutil.which("unsquashfs")
        if program is None:
            raise GivenError(f"{self.path} needs the program unsquashfs: install squashfs-tools, or unpack it yourself")
        unpacked = folder / "unpacked"
        ran = await run_tool([program, "-no-progress", "-dest", str(unpacked), str(self.path)])
        if ran.code not in _UNSQUASHED:
            raise GivenError(f"{self.path} cannot be unpacked: {' '.join(ran.stderr.split()) or f'exit {ran.code}'}")
        left_out = await threads.run(lambda stop: copy_rootfs(unpacked, folder / "root", store.kind, stop))
        await threads.finish(lambda: worktree.delete(str(unpacked)))
        return left_out


class _Tar(_File):
    """Of a root file system, or an image as `docker save` and `skopeo copy … oci-archive:` write it."""

    async def load(self, store: Store, source: str) -> Image:
        record = f"image of {await self.digest(store)}"
        known = recorded(store, record)
        if known and all(map(store.has, known.layers)):
            return replace(known, source=source)
        if not await threads.run(lambda stop: _holds_image(self.path, stop)):
            return await super().load(store, source)
        async with contextlib.AsyncExitStack() as stack:
            try:
                found = await threads.finish(lambda: Layout(self.path))
            except LayoutError:  # it is compressed
                folder = await stack.enter_async_context(store.workplace(f"unpacking-{_hex(record)}"))
                await threads.run(lambda stop: _decompress(self.path, folder / "image.tar", stop))
                found = await threads.finish(lambda: Layout(folder / "image.tar"))
            image = await import_layout(found, store, source=source)
        store.put_record(record, image.to_record())
        return image

    async def fill(self, folder: Path, store: Store, digest: str) -> Any:
        def work(stop: threads.Stop) -> list[str]:
            with self.path.open("rb") as file:
                return unpack(_Stoppable(file, stop), folder / "root", store.kind).skipped

        return await threads.run(work)


def recorded(store: Store, name: str) -> Image | None:
    """The image that was put under `name`; None also for what another version put there."""
    record = store.get_record(name)
    try:
        return None if record is None else Image.from_record(record)
    except ValueError:
        return None


class _Stoppable:
    """A file whose reader can be stopped."""

    def __init__(self, file: BinaryIO, stop: threads.Stop) -> None:
        self._file, self._stop = file, stop

    def read(self, size: int = -1, /) -> bytes:
        self._stop.check()
        return self._file.read(size)


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(path: Path, stop: threads.Stop) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            stop.check()
            hashed.update(chunk)
    return f"sha256:{hashed.hexdigest()}"


class _Enough(Exception):
    """Ends reading early; without an exception, what decompresses would wait to see the end of the data."""


def _holds_image(archive: Path, stop: threads.Stop) -> bool:
    """By the first file: whether it is an image's, and not of a root file system. Raises: GivenError, OSError."""
    is_image = False
    with contextlib.suppress(_Enough), _opened(archive, stop) as tar:
        for member in tar:
            top, _, rest = member.name.removeprefix("./").partition("/")
            is_image = (
                top in ("blobs", "oci-layout", "index.json", "manifest.json", "repositories")
                # as docker before version 25 names configs and layers
                or top.endswith(".json")
                or rest in ("json", "VERSION", "layer.tar")
            )
            if is_image or not member.isdir():
                raise _Enough
    return is_image


@contextlib.contextmanager
def _opened(archive: Path, stop: threads.Stop) -> Iterator[tarfile.TarFile]:
    """A tar to read from its start to its end. Raises: GivenError."""
    try:
        with (
            archive.open("rb") as file,
            decompressed(_Stoppable(file, stop)) as data,
            tarfile.open(fileobj=data, mode="r|") as tar,
        ):
            yield tar
    except (tarfile.TarError, ArchiveError, *BROKEN) as error:
        raise GivenError(f"{archive} is no whole tar: {error}") from None


def _decompress(archive: Path, target: Path, stop: threads.Stop) -> None:
    """Raises: GivenError, OSError."""
    try:
        with archive.open("rb") as file, decompressed(_Stoppable(file, stop)) as data, target.open("xb") as out:
            shutil.copyfileobj(data, out, _CHUNK)
    except (ArchiveError, *BROKEN) as error:
        raise GivenError(f"{archive} is broken or cut off: {error}") from None
