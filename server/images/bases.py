"""What a FROM names, as layers of the store: a base that the operator gives, or an image from a registry."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tbench2_env.server.images.archive import ArchiveError
from tbench2_env.server.images.given import Given, GivenError, recorded
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.intake import RECHECK_S, Intake
from tbench2_env.server.images.layout import Layout, LayoutError, import_layout
from tbench2_env.server.images.oci import ARCHITECTURE
from tbench2_env.server.images.reference import BadReference, Reference
from tbench2_env.server.images.registry import Registries, RegistryError
from tbench2_env.server.images.store import Store, StoreError

SCRATCH = "scratch"


class BaseUnavailable(Exception):
    """There is no image for `reference`, because of `reason`, a sentence for people."""

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(f"{reference}: {reason}")
        self.reference, self.reason = reference, reason


def parse_bases(text: str) -> dict[str, Path]:
    """TB2_BASES: `name=path` entries, separated by commas or newlines.

    A name is an image's, as in a FROM, or a pattern of names with * and ?. A path is absolute, of a folder (a root
    file system, or an OCI layout), a tar of one (.tar, .tar.gz, .tar.xz, .tar.zst), or a .sqsh.

    Raises: ValueError naming the entry and the fix.
    """
    bases: dict[str, Path] = {}
    for entry in filter(None, (each.strip() for each in re.split(r"[,\n]", text))):
        name, equals, path = (part.strip() for part in entry.partition("="))
        if not (equals and name and path):
            raise ValueError(f"{entry!r} is no base: give name=path, such as python:3.13*=/bases/trixie")
        if name in bases:
            raise ValueError(f"{entry!r}: {name} is given twice; keep one of its entries")
        try:
            Given.at(Path(path))
        except GivenError as error:
            raise ValueError(f"{entry!r}: {error}") from None
        bases[name] = Path(path)
    return bases


class Bases:
    """Finds images by name, the operator's `named` first: one of just that name, then the first pattern that fits.

    An image from a registry is pinned: what its tag meant when it was pulled first is in the store's records, and used
    until that record is gone. `recheck_s`: a base of the operator's is looked at for changes as often as that.
    """

    def __init__(
        self,
        named: Mapping[str, Path],
        registries: Registries,
        store: Store,
        *,
        pull_timeout_s: float = 3600.0,
        recheck_s: float = RECHECK_S,
    ) -> None:
        self._named, self._registries, self._store = dict(named), registries, store
        self._pull_timeout_s, self._intake = pull_timeout_s, Intake(store, recheck_s)

    async def resolve(self, reference: str) -> Image:
        """The image, all its layers being in the store at this moment: lease them, or ask again.

        Raises: BaseUnavailable.
        """
        try:
            if reference == SCRATCH:
                return Image((), ImageConfig(), SCRATCH, SCRATCH)
            if entry := self._find(reference):
                name, path = entry
                return await self._intake.load(path, f"TB2_BASES {name}={path}")
            return await self._pulled(Reference.parse(reference))
        except (BadReference, GivenError, RegistryError, StoreError, ArchiveError, LayoutError) as error:
            raise BaseUnavailable(reference, str(error)) from error
        except OSError as error:
            raise BaseUnavailable(reference, f"the node failed: {error}") from error

    def _find(self, reference: str) -> tuple[str, Path] | None:
        names = _names(reference)
        for name, path in self._named.items():
            if names & _names(name):
                return name, path
        for name, path in self._named.items():
            if any(fnmatchcase(each, name) for each in names):
                return name, path
        return None

    async def _pulled(self, reference: Reference) -> Image:
        record = f"image {reference} linux/{ARCHITECTURE}"
        known = recorded(self._store, record)
        if known and self._has(known):
            return known
        if not self._registries.pulls:
            advice = f"add {reference.familiar}=/path to TB2_BASES"
            raise RegistryError(f"nothing of TB2_BASES matches it, and TB2_REGISTRY is none: {advice}")
        name = f"pull-{hashlib.sha256(record.encode()).hexdigest()[:32]}"
        async with self._store.workplace(name) as folder:
            known = recorded(self._store, record)  # somebody else may have pulled it meanwhile
            if known and self._has(known):
                return known
            pinned = known.digest if known else None
            pulled = await self._registries.pull(
                reference, folder / "layout", pinned, self._lacking, self._pull_timeout_s
            )
            image = await import_layout(Layout(pulled.folder), self._store, source=pulled.source)
            self._store.put_record(record, image.to_record())
            return image

    def _lacking(self, layer_ids: Sequence[str]) -> list[str]:
        return [each for each in layer_ids if not self._store.has(each)]

    def _has(self, image: Image) -> bool:
        return all(map(self._store.has, image.layers))


def _names(reference: str) -> set[str]:
    """What the image may be called: as it is written, in short and in full."""
    try:
        parsed = Reference.parse(reference)
    except BadReference:
        return {reference}
    return {reference, parsed.familiar, str(parsed)}
