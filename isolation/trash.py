"""Discarded worktrees: the spawner renames them away, which takes no time, and the server deletes them later."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from pathlib import Path

from tbench2_env.isolation import worktree

#: Seconds from a worktree's end to its deletion: by then, the next episode may have begun, and more have ended.
_PAUSE_S = 0.05
_AT_ONCE = 2
#: With more in the trash than this, nothing new is made: a disk must not fill up because deleting is slower.
_FULL = 256


class Trash:
    """What is discarded in the scratch folder `folder`, deleted by threads until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/trash"
        self._wanted, self._closed = threading.Event(), False
        #: Names of what could not be deleted, and the number of what can be, but has not been yet.
        self._left: set[str] = set()
        self._waiting = 0
        # A deletion waits for the disk most of the time.
        self._cleaners = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "trash")
        self._thread = threading.Thread(target=self._run, name="trash", daemon=True)
        self._thread.start()

    def delete_soon(self) -> None:
        """Something was discarded."""
        self._wanted.set()

    async def room(self) -> None:
        """Return once there is little to be deleted."""
        while self._waiting > _FULL:  # noqa: ASYNC110 - a thread counts
            await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        """Delete no more than what is being deleted. Blocks."""
        self._closed = True
        self._wanted.set()
        self._thread.join()
        self._cleaners.shutdown()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            if not self._closed:
                time.sleep(_PAUSE_S)
            self._wanted.clear()
            with contextlib.suppress(FileNotFoundError):  # the spawner has ended, and removed it all
                self._delete()

    def _delete(self) -> None:
        names = [name for name in os.listdir(self._folder) if name not in self._left]
        self._waiting = len(names)
        for done, _ in enumerate(self._cleaners.map(self._delete_one, names), start=1):
            self._waiting = len(names) - done

    def _delete_one(self, name: str) -> None:
        if not self._closed:
            worktree.delete(f"{self._folder}/{name}")
            if os.path.lexists(f"{self._folder}/{name}"):
                self._left.add(name)
