"""The folders of a store: where layers are, appear and vanish, and what dead processes left there."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tbench2_env.isolation import worktree
from tbench2_env.server.images import locks
from tbench2_env.server.images.kind import Kind
from tbench2_env.server.images.records import Records, read_json, sync_folder

_ID = re.compile("[0-9A-Za-z][0-9A-Za-z_-]{0,127}")


class StoreError(RuntimeError):
    """The store cannot do it; the text says why and what to change."""


class StoreReadOnly(StoreError):
    """Something is missing and cannot be made here."""


class LayerInUse(StoreError):
    """`ids` are leased, here or by another process."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"in use by an episode or a build: {', '.join(ids)}; end it first")
        self.ids = tuple(ids)


class Shelves:
    """Paths below `folder`, which holds layers of `kind`; nothing is written before `prepare`."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder, self._kind = folder, kind
        self.records = Records(folder / "images")
        self._preparing = threading.Lock()
        self._is_prepared = False

    def layer(self, layer_id: str) -> Path:
        if not _ID.fullmatch(layer_id):
            raise ValueError(f"{layer_id!r} is no id of a layer: letters, digits, - and _")
        return self.folder / "layers" / layer_id

    def lock(self, layer_id: str) -> Path:
        """Locked exclusively by who makes the layer."""
        return self.folder / "locks" / layer_id

    def new_folder(self, layer_id: str) -> Path:
        """A name to make the layer under, or to remove it under."""
        return self.folder / "making" / f"{layer_id}.{os.urandom(8).hex()}"

    def layer_ids(self) -> list[str]:
        return self._ids("layers")

    def describe(self, layer_id: str) -> dict[str, Any] | None:
        """The layer's layer.json; None when there is no such layer, or no sense in what it says of itself."""
        found = read_json(self.layer(layer_id) / "layer.json")
        is_whole = found is not None and isinstance(found.get("digest"), str) and isinstance(found.get("bytes"), int)
        return found if is_whole and (self.layer(layer_id) / "root").is_dir() else None

    def lock_layer(self, layer_id: str, kind: int) -> int | None:
        """A descriptor that holds the lock of a layer that is there, or None. Raises: FileNotFoundError."""
        return locks.try_lock(self.layer(layer_id) / "layer.json", kind)

    def publish(self, layer_id: str, folder: Path) -> None:
        """Give a finished layer, whose bytes are on the disk, its name. Raises: LayerInUse."""
        self.clear(layer_id)
        folder.rename(self.layer(layer_id))
        sync_folder(self.folder / "layers")

    def move_away(self, layer_id: str) -> Path:
        """Where nobody looks for a layer. Whoever calls this holds its lock."""
        target = self.new_folder(layer_id)
        self.layer(layer_id).rename(target)
        return target

    def clear(self, layer_id: str) -> None:
        """Remove what is in the layer's place without being one. Raises: LayerInUse, if it was one and is leased."""
        if not os.path.lexists(self.layer(layer_id)):
            return
        fd = None
        with contextlib.suppress(FileNotFoundError):
            fd = self.lock_layer(layer_id, fcntl.LOCK_EX)
            if fd is None:
                raise LayerInUse([layer_id])
        try:
            worktree.delete(str(self.move_away(layer_id)))
        finally:
            if fd is not None:
                os.close(fd)

    def prepare(self) -> None:
        """Once, before anything is written: folders, whether layers can be kept here, what dead processes left.

        Raises: StoreError, StoreReadOnly.
        """
        with self._preparing:
            if self._is_prepared:
                return
            try:
                # Programs of an image may be setuid, and nobody else on the node should be able to run them.
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name in ("layers", "locks", "making", "images", "logs"):
                    (self.folder / name).mkdir(exist_ok=True)
                self._probe()
                self.sweep()
            except OSError as error:
                raise self.unwritable(error) from error
            self._is_prepared = True

    def unwritable(self, error: OSError) -> StoreError:
        """What `error`, met in writing to the store, means."""
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreError(f"the store cannot be written to: {error}")
        return StoreReadOnly(
            f"{self.folder} cannot be written to ({error.strerror}), and what is needed is not in it: prepare it where "
            "it can be, or let TB2_CACHE_DIR be a folder of this node"
        )

    def _probe(self) -> None:
        """Make what layers are made of. Raises: StoreError where the file system refuses it."""
        name = f"probe-{os.urandom(8).hex()}"
        folder, fd = self.new_folder(name), locks.try_lock(self.lock(name), fcntl.LOCK_EX, create=True)
        folder.mkdir()
        try:
            os.mknod(folder / "whiteout", stat.S_IFCHR, 0)
            os.setxattr(folder, self._kind.opaque, b"y")
        except OSError as error:
            raise StoreError(
                f"{self.folder} cannot hold layers: its file system refuses whiteouts or the attribute "
                f"{self._kind.opaque} ({error.strerror}); let TB2_CACHE_DIR be on a local disk or a tmpfs, not on "
                "overlayfs or NFS"
            ) from error
        finally:
            worktree.delete(str(folder))
            self.lock(name).unlink()
            if fd is not None:
                os.close(fd)

    def sweep(self) -> None:
        """Delete what dead processes left. Who lives holds the lock of what he is making."""
        for layer_id in {*self._ids("making"), *(each for each in self.layer_ids() if self.describe(each) is None)}:
            self._sweep_one(layer_id)
        self.records.sweep()

    def _sweep_one(self, layer_id: str) -> None:
        fd = locks.try_lock(self.lock(layer_id), fcntl.LOCK_EX, create=True)
        if fd is None:
            return
        try:
            if self.describe(layer_id) is None:
                with contextlib.suppress(LayerInUse):
                    self.clear(layer_id)
            for folder in (self.folder / "making").glob(f"{layer_id}.*"):
                worktree.delete(str(folder))
        finally:
            self.lock(layer_id).unlink(missing_ok=True)
            os.close(fd)

    def _ids(self, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            names = {entry.name.partition(".")[0] for entry in (self.folder / name).iterdir()}
            return sorted(filter(_ID.fullmatch, names))
        return []
