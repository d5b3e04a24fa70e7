"""An image of a store as an OCI image layout, which docker, podman and skopeo load."""

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tbench2_env.server import threads
from tbench2_env.server.images import oci
from tbench2_env.server.images.archive import Writable, pack
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.layout import LayoutError
from tbench2_env.server.images.store import Store

_AT_ONCE = 2
#: Written layers say nothing of when they were made, so that the same environment is the same image.
_CREATED = "1970-01-01T00:00:00Z"


async def write_layout(target: Path, image: Image, store: Store, name: str) -> str:
    """Make the folder `target`, a layout with the one image, called `name`; answers with its manifest's digest.

    What a layer's note has as `created_by` becomes its line in the image's history.

    Raises: LayoutError when `target` exists; MissingLayer; ArchiveError, for what no image can hold; OSError.
    """
    fresh = _new_folder(target)
    try:
        with store.lease(image.layers):
            lowest_first = image.layers[::-1]
            works = [partial(threads.run, partial(_pack, layer_id, store, fresh)) for layer_id in lowest_first]
            packed = await threads.gather(works, _AT_ONCE)
            history = [str(store.note(layer_id).get("created_by", "")) for layer_id in lowest_first]
        digest = await threads.finish(lambda: _describe(fresh, image.config, packed, history, name))
        fresh.rename(target)
    except BaseException:
        await threads.finish(lambda: shutil.rmtree(fresh))
        raise
    return digest


def _new_folder(target: Path) -> Path:
    if os.path.lexists(target):
        raise LayoutError(f"{target} exists: remove it, or choose another folder")
    fresh = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    (fresh / "blobs/sha256").mkdir(parents=True)
    return fresh


@dataclass(frozen=True)
class _Packed:
    digest: str
    size: int
    diff_id: str


def _pack(layer_id: str, store: Store, layout: Path, stop: threads.Stop) -> _Packed:
    path = layout / f"blobs/sha256/.{layer_id}"
    with path.open("xb") as file:
        blob = _Hashed(file, stop)
        with gzip.GzipFile(filename="", mode="wb", fileobj=blob, mtime=0, compresslevel=6) as compressed:
            archive = _Hashed(compressed, stop)
            pack(store.root(layer_id), archive, store.kind)
    path.rename(path.with_name(blob.hex))
    return _Packed(f"sha256:{blob.hex}", blob.size, f"sha256:{archive.hex}")


class _Hashed:
    """Passes on what is written to it."""

    def __init__(self, out: Writable, stop: threads.Stop) -> None:
        self._out, self._stop, self._hash, self.size = out, stop, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._stop.check()
        self._hash.update(data)
        self.size += len(data)
        self._out.write(data)
        return len(data)

    def flush(self) -> None:
        """For gzip, which means nothing by it."""

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()


def _describe(layout: Path, config: ImageConfig, packed: Sequence[_Packed], history: Sequence[str], name: str) -> str:
    """Write all but the layers: opencontainers/image-spec config.md, manifest.md, image-index.md, image-layout.md."""
    configuration = _put(layout, oci.CONFIG, {
        "created": _CREATED, "architecture": oci.ARCHITECTURE, "os": "linux", "config": config.to_oci(),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in packed]},
        "history": [{"created": _CREATED, "created_by": text} for text in history],
    })  # fmt: skip
    layers = [{"mediaType": oci.LAYER, "digest": layer.digest, "size": layer.size} for layer in packed]
    document = {"schemaVersion": 2, "mediaType": oci.MANIFEST, "config": configuration, "layers": layers}
    manifest = _put(layout, oci.MANIFEST, document)
    index = {"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": [{**manifest, "annotations": {oci.NAME: name}}]}
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return str(manifest["digest"])


def _put(layout: Path, media_type: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write a blob; answers with its descriptor."""
    data = json.dumps(document).encode()
    digest = oci.digest(data)
    (layout / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}
