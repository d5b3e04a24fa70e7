"""OCI image layouts, and what `docker save` writes, into a store.

A layout (opencontainers/image-spec image-layout.md) names every blob by its digest, and no blob is used before its
size and digest are checked. Layers get the digest of their uncompressed archive as their id in the store, so images
share them whatever they are compressed with.
"""

import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tbench2_env.server import threads
from tbench2_env.server.images import content, oci
from tbench2_env.server.images.archive import ArchiveError, unpack
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.kind import Kind
from tbench2_env.server.images.store import Store

#: Manifests are at most as large in registries (distribution-spec, Pushing Manifests); configurations are small too.
_JSON_MAX_BYTES = 4 << 20
_CHUNK = 1 << 20
_AT_ONCE = 2
_LINKS_MAX = 8


class LayoutError(ValueError):
    """A layout is not one, lacks what was asked for, or has what is not supported."""


class BlobCorrupt(LayoutError):
    """A blob is missing, cut off or altered: fetch it again."""


@dataclass(frozen=True)
class Blob:
    """A file of a layout. Without a digest, in an old `docker save`, only what is in it can be checked."""

    file: str
    digest: str = ""
    size: int | None = None

    @property
    def label(self) -> str:
        return self.digest or self.file


@dataclass(frozen=True)
class Manifest:
    """One image of a layout. Layers and the digests of their uncompressed archives, in hex: the lowest first."""

    digest: str
    config: ImageConfig
    layers: tuple[Blob, ...]
    diff_ids: tuple[str, ...]


class Layout:
    """The folder, or the uncompressed tar, at `path`."""

    def __init__(self, path: Path) -> None:
        """Raises: LayoutError."""
        self.path = path
        self._open: Callable[[str], BinaryIO] = _Folder(path) if path.is_dir() else _Tar(path)

    def manifest(self, reference: str | None = None) -> Manifest:
        """The image called `reference` (the annotation org.opencontainers.image.ref.name, or a tag of docker's).

        None: the only one for this machine.

        Raises:
            BlobCorrupt: the manifest or the configuration is.
            LayoutError: there is no such image, or several, or one for another machine.
        """
        index = self._read_file("index.json")
        if index is None:
            return self._saved_by_docker(reference)
        blob = self._choose(_object(index, "index.json"), reference)
        document = self._json(blob)
        config = self._json(_blob(_object(document.get("config"), "config of the manifest")))
        layers = [_object(entry, "layer of the manifest") for entry in _list(document, "layers")]
        for layer in layers:
            if not oci.LAYERS.fullmatch(str(layer.get("mediaType"))):
                raise LayoutError(f"{self.path}: a layer of the type {layer.get('mediaType')} cannot be unpacked")
        return self._manifest(blob.digest, config, tuple(map(_blob, layers)))

    def check(self, blob: Blob, stop: threads.Stop) -> None:
        """Raises: BlobCorrupt; Stopped, by `stop`."""
        hashed, size = hashlib.sha256(), 0
        with self.open(blob) as file:
            while data := file.read(_CHUNK):
                stop.check()
                hashed.update(data)
                size += len(data)
        self._compare(blob, size, f"sha256:{hashed.hexdigest()}")

    def open(self, blob: Blob) -> BinaryIO:
        """Raises: BlobCorrupt, when it is missing."""
        try:
            return self._open(blob.file)
        except FileNotFoundError:
            raise BlobCorrupt(f"{self.path}: the blob {blob.label} is missing") from None

    def _compare(self, blob: Blob, size: int, digest: str) -> None:
        if blob.size is not None and size != blob.size:
            raise BlobCorrupt(f"{self.path}: the blob {blob.label} has {size} bytes instead of {blob.size}")
        if blob.digest and digest != blob.digest:
            raise BlobCorrupt(f"{self.path}: the blob {blob.label} is corrupt: it has the digest {digest}")

    def _choose(self, index: Mapping[str, Any], reference: str | None, depth: int = 0) -> Blob:
        """The manifest in an index, which may hold further indexes, one manifest for each kind of machine."""
        entries = [_object(entry, "manifest of the index") for entry in _list(index, "manifests")]
        fitting = [entry for entry in entries if _fits(entry) and (reference is None or reference in _names(entry))]
        found = {str(entry.get("digest")): entry for entry in fitting}
        if len(found) != 1:
            names = ", ".join(sorted({name for entry in entries for name in _names(entry)})) or "none"
            wanted = f" called {reference}" if reference else ""
            raise LayoutError(
                f"{self.path}: {len(found)} images{wanted} for linux/{oci.ARCHITECTURE}, where one is wanted; "
                f"names: {names}"
            )
        (entry,) = found.values()
        blob = _blob(entry)
        media_type = entry.get("mediaType") or self._json(blob).get("mediaType") or oci.MANIFEST
        if media_type in oci.INDEXES and depth < _LINKS_MAX:
            return self._choose(self._json(blob), None, depth + 1)
        if media_type not in oci.MANIFESTS:
            raise LayoutError(f"{self.path}: a manifest of the type {media_type} is not supported: convert the image")
        return blob

    def _saved_by_docker(self, reference: str | None) -> Manifest:
        """manifest.json as `docker save` wrote it before it wrote layouts, and still does beside them."""
        saved = self._read_file("manifest.json")
        if saved is None:
            raise LayoutError(f"{self.path}: neither index.json nor manifest.json: this is no image layout")
        images = [
            _object(entry, "image of manifest.json") for entry in _list({"manifest.json": saved}, "manifest.json")
        ]
        found = [image for image in images if reference is None or reference in (image.get("RepoTags") or ())]
        if len(found) != 1:
            tags = ", ".join(tag for image in images for tag in image.get("RepoTags") or ()) or "none"
            raise LayoutError(f"{self.path}: {len(found)} images, where one is wanted; tags: {tags}")
        name = str(found[0].get("Config"))
        inner = re.search("[0-9a-f]{64}", name)
        blob = Blob(name, f"sha256:{inner[0]}" if inner else "")
        layers = tuple(Blob(str(layer)) for layer in _list(found[0], "Layers"))
        config = self._json(blob)
        return self._manifest(blob.digest or oci.digest(json.dumps(config).encode()), config, layers)

    def _manifest(self, digest: str, document: Mapping[str, Any], layers: tuple[Blob, ...]) -> Manifest:
        machine = f"{document.get('os', 'linux')}/{document.get('architecture', oci.ARCHITECTURE)}"
        if machine != f"linux/{oci.ARCHITECTURE}":
            raise LayoutError(f"{self.path}: the image is for {machine}, and this machine is linux/{oci.ARCHITECTURE}")
        diff_ids = [str(each) for each in _list(_object(document.get("rootfs"), "rootfs"), "diff_ids")]
        if len(diff_ids) != len(layers) or not all(map(oci.DIGEST.fullmatch, diff_ids)):
            raise LayoutError(f"{self.path}: {len(layers)} layers, but rootfs.diff_ids are {str(diff_ids)[:200]}")
        try:
            config = ImageConfig.from_oci(document)
        except ValueError as error:
            raise LayoutError(f"{self.path}: {error}") from None
        return Manifest(digest, config, layers, tuple(each.removeprefix("sha256:") for each in diff_ids))

    def _json(self, blob: Blob) -> dict[str, Any]:
        with self.open(blob) as file:
            data = file.read(_JSON_MAX_BYTES + 1)
        self._compare(blob, len(data), oci.digest(data))
        return _object(self._parse(data, blob.label), blob.label)

    def _read_file(self, name: str) -> Any:
        try:
            with self._open(name) as file:
                return self._parse(file.read(_JSON_MAX_BYTES), name)
        except FileNotFoundError:
            return None

    def _parse(self, data: bytes, name: str) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise LayoutError(f"{self.path}: {name}: {error}") from None


# ---------------------------------------------------------------- into a store
async def import_layout(layout: Layout, store: Store, reference: str | None = None, source: str = "") -> Image:
    """Have the layers of one of the layout's images in the store; `source` is what the image says of its origin.

    Raises: BlobCorrupt, LayoutError, ArchiveError, and as `Layout.manifest` and `Store.make`; what was made stays.
    """
    manifest = await threads.run(lambda stop: layout.manifest(reference))
    source = source or f"{layout.path}@{manifest.digest}"
    blobs = dict(zip(manifest.diff_ids, manifest.layers, strict=True))

    async def have(diff_id: str) -> None:
        note: dict[str, Any] = {"source": source, "blob": blobs[diff_id].label}

        async def fill(folder: Path) -> None:
            unpacking = threads.run(
                lambda stop: _unpack(layout, blobs[diff_id], diff_id, _Place(folder, store.kind, stop))
            )
            if skipped := await unpacking:
                note["skipped"] = skipped

        await store.make(diff_id, fill, note)

    await threads.gather([partial(have, diff_id) for diff_id in blobs], _AT_ONCE)
    return Image(_visible(manifest.diff_ids, store), manifest.config, manifest.digest, source)


@dataclass(frozen=True)
class _Place:
    folder: Path
    kind: Kind
    stop: threads.Stop


def _unpack(layout: Layout, blob: Blob, diff_id: str, place: _Place) -> list[str]:
    layout.check(blob, place.stop)
    hashed = hashlib.sha256()

    def watch(data: bytes) -> None:
        place.stop.check()
        hashed.update(data)

    with layout.open(blob) as file:
        try:
            report = unpack(file, place.folder / "root", place.kind, watch)
        except ArchiveError as error:
            raise ArchiveError(f"{layout.path}: layer {blob.label}: {error}") from error
    if hashed.hexdigest() != diff_id:
        raise BlobCorrupt(
            f"{layout.path}: the layer {blob.label} is corrupt: unpacked it is sha256:{hashed.hexdigest()}, and its "
            f"image says sha256:{diff_id}"
        )
    return report.skipped


def _visible(diff_ids: Sequence[str], store: Store) -> tuple[str, ...]:
    """The layers, topmost first. overlayfs takes each once, so of equal ones the topmost, which hides the others; and
    does not mind that the root of one is opaque, so that one is the last."""
    layers: dict[str, None] = {}
    for diff_id in reversed(diff_ids):
        layers[diff_id] = None
        if content.is_opaque(store.root(diff_id), store.kind):
            break
    return tuple(layers)


# ---------------------------------------------------------------- files
class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, name: str) -> BinaryIO:
        return (self._path / name).open("rb")


class _Tar:
    """Files of an uncompressed tar, each with a descriptor of its own, so that threads can read several at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with tarfile.open(path, "r:") as tar:
                self._members = {posixpath.normpath(member.name): member for member in tar}
        except (tarfile.TarError, FileNotFoundError) as error:
            raise LayoutError(f"{path}: neither a folder nor an uncompressed tar ({error}): unpack it first") from None

    def __call__(self, name: str) -> BinaryIO:
        """docker saves a layer that several images have once, and as links."""
        for _ in range(_LINKS_MAX):
            member = self._members.get(posixpath.normpath(name))
            if member is not None and member.isreg():
                return io.BufferedReader(_Section(self._path, member), _CHUNK)
            if member is None or not (member.issym() or member.islnk()):
                break
            name = posixpath.join(posixpath.dirname(member.name) if member.issym() else "", member.linkname)
        raise FileNotFoundError(name)


class _Section(io.RawIOBase):
    def __init__(self, path: Path, member: tarfile.TarInfo) -> None:
        self._file, self._left = path.open("rb"), member.size
        self._file.seek(member.offset_data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), self._left))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


# ---------------------------------------------------------------- documents
def _blob(descriptor: Mapping[str, Any]) -> Blob:
    digest, size = descriptor.get("digest"), descriptor.get("size")
    if not isinstance(digest, str) or not oci.DIGEST.fullmatch(digest) or not isinstance(size, int):
        raise LayoutError(f"no descriptor with the sha256 and the size of a blob: {str(descriptor)[:200]}")
    return Blob(f"blobs/sha256/{digest.removeprefix('sha256:')}", digest, size)


def _fits(entry: Mapping[str, Any]) -> bool:
    machine = entry.get("platform")
    return not isinstance(machine, dict) or (machine.get("os"), machine.get("architecture")) == (
        "linux",
        oci.ARCHITECTURE,
    )


def _names(entry: Mapping[str, Any]) -> list[str]:
    annotations = entry.get("annotations") or {}
    return [annotations[key] for key in (oci.NAME, "io.containerd.image.name") if key in annotations]


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LayoutError(f"{what}: no JSON object: {str(value)[:80]!r}")
    return value


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    value = document.get(name)
    if not isinstance(value, list):
        raise LayoutError(f"{name}: no JSON array: {str(value)[:80]!r}")
    return value
