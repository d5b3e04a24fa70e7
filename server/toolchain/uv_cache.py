"""The operator's warm uv cache, which verifiers have where there is no kit: a layer of the store.

TB2_CACHE_DIR/uv-cache is any cache of uv's, filled by whatever ran with UV_CACHE_DIR set to it. No verifier sees the
folder itself: all have one copy of it in the store, each with an upper of its own (`Provided.writable`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from tbench2_env.server.images.given import Folder, GivenError
from tbench2_env.server.images.image import Image
from tbench2_env.server.images.intake import RECHECK_S, Intake
from tbench2_env.server.images.store import Lease, Store, StoreError

log = structlog.get_logger()

NAME = "uv-cache"


@dataclass(frozen=True)
class Warm:
    """The copy of the uv cache `path` that is in the folder `copy` of the store; None: there is none, and `why`."""

    path: Path
    copy: Path | None = None
    why: str = ""


class UvCache:
    """The uv cache of a server, in `store`. It is looked at every `recheck_s` seconds at most, also if that failed."""

    def __init__(self, cache_dir: Path, store: Store, recheck_s: float = RECHECK_S) -> None:
        self.path, self._store, self._recheck_s = cache_dir / NAME, store, recheck_s
        self._intake = Intake(store, recheck_s)
        self._looking = asyncio.Lock()
        self._failed: tuple[float, str] | None = None

    def exists(self) -> bool:
        return self.path.is_dir()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Warm | None]:
        """Its copy, which stays while the block runs. None: there is no such folder. Takes as long as copying it does,
        when it is new or was changed."""
        found = await self._lease() if self.exists() else None
        if isinstance(found, Lease):
            with found:
                yield Warm(self.path, self._store.root(found.layer_ids[0]).resolve())
        else:
            yield None if found is None else Warm(self.path, why=found)

    async def _lease(self) -> Lease | str:
        """Or why there is none."""
        async with self._looking:
            if self._failed is not None and time.monotonic() - self._failed[0] < self._recheck_s:
                return self._failed[1]
            try:
                lease = self._store.lease((await self._load()).layers)
            except (GivenError, StoreError, OSError) as error:
                log.warning("the uv cache cannot be used", why=str(error))
                self._failed = time.monotonic(), str(error)
                return str(error)
            self._failed = None
            return lease

    async def _load(self) -> Image:
        """Raises: GivenError, StoreError, OSError."""
        image = await self._take()
        if await self._store.verify(image.layers):  # it was damaged, and removed
            image = await self._take()
            if await self._store.verify(image.layers):
                raise StoreError("its copy in the store is damaged, and a verifier still has it")
        left_out = self._store.note(image.layers[0]).get("left_out", {})
        if unreadable := left_out.get("unreadable"):  # uv would believe that packages are complete
            raise GivenError(f"{unreadable} files or folders of it cannot be read by the server: chmod -R a+rX it")
        return image

    async def _take(self) -> Image:
        return await self._intake.load(self.path, f"uv cache {self.path}", Folder)
