"""How manifests and blobs come from a registry: through the host's skopeo, or the `oras` package in a process of ours.

Neither is trusted with digests: `registry` checks what arrives. Folders are of blobs, named by their hex digits.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from tbench2_env.server.images.manifests import BadManifest, Blob, Manifest, parse_manifest
from tbench2_env.server.images.oci import ARCHITECTURE
from tbench2_env.server.images.reference import Reference
from tbench2_env.server.images.tools import run_tool

#: Seconds within which a registry answers a question about a manifest, or counts as unreachable.
ANSWER_TIMEOUT_S = 10.0
_SILENCE_TIMEOUT_S = 30.0
#: As many times longer may a process of Python take that asks several questions, on a node that is busy.
_PATIENCE = 3
#: `oras_main`'s exit code for a registry that does not answer, or serves nobody now.
UNREACHABLE = 4
_FATAL = re.compile(r'level=fatal msg=("(?:\\.|[^"\\])*"|\S+)')
_IMAGE_NAME = re.compile(r'^(?:Error [^"]*"[^"]*": |initializing source \S+: )+')
_SILENT = re.compile(r"pinging container registry|\bdial |i/o timeout|toomanyrequests|TLS handshake|status: 5\d\d")


class TransportError(Exception):
    """What the registry said, or why it could not be asked. `unreachable`: it would answer nobody else now, either."""

    def __init__(self, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class Transport(Protocol):
    """References name the registry that is asked, which may be a mirror. All raise TransportError."""

    name: str

    async def describe(self, reference: Reference, folder: Path) -> Manifest:
        """Fetch the manifest for this machine and its config into `folder`."""

    async def blobs(self, reference: Reference, blobs: Collection[Blob], folder: Path) -> None:
        """Fetch blobs of the manifest `reference`, a digest, into `folder`."""


def is_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if re.search(r":\d+$", host) else host
    return name in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d+){3}", name) is not None


class Skopeo:
    """https://github.com/containers/skopeo; 1.2 and later have every option used here."""

    name = "skopeo"

    def __init__(self, program: str, docker_config: Path | None) -> None:
        # A host's policy.json may be missing or forbid everything; what is pulled runs in sandboxes only.
        self._argv = [program, "--insecure-policy", "--override-os", "linux", "--override-arch", ARCHITECTURE]
        self._docker_config = docker_config

    async def describe(self, reference: Reference, folder: Path) -> Manifest:
        raw = await self._inspect(reference)
        try:
            manifest = parse_manifest(raw, reference.digest)
        except BadManifest as error:
            raise TransportError(f"it sent {error}") from None
        if isinstance(manifest, str):
            return await self.describe(reference.at(manifest), folder)
        config = await self._inspect(reference, "--config")
        manifest.own.path(folder).write_bytes(raw)
        manifest.config.path(folder).write_bytes(config)
        return manifest

    async def blobs(self, reference: Reference, blobs: Collection[Blob], folder: Path) -> None:
        # `dir:` keeps every byte as it came; `oci:` would convert docker's manifests and recompress layers. The folder
        # is new each time: skopeo takes blobs that are there already for good.
        with tempfile.TemporaryDirectory(prefix="skopeo-", dir=folder) as copied:
            verify = ["--src-tls-verify=false"] if is_loopback(reference.registry) else []
            await self._run("copy", "--quiet", *self._login(), *verify, f"docker://{reference}", f"dir:{copied}")
            for blob in blobs:
                if blob.path(Path(copied)).exists():
                    shutil.move(blob.path(Path(copied)), blob.path(folder))

    def _login(self) -> list[str]:
        config = _existing(self._docker_config)
        return ["--authfile", str(config)] if config else []

    async def _inspect(self, reference: Reference, *options: str) -> bytes:
        verify = ["--tls-verify=false"] if is_loopback(reference.registry) else []
        argv = ["inspect", "--raw", *options, *self._login(), *verify, f"docker://{reference}"]
        return await self._run(*argv, timeout_s=ANSWER_TIMEOUT_S)

    async def _run(self, *argv: str, timeout_s: float | None = None) -> bytes:
        try:
            ran = await run_tool([*self._argv, *argv], timeout_s)
        except TimeoutError:
            raise TransportError(f"no answer within {timeout_s:g} s", unreachable=True) from None
        if ran.code == 0:
            return ran.stdout
        fatal = _FATAL.findall(ran.stderr)
        said = (json.loads(fatal[-1]) if fatal and fatal[-1][0] == '"' else ran.stderr.strip()) or f"exit {ran.code}"
        raise TransportError(_IMAGE_NAME.sub("", said), unreachable=_SILENT.search(said) is not None)


class Oras:
    """The `oras` package, in a process for each request."""

    name = "the oras package"

    def __init__(self, docker_config: Path | None) -> None:
        self._docker_config = docker_config

    async def describe(self, reference: Reference, folder: Path) -> Manifest:
        what = {"describe": reference.digest or reference.tag, "silence_s": ANSWER_TIMEOUT_S}
        said = await self._run(reference, what, folder, _PATIENCE * ANSWER_TIMEOUT_S)
        own = Blob(*json.loads(said))
        manifest = parse_manifest(own.path(folder).read_bytes(), own.digest)
        assert isinstance(manifest, Manifest)
        return manifest

    async def blobs(self, reference: Reference, blobs: Collection[Blob], folder: Path) -> None:
        what = {"blobs": [(blob.digest, blob.size) for blob in blobs], "silence_s": _SILENCE_TIMEOUT_S}
        await self._run(reference, what, folder)

    async def _run(
        self, reference: Reference, what: Mapping[str, Any], folder: Path, timeout_s: float | None = None
    ) -> bytes:
        config = _existing(self._docker_config)
        job = {
            "host": reference.registry,
            "repository": reference.repository,
            "docker_config": str(config) if config else None,
            "folder": str(folder),
            **what,
        }
        argv = [sys.executable, "-P", "-m", "tbench2_env.server.images.oras_main", json.dumps(job)]
        try:
            ran = await run_tool(argv, timeout_s)
        except TimeoutError:
            raise TransportError(f"no answer within {timeout_s:g} s", unreachable=True) from None
        if ran.code:
            raise TransportError(ran.stderr.strip().rpartition("\n")[2], unreachable=ran.code == UNREACHABLE)
        return ran.stdout


def _existing(docker_config: Path | None) -> Path | None:
    """Looked for each time: somebody may log in meanwhile, and skopeo refuses a file that is not there."""
    return docker_config if docker_config and docker_config.is_file() else None
