"""Names and rules of the OCI image specification that reading and writing layouts have in common."""

import hashlib
import platform
import re

_OCI, _DOCKER = "application/vnd.oci.image.", "application/vnd.docker."
INDEX, MANIFEST = _OCI + "index.v1+json", _OCI + "manifest.v1+json"
CONFIG, LAYER = _OCI + "config.v1+json", _OCI + "layer.v1.tar+gzip"
INDEXES = (INDEX, _DOCKER + "distribution.manifest.list.v2+json")
MANIFESTS = (MANIFEST, _DOCKER + "distribution.manifest.v2+json")
#: media-types.md, and docker's image manifest version 2, schema 2. What each is compressed with is read from the data.
LAYERS = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(diff|foreign\.diff)\.tar(\.gzip|\.zstd)?)"
)
DIGEST = re.compile("sha256:[0-9a-f]{64}")
#: The annotation that names an image of a layout (annotations.md).
NAME = "org.opencontainers.image.ref.name"
#: This machine, as Go and so all images call it.
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
