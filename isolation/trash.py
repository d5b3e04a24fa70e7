"""Discarded worktrees: the spawner renames them away, which takes no time, and the server deletes them later."""

import concurrent.futures
import contextlib
import os
from pathlib import Path

from tbench2_env.isolation import worktree

_AT_ONCE = 2


class Trash:
    """What is discarded in the scratch folder `folder`, until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trash"
        self._cleaners = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "discard")

    def delete(self, name: str) -> None:
        """Delete a discarded worktree in the background, with whatever it left of its verifiers."""
        with contextlib.suppress(RuntimeError):  # closed: the spawner removes the whole folder
            self._cleaners.submit(self._delete, name)

    def _delete(self, name: str) -> None:
        for folder in [self._folder / name, *self._folder.glob(f"{name}.*")]:
            # An end may be heard of twice; two deletions of one folder would each miss what the other is at.
            own = self._folder / f".deleting-{os.urandom(8).hex()}"
            with contextlib.suppress(FileNotFoundError):
                folder.rename(own)
                worktree.delete(str(own))

    def close(self) -> None:
        """Finish what was begun. Blocks."""
        self._cleaners.shutdown()
