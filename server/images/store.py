"""The store: read-only layers of images by id, made once and shared by all servers of a node.

    FOLDER/KIND/
        layers/ID/root/        what overlayfs takes as a lower: whiteouts are devices 0:0, opaque folders have an xattr
        layers/ID/layer.json   digest of the content, bytes on the disk, when it was made, the maker's note; its mtime
                               is when the layer was last used; leases hold a shared flock on it, removal an exclusive
        locks/ID               held with an exclusive flock by who makes the layer
        making/ID.RANDOM/      a layer not yet made, or one being removed; nobody's once locks/ID is free
        images/HASH.json       records: pins of tags, configurations of images

A layer appears by rename(2), after its digest was taken and all its bytes are on the disk: it is whole or absent.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import worktree
from tbench2_env.server import threads
from tbench2_env.server.images import content, locks
from tbench2_env.server.images.kind import Kind as Kind
from tbench2_env.server.images.records import opened
from tbench2_env.server.images.shelves import LayerInUse as LayerInUse
from tbench2_env.server.images.shelves import Shelves
from tbench2_env.server.images.shelves import StoreError as StoreError
from tbench2_env.server.images.shelves import StoreReadOnly as StoreReadOnly

#: Seconds between two tries of a lock that another process holds while it makes a layer: the first, and at most.
_PAUSES_S = (0.01, 0.5)
#: A lease waits as long for a lock that others hold only while they rename, or look whether a layer is in use.
_LEASE_PATIENCE_S = 0.5
_USED_GRAIN_S = 60
_VERIFIED_AT_ONCE = 2
#: What reading a damaged layer ends in; anything else is the node's failure (no memory, no descriptors, no rights).
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENXIO)


class MissingLayer(StoreError):
    """`ids` are not in the store: they were never made, or were removed."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"not in the store: {', '.join(ids)}")
        self.ids = tuple(ids)


@dataclass(frozen=True)
class LayerUsage:
    """`bytes` allocated on the disk; `last_used` in seconds since the epoch, to the minute; `note` is the maker's."""

    id: str
    bytes: int
    last_used: float
    note: Mapping[str, Any]
    in_use: bool


class Lease:
    """Keeps layers in the store. A context manager."""

    def __init__(self, layer_ids: Sequence[str], release: Callable[[Sequence[str]], None]) -> None:
        self.layer_ids, self._release = tuple(layer_ids), release
        self._is_held = True

    def close(self) -> None:
        """May be called again."""
        if self._is_held:
            self._is_held = False
            self._release(self.layer_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class Store:
    """The layers and records of one kind below `folder`. `max_bytes` is what `trim` keeps; None: everything.

    `lease`, `has` and records take a moment; `usage`, `remove` and `trim` may take seconds and belong in a thread.
    """

    def __init__(self, folder: Path, kind: Kind, max_bytes: int | None = None) -> None:
        self.folder, self.kind, self.max_bytes = folder / kind.name, kind, max_bytes
        self._shelves = Shelves(self.folder, kind)
        self._guard = threading.Lock()
        self._leased: dict[str, tuple[int, int]] = {}  # id -> (descriptor with the shared lock, number of leases)
        self._verified: dict[str, int] = {}  # id -> inode of its layer.json then
        self._verifying = asyncio.Semaphore(_VERIFIED_AT_ONCE)

    def root(self, layer_id: str) -> Path:
        """The lower folder of the layer, which need not exist."""
        return self._shelves.layer(layer_id) / "root"

    def has(self, layer_id: str) -> bool:
        return self._shelves.describe(layer_id) is not None

    def note(self, layer_id: str) -> Mapping[str, Any]:
        """What its maker noted. Raises: MissingLayer."""
        if (description := self._shelves.describe(layer_id)) is None:
            raise MissingLayer([layer_id])
        note = description.get("note")
        return note if isinstance(note, dict) else {}

    # ---------------------------------------------------------------- making
    async def make(
        self, layer_id: str, fill: Callable[[Path], Awaitable[Any]], note: Mapping[str, Any] | None = None
    ) -> bool:
        """Have the layer; answers whether it was made here and now.

        Unless it is there, also after waiting for whoever else makes it, `fill` is awaited with a new folder, in which
        it makes `root`, a folder that is then the layer. When `fill` raises or is cancelled it must have stopped
        writing; nothing is left then. `note` goes into layer.json, as it is once `fill` has ended.

        Raises:
            StoreReadOnly: it is missing, and nothing can be written here.
            StoreError: the store's file system cannot hold layers.
            LayerInUse: it is damaged, and an episode still uses it.
            OSError: the node failed (no space).
        """
        if self.has(layer_id):
            self._mark_used(layer_id)
            return False
        await threads.finish(self._shelves.prepare)
        async with self._sole_maker(layer_id):
            if self.has(layer_id):
                return False
            folder = self._shelves.new_folder(layer_id)
            try:
                folder.mkdir()
                await fill(folder)
                await threads.run(lambda stop: self._complete(layer_id, folder, note or {}, stop))
            except BaseException:
                await threads.finish(lambda: worktree.delete(str(folder)))
                raise
            return True

    @contextlib.asynccontextmanager
    async def workplace(self, name: str) -> AsyncIterator[Path]:
        """An empty folder on the store's disk, for one at a time of all, in any process, that ask for `name`.

        It is deleted at the end, and where its process was killed, by the next user of the store.

        Raises: StoreReadOnly, StoreError.
        """
        await threads.finish(self._shelves.prepare)
        async with self._sole_maker(name):
            folder = self._shelves.new_folder(name)
            folder.mkdir()
            try:
                yield folder
            finally:
                await threads.finish(lambda: worktree.delete(str(folder)))

    @contextlib.asynccontextmanager
    async def _sole_maker(self, layer_id: str) -> AsyncIterator[None]:
        """Tries again and again, since a lock that another process holds cannot be awaited."""
        lock, (pause_s, pause_max_s) = self._shelves.lock(layer_id), _PAUSES_S
        while (fd := locks.try_lock(lock, fcntl.LOCK_EX, create=True)) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, pause_max_s)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # while it is held: whoever had opened it meanwhile sees that, and opens anew
            os.close(fd)

    def _complete(self, layer_id: str, folder: Path, note: Mapping[str, Any], stop: threads.Stop) -> None:
        if [entry.name for entry in folder.iterdir()] != ["root"]:
            raise StoreError(f"{folder.name} must hold the folder root and nothing else once it is filled")
        found = content.measure(folder / "root", self.kind, stop)
        description = {"digest": found.digest, "bytes": found.bytes, "made": time.time(), "note": dict(note)}
        (folder / "layer.json").write_text(json.dumps(description))
        with opened(folder) as fd:
            sc.syncfs(fd)
        stop.check()
        inode = (folder / "layer.json").stat().st_ino
        self._shelves.publish(layer_id, folder)
        self._verified[layer_id] = inode

    # ---------------------------------------------------------------- leases
    def lease(self, layer_ids: Sequence[str]) -> Lease:
        """Keep the layers from being removed, by any process, until the lease is closed; marks them used.

        Raises: MissingLayer naming all that are not there; nothing is leased then.
        """
        wanted = tuple(dict.fromkeys(layer_ids))
        held: list[str] = []
        try:
            with self._guard:
                held += [layer_id for layer_id in wanted if self._share(layer_id)]
            if len(held) < len(wanted):
                raise MissingLayer([layer_id for layer_id in wanted if layer_id not in held])
        except BaseException:
            self._release(held)
            raise
        return Lease(wanted, self._release)

    def _share(self, layer_id: str) -> bool:
        """Count one more lease, the first of which holds the lock; false without such a layer."""
        fd, count = self._leased.get(layer_id, (None, 0))
        if fd is None and (fd := self._lock_shared(layer_id)) is None:
            return False
        self._leased[layer_id] = (fd, count + 1)
        return True

    def _lock_shared(self, layer_id: str) -> int | None:
        deadline = time.monotonic() + _LEASE_PATIENCE_S
        with contextlib.suppress(FileNotFoundError):
            while self.has(layer_id) and time.monotonic() < deadline:
                if (fd := self._shelves.lock_layer(layer_id, fcntl.LOCK_SH)) is not None:
                    _mark_used(fd)
                    return fd
                time.sleep(0.001)
        return None

    def _release(self, layer_ids: Sequence[str]) -> None:
        with self._guard:
            for layer_id in layer_ids:
                fd, count = self._leased.pop(layer_id)
                if count > 1:
                    self._leased[layer_id] = (fd, count - 1)
                else:
                    _mark_used(fd)
                    os.close(fd)

    def _mark_used(self, layer_id: str) -> None:
        with contextlib.suppress(OSError), opened(self._shelves.layer(layer_id) / "layer.json") as fd:
            _mark_used(fd)

    # ---------------------------------------------------------------- verifying
    async def verify(self, layer_ids: Sequence[str]) -> list[str]:
        """Compare the layers' content with the digests taken when they were made, each once per `Store`.

        Answers with those that are missing or damaged. A damaged one is removed, unless it is leased.

        Raises: OSError, when the node fails to read.
        """
        wanted = list(dict.fromkeys(layer_ids))
        sound = await asyncio.gather(*map(self._is_sound, wanted))
        return [layer_id for layer_id, is_sound in zip(wanted, sound, strict=True) if not is_sound]

    async def _is_sound(self, layer_id: str) -> bool:
        async with self._verifying:
            try:
                lease = self.lease([layer_id])
            except MissingLayer:
                return False
            with lease:
                inode = os.fstat(self._leased[layer_id][0]).st_ino
                if self._verified.get(layer_id) == inode:
                    return True
                if await threads.run(lambda stop: self._is_unchanged(layer_id, stop)):
                    self._verified[layer_id] = inode
                    return True
        with contextlib.suppress(LayerInUse, StoreReadOnly):
            await threads.finish(lambda: self.remove([layer_id]))
        return False

    def _is_unchanged(self, layer_id: str, stop: threads.Stop) -> bool:
        description = self._shelves.describe(layer_id) or {}
        try:
            return content.measure(self.root(layer_id), self.kind, stop).digest == description.get("digest")
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            return False

    # ---------------------------------------------------------------- room
    def usage(self) -> list[LayerUsage]:
        """Every layer, the least recently used first."""
        found = [usage for layer_id in self._shelves.layer_ids() if (usage := self._usage(layer_id))]
        return sorted(found, key=lambda layer: layer.last_used)

    def _usage(self, layer_id: str) -> LayerUsage | None:
        with contextlib.suppress(FileNotFoundError):
            used = (self._shelves.layer(layer_id) / "layer.json").stat().st_mtime
            with self._removable([layer_id]) as removable:
                if description := self._shelves.describe(layer_id):
                    note = self.note(layer_id)
                    return LayerUsage(layer_id, description["bytes"], used, note, in_use=not removable)
        return None

    def remove(self, layer_ids: Iterable[str]) -> int:
        """Remove the layers and answer how many bytes that freed; absent ones are none.

        Raises:
            LayerInUse: some are leased, here or by another process; all stay.
            StoreReadOnly: nothing can be removed here.
        """
        wanted = [layer_id for layer_id in dict.fromkeys(layer_ids) if self.has(layer_id)]
        with self._removable(wanted) as removable:
            if in_use := [layer_id for layer_id in wanted if layer_id not in removable and self.has(layer_id)]:
                raise LayerInUse(in_use)
            freed = sum(int((self._shelves.describe(layer_id) or {}).get("bytes", 0)) for layer_id in removable)
            try:
                gone = [self._shelves.move_away(layer_id) for layer_id in removable]
            except OSError as error:
                raise self._shelves.unwritable(error) from error
        for folder in gone:
            worktree.delete(str(folder))
        return freed

    def trim(self) -> int:
        """Remove the least recently used layers until the others take `max_bytes`; answers with the bytes freed.

        What is leased or being made stays, whatever it takes. What dead processes left goes too.

        Raises: StoreReadOnly.
        """
        self._shelves.prepare()
        self._shelves.sweep()
        layers = self.usage() if self.max_bytes is not None else []
        freed, excess = 0, sum(layer.bytes for layer in layers) - (self.max_bytes or 0)
        for layer in layers:
            if freed < excess and not layer.in_use:
                with contextlib.suppress(LayerInUse):
                    freed += self.remove([layer.id])
        return freed

    @contextlib.contextmanager
    def _removable(self, layer_ids: Sequence[str]) -> Iterator[list[str]]:
        """Lock those that nobody uses, for a moment."""
        locked: dict[str, int] = {}
        try:
            for layer_id in layer_ids:
                with contextlib.suppress(FileNotFoundError):
                    if (fd := self._shelves.lock_layer(layer_id, fcntl.LOCK_EX)) is not None:
                        locked[layer_id] = fd
            yield list(locked)
        finally:
            for fd in locked.values():
                os.close(fd)

    # ---------------------------------------------------------------- records
    def get_record(self, name: str) -> dict[str, Any] | None:
        """What was put under `name`, or None; broken JSON is None too."""
        return self._shelves.records.get(name)

    def put_record(self, name: str, value: Mapping[str, Any]) -> None:
        """Raises: StoreReadOnly, OSError."""
        self._shelves.prepare()
        self._shelves.records.put(name, value)

    def forget_records(self) -> None:
        """All of them: a tag may mean another image when it is pulled again. Raises: StoreReadOnly, OSError."""
        self._shelves.prepare()
        self._shelves.records.clear()

    def record_names(self) -> list[str]:
        return self._shelves.records.names()


def _mark_used(fd: int) -> None:
    if time.time() - os.fstat(fd).st_mtime > _USED_GRAIN_S:
        with contextlib.suppress(OSError):  # a store that can only be read has no order to keep
            os.utime(fd)
