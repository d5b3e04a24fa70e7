"""What an image is made of, in a registry's words: manifests and indexes of OCI's image-spec, or docker's schema 2."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tbench2_env.server.images import oci


class BadManifest(ValueError):
    """It does not describe an image for this machine; the text completes "the registry sent …"."""


@dataclass(frozen=True)
class Blob:
    """A part of an image: "sha256:" and hex, and its bytes."""

    digest: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> "Blob":
        return cls(oci.digest(data), len(data))

    def path(self, folder: Path) -> Path:
        """Where it lies in a folder of blobs."""
        return folder / self.digest.removeprefix("sha256:")

    def is_whole(self, folder: Path) -> bool:
        path = self.path(folder)
        if not path.exists() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == path.name


@dataclass(frozen=True)
class Manifest:
    """What names an image's parts; of them, what says more than how large they are."""

    own: Blob
    media_type: str
    config: Blob


def parse_manifest(raw: bytes, digest: str | None) -> Manifest | str:
    """The manifest, or, of an index, the digest of this machine's manifest.

    Raises: BadManifest, also when `digest` was asked for and `raw` has another.
    """
    if digest is not None and oci.digest(raw) != digest:
        raise BadManifest(f"{oci.digest(raw)} for {digest}")
    data = _object(raw)
    if "manifests" in data:
        return _ours(data)
    try:
        media_type = data.get("mediaType", oci.MANIFEST)
        return Manifest(Blob.of(raw), str(media_type), _blob(data["config"]))
    except (KeyError, TypeError, ValueError):
        raise BadManifest("a manifest that names no config by its sha256 digest") from None


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        data = json.loads(raw)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise BadManifest("a manifest that is no JSON object")
    return data


def _blob(descriptor: Mapping[str, Any]) -> Blob:
    """Raises: KeyError, TypeError, ValueError."""
    digest, size = descriptor["digest"], int(descriptor["size"])
    if not oci.DIGEST.fullmatch(digest):
        raise ValueError(digest)
    return Blob(digest, size)


def _ours(index: Mapping[str, Any]) -> str:
    """image-spec, image-index.md."""
    ours = f"linux/{oci.ARCHITECTURE}"
    try:
        platforms = [each.get("platform", {}) for each in index["manifests"]]
        names = [f"{each.get('os')}/{each.get('architecture')}" for each in platforms]
        if ours in names:
            return _blob(index["manifests"][names.index(ours)]).digest
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadManifest("an index that names no manifests by sha256 digests") from None
    raise BadManifest(f"an image for {', '.join(names) or 'no machine'}, and not for {ours}")
