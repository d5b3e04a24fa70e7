"""Images from registries, as OCI layouts on disk: which server is asked, what is fetched, and that it is whole."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from tbench2_env.server import threads
from tbench2_env.server.images import oci
from tbench2_env.server.images.layout import Layout, LayoutError
from tbench2_env.server.images.manifests import Blob, Manifest
from tbench2_env.server.images.reference import DOCKER_HUB, BadReference, Reference
from tbench2_env.server.images.transports import Oras, Skopeo, Transport, TransportError

#: Seconds for which a registry that did not answer is not asked again.
REMEMBERED_S = 300.0
_TRIES = 2
#: Gets the ids of an image's layers in a store, and answers with those that are to be fetched.
Wanted = Callable[[Sequence[str]], Collection[str]]


class RegistryError(Exception):
    """An image cannot be had; one sentence says which registry said what."""


@dataclass(frozen=True)
class PulledLayout:
    """An OCI image layout with one image. Blobs of layers that were not wanted are absent from it."""

    folder: Path
    digest: str  # of the manifest for this machine
    source: str  # for people: registry/repository@digest


def parse_registries(text: str) -> tuple[str, ...]:
    """TB2_REGISTRY: servers that have Docker Hub's images, in the order in which they are asked; `none`: no server.

    An entry is host[:port], with /prefix where a mirror keeps Docker Hub's repositories below one.

    Raises: ValueError.
    """
    servers = tuple(each.strip() for each in text.split(",") if each.strip())
    if servers == ("none",):
        return ()
    for server in servers:
        try:
            Reference.parse(f"{server}/library/image")
            good = "/" not in server.split("/")[0] and _has_host(server)
        except BadReference:
            good = False
        if not good:
            raise ValueError(f"{server!r} is no registry: give host[:port][/prefix], without https://, or only `none`")
    if not servers:
        raise ValueError("names no registry: give host[:port][/prefix], comma-separated, or `none`")
    return servers


class Registries:
    """Where images come from: `servers` for Docker Hub's, and for others the registry that their name begins with.

    No `servers`: nothing is ever pulled. `docker_config` is where docker's config.json with credentials may be;
    `skopeo` is the program's path, and without it the `oras` package is used.
    """

    def __init__(
        self, servers: Sequence[str] = (DOCKER_HUB,), docker_config: Path | None = None, skopeo: str | None = None
    ) -> None:
        self._servers = tuple(servers)
        self._transport: Transport = Skopeo(skopeo, docker_config) if skopeo else Oras(docker_config)
        self._answered: set[str] = set()
        self._silent: dict[str, tuple[float, str]] = {}
        self._first_contact: dict[str, asyncio.Lock] = {}

    @classmethod
    def parse(cls, text: str, docker_config: Path | None = None) -> Self:
        """With `parse_registries(text)` and the host's skopeo. Raises: ValueError."""
        return cls(parse_registries(text), docker_config, shutil.which("skopeo"))

    def describe(self) -> str:
        """For people: which are asked, and by what."""
        return f"{', '.join(self._servers)}, by {self._transport.name}" if self.pulls else "none"

    @property
    def pulls(self) -> bool:
        return bool(self._servers)

    async def pull(
        self,
        reference: Reference,
        into: Path,
        pinned: str | None,
        wanted: Wanted,
        timeout_s: float,
    ) -> PulledLayout:
        """Fetch `reference`, at the manifest digest `pinned` if there is one, into the folder `into`, made if absent.

        Raises:
            RegistryError: no registry has it, or none can be reached; every layer that did arrive is whole.
            OSError: the disk failed.
        """
        if not self.pulls:
            raise RegistryError(f"{reference.familiar} is not pulled, because TB2_REGISTRY is none")
        reasons = []
        try:
            async with asyncio.timeout(timeout_s):
                for place in self._places(reference.at(pinned) if pinned else reference):
                    try:
                        return await self._pull_from(place, into, wanted)
                    except TransportError as error:
                        reasons.append(f"{place.registry}: {error}")
                        shutil.rmtree(into, ignore_errors=True)
        except TimeoutError:
            reasons.append(f"it was not here after {timeout_s:g} s")
        pin = f" at its pinned digest {pinned}" if pinned else ""
        raise RegistryError(f"{reference.familiar}{pin} could not be pulled: {'; '.join(reasons)}")

    def _places(self, reference: Reference) -> list[Reference]:
        """What to ask for, and where: at each mirror, or at the image's own registry."""
        if reference.registry != DOCKER_HUB:
            return [reference]
        places = []
        for server in self._servers:
            host, _, prefix = server.partition("/")
            places.append(replace(reference, registry=host, repository=f"{prefix}/{reference.repository}".lstrip("/")))
        return places

    async def _pull_from(self, place: Reference, into: Path, wanted: Wanted) -> PulledLayout:
        blobs = into / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        manifest = await self._describe(place, blobs)
        _write_index(into, manifest)
        try:
            found = Layout(into).manifest()
        except LayoutError as error:
            raise TransportError(f"it sent what is no image for this machine: {error}") from None
        chosen = set(wanted(found.diff_ids))
        layers = zip(found.diff_ids, found.layers, strict=True)
        missing = [Blob(blob.digest, blob.size or 0) for diff_id, blob in layers if diff_id in chosen]
        place = place.at(manifest.own.digest)
        await self._fetch(place, missing, blobs)
        return PulledLayout(into, manifest.own.digest, str(place))

    async def _describe(self, place: Reference, blobs: Path) -> Manifest:
        """Fetch manifest and config. A server that fails to answer is remembered."""
        async with AsyncExitStack() as stack:
            if place.registry not in self._answered:  # not 64 resets at once that each wait for nothing
                lock = self._first_contact.setdefault(place.registry, asyncio.Lock())
                await stack.enter_async_context(lock)
            until, reason = self._silent.get(place.registry, (0.0, ""))
            if (left_s := until - time.monotonic()) > 0:
                raise TransportError(f"{reason} (not asked again for {left_s:.0f} s)")
            try:
                manifest = await self._transport.describe(place, blobs)
            except TransportError as error:
                if error.unreachable:
                    self._answered.discard(place.registry)
                    self._silent[place.registry] = (time.monotonic() + REMEMBERED_S, str(error))
                raise
            self._answered.add(place.registry)
        for blob in (manifest.own, manifest.config):
            if not blob.is_whole(blobs):
                raise TransportError(f"{blob.digest} did not arrive whole")
        return manifest

    async def _fetch(self, place: Reference, blobs: Collection[Blob], folder: Path) -> None:
        """Have whole `blobs` in `folder`: what is corrupted or cut short is thrown away and fetched once more."""
        missing, error = list(blobs), TransportError("")
        for _ in range(_TRIES):
            if not missing:
                return
            try:
                await self._transport.blobs(place, missing, folder)
            except TransportError as failure:
                error = failure
            missing = await threads.finish(partial(_lacking, missing, folder))
        if missing:
            said = f": {error}" if str(error) else ""
            raise TransportError(f"{missing[0].digest} did not arrive whole in {_TRIES} tries{said}")


def _has_host(server: str) -> bool:
    return Reference.parse(f"{server}/library/image").registry == server.partition("/")[0]


def _lacking(blobs: Collection[Blob], folder: Path) -> list[Blob]:
    """Those that are not there and whole; what is there of them is removed."""
    lacking = [each for each in blobs if not each.is_whole(folder)]
    for each in lacking:
        each.path(folder).unlink(missing_ok=True)
    return lacking


def _write_index(folder: Path, manifest: Manifest) -> None:
    """image-spec, image-layout.md."""
    entry = {"mediaType": manifest.media_type, "digest": manifest.own.digest, "size": manifest.own.size}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
