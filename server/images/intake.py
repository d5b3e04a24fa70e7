"""Taking what the operator gives into the store, and again when it has changed."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tbench2_env.server.images.given import Given
from tbench2_env.server.images.image import Image
from tbench2_env.server.images.store import Store

#: Seconds between two looks at whether something has changed.
RECHECK_S = 30.0


class Intake:
    """Has what is given in `store`. Each of it is looked at every `recheck_s` seconds at most, and by one at a time."""

    def __init__(self, store: Store, recheck_s: float = RECHECK_S) -> None:
        self._store, self._recheck_s = store, recheck_s
        self._looking: dict[Path, asyncio.Lock] = {}
        self._seen: dict[Path, tuple[float, Image]] = {}

    async def load(self, path: Path, source: str, given: Callable[[Path], Given] = Given.at) -> Image:
        """What `given` makes of `path`, all its layers being in the store at this moment. `source` is as in `Given`.

        Raises: GivenError, LayoutError, ArchiveError, StoreError, OSError.
        """
        async with self._looking.setdefault(path, asyncio.Lock()):
            seen_at, image = self._seen.get(path, (0.0, None))
            if image is None or time.monotonic() - seen_at >= self._recheck_s or not self._has(image):
                image = await given(path).load(self._store, source)
                self._seen[path] = (time.monotonic(), image)
            return image

    def _has(self, image: Image) -> bool:
        return all(map(self._store.has, image.layers))
