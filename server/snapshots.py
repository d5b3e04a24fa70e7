"""Snapshots: a task's content made once, immutable, shared by all its episodes.

A snapshot is a folder of the spawner's layers, named by what is in it: `root/` is the overlay layer that an agent sees
(what the Dockerfile's COPY, ADD and WORKDIR make, or the task's folder), `tests/` is what only verifiers see. solution/
is in neither.
"""

import asyncio
import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import git

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS, Rung
from tbench2_env.server import limits, sources, taskconfig
from tbench2_env.server.harness import TEXT_MAX_BYTES, Script
from tbench2_env.server.images import copying
from tbench2_env.server.images.context import Context
from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.environments import Environment, Environments
from tbench2_env.server.images.layer import BaseView, Owner
from tbench2_env.server.images.steps import Copy, Workdir
from tbench2_env.server.images.store import Lease, MissingLayer
from tbench2_env.server.taskconfig import TaskConfig, TaskError
from tbench2_env.server.tasks import Task

_NAME_LENGTH = 24
_TRIES = 3
#: A fingerprint that takes less, in seconds, is not worth a thread.
_AT_ONCE_S = 0.001
#: A failure that took longer than this is remembered so long, in seconds.
_FAILED_QUICKLY_S, _REMEMBERED_S = 2.0, 30.0


@dataclass(frozen=True)
class Snapshot:
    """What an episode needs to know of its task. `name` is its folder in the layers, `digest` of all its files."""

    name: str
    digest: str
    commit: str | None
    instruction: str
    config: TaskConfig
    workdir: str
    environment: Environment
    has_tests: bool = False
    #: tests/test.sh, if there is one.
    test_script: Script | None = None

    @property
    def env(self) -> dict[str, str]:
        """What image and task set for all programs."""
        return {**self.environment.env, **self.config.environment.env}

    @property
    def unmet(self) -> tuple[str, ...]:
        return (*self.environment.unmet, *self.config.unmet())


@dataclass(frozen=True)
class Ground:
    """Where snapshots are built and what over: the spawner's layers, its rung, the hidden host paths."""

    layers: Path
    rung: Rung
    hide: tuple[str, ...]

    @property
    def owner(self) -> Owner:
        return Owner(self.rung.owner_shift, change=self.rung.has_id_range)

    def base(self) -> BaseView:
        if not self.rung.isolated:
            return BaseView(Path("/"))
        names = {entry.name for entry in os.scandir("/")} - SYSTEM_FOLDERS
        hidden = {*names, *PRIVATE_FOLDERS, *(path.lstrip("/") for path in self.hide)}
        return BaseView(Path("/"), frozenset("/" + path for path in hidden))


@dataclass(frozen=True)
class _Files:
    """A task's files, copied out of its source; solution/ is not among them."""

    task: Task
    commit: str | None
    folder: Path
    config: TaskConfig


class Snapshots:
    """The snapshots of one server life. One that is being made is finished, even if nobody waits for it any more."""

    def __init__(self, ground: Ground, environments: Environments, workdir_override: str | None) -> None:
        self._ground, self._environments, self._workdir_override = ground, environments, workdir_override
        self._known: dict[str, tuple[str, Snapshot]] = {}
        #: Seconds that the last fingerprint of a task took.
        self._took_s: dict[str, float] = {}
        self._failed: dict[str, tuple[str, float, TaskError]] = {}
        self._making: dict[str, asyncio.Task[Snapshot]] = {}

    async def take(self, task: Task) -> tuple[Snapshot, Lease]:
        """The task's snapshot, and a lease on the layers of its environment, which the caller closes.

        Raises: as `get`.
        """
        for _ in range(_TRIES):
            snapshot = await self.get(task)
            try:
                return snapshot, self._environments.lease(snapshot.environment)
            except MissingLayer:  # somebody made room in the store: they are made again
                self._known.pop(task.task_id, None)
        raise TaskError(f"task {task.task_id}: its layers keep vanishing from the store: raise TB2_STORE_MAX_GB")

    async def get(self, task: Task) -> Snapshot:
        """The snapshot of the task as it is now; made again only if something changed. Its layers may be gone since.

        Raises: TaskError naming the file and what is wrong with it; SandboxError.
        """
        making = self._making.get(task.task_id)
        if making is None:
            if (known := self._known_now(task)) is not None:
                return known
            making = asyncio.create_task(self._get(task))
            self._making[task.task_id] = making
            making.add_done_callback(lambda done: self._made(task, done))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if waiter is not None and waiter.cancelling():
                raise
            raise SandboxError("the engine was stopped while the task's environment was made") from None

    def _known_now(self, task: Task) -> Snapshot | None:
        """The snapshot that is known, if it is known in no time that it still holds."""
        known = self._known.get(task.task_id)
        if known is None or self._took_s[task.task_id] > _AT_ONCE_S:
            return None
        try:
            return known[1] if self._fingerprint(task) == known[0] else None
        except OSError:
            return None

    def _fingerprint(self, task: Task) -> str:
        begun = time.monotonic()
        try:
            return sources.fingerprint(task)
        finally:
            self._took_s[task.task_id] = time.monotonic() - begun

    def _made(self, task: Task, done: "asyncio.Task[Snapshot]") -> None:
        self._making.pop(task.task_id, None)
        if not done.cancelled():
            done.exception()  # it is heard by whoever still waits

    async def stop(self) -> None:
        """End what is being made."""
        for making in list(self._making.values()):
            making.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)

    async def _get(self, task: Task) -> Snapshot:
        fingerprint = await asyncio.to_thread(self._fingerprint, task)
        known = self._known.get(task.task_id)
        if known is not None and known[0] == fingerprint:
            return known[1]
        self._check_failed(task, fingerprint)
        begun = time.monotonic()
        try:
            snapshot = await self._make(task)
        except TaskError as error:
            if time.monotonic() - begun > _FAILED_QUICKLY_S:
                self._failed[task.task_id] = (fingerprint, time.monotonic() + _REMEMBERED_S, error)
            raise
        self._known[task.task_id] = (fingerprint, snapshot)
        return snapshot

    def _check_failed(self, task: Task, fingerprint: str) -> None:
        """Callers that come in while a long build fails are all told of that one failure. Raises: TaskError."""
        failed = self._failed.get(task.task_id)
        if failed is not None and failed[0] == fingerprint and time.monotonic() < failed[1]:
            raise failed[2]
        self._failed.pop(task.task_id, None)

    async def _make(self, task: Task) -> Snapshot:
        making = tempfile.TemporaryDirectory(prefix=".making-", dir=self._ground.layers)
        try:
            files = await asyncio.to_thread(_fetch, task, Path(making.name, "files"))
            workdir = self._workdir_override or files.config.environment.workdir
            environment = await self._environments.prepare(task, files.folder / "environment", files.config, workdir)
            return await asyncio.to_thread(self._build, files, environment, Path(making.name, "layer"))
        except DockerfileError as error:
            raise TaskError(f"task {task.task_id}: environment/{error}") from None
        except TaskError as error:
            raise TaskError(f"task {task.task_id}: {error}") from None
        except (OSError, UnicodeDecodeError, git.GitError) as error:
            raise TaskError(f"task {task.task_id} cannot be read: {error}") from None
        finally:
            await asyncio.shield(asyncio.to_thread(making.cleanup))

    def _build(self, files: _Files, environment: Environment, made: Path) -> Snapshot:
        task, config = files.task, files.config
        workdir = self._workdir_override or config.environment.workdir or environment.workdir or "/"
        digest = _digest(files.folder, f"{task.path}\n{workdir}\n{environment.digest}")
        name = digest[:_NAME_LENGTH]
        if not (self._ground.layers / name).exists():
            self._build_layers(files, environment, workdir, made)
            made.rename(self._ground.layers / name)
        tests = files.folder / "tests"
        limits.of_task(config.environment, enforced=True)  # a size that is none is told of now
        return Snapshot(
            name, digest, files.commit, _text(files.folder / "instruction.md"), config, workdir, environment,
            has_tests=tests.is_dir(), test_script=_script(tests / "test.sh"),
        )  # fmt: skip

    def _build_layers(self, files: _Files, environment: Environment, workdir: str, made: Path) -> None:
        owner, root = self._ground.owner, made / "root"
        (made / "tests").mkdir(parents=True)
        owner.give(made / "tests", 0, 0)
        if (files.folder / "tests").is_dir():
            copying.copy_tree(files.folder / "tests", made / "tests", owner)
        root.mkdir()
        if environment.over_node and not environment.layers:
            self._lay_over_node(files, environment, workdir, root)
        else:
            root.chmod(0o755)
            owner.give(root, 0, 0)

    def _lay_over_node(self, files: _Files, environment: Environment, workdir: str, root: Path) -> None:
        """What COPY, ADD and WORKDIR make, or the task's own folder, where nothing is built."""
        owner, base, context = self._ground.owner, self._ground.base(), files.folder / "environment"
        _make_private_folders(root, owner)
        steps: tuple[Workdir | Copy, ...] = () if environment.plan is None else environment.plan.steps
        if environment.plan is None:
            copying.build_layer([Workdir(str(files.task.path))], Context(files.folder), root, base, owner)
            target = root / files.task.path.relative_to("/")
            copying.copy_tree(files.folder, target, owner, skip=frozenset({"tests", "solution"}))
        copying.build_layer((*steps, Workdir(workdir)), Context(context), root, base, owner)
        _remove_unused_private_folders(root)


def _fetch(task: Task, folder: Path) -> _Files:
    source = sources.locate(task)
    source.copy_to(folder)
    return _Files(task, source.commit, folder, taskconfig.parse(_text(folder / "task.toml")))


def _make_private_folders(root: Path, owner: Owner) -> None:
    """COPY must find the folders that every episode has to itself, and keep their modes where it fills them."""
    for path, mode in _private_folders():
        (root / path).mkdir()
        (root / path).chmod(mode)
        owner.give(root / path, 0, 0)


def _remove_unused_private_folders(root: Path) -> None:
    for path, _ in reversed(_private_folders()):
        if not any((root / path).iterdir()):
            (root / path).rmdir()


def _private_folders() -> list[tuple[str, int]]:
    """Paths and modes, parents before children; /var, which is no private folder, comes in as the parent of one."""
    return sorted({"var": 0o755, **PRIVATE_FOLDERS}.items())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _script(path: Path) -> Script | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return Script(file.read(TEXT_MAX_BYTES).decode(errors="replace"))


def _digest(files: Path, salt: str) -> str:
    """SHA-256 over names, modes and contents, in order; `salt` is what else the layers depend on."""
    digest = hashlib.sha256(salt.encode())
    for path in sorted(files.rglob("*")):
        mode = path.lstat().st_mode
        digest.update(f"\n{path.relative_to(files)}\0{mode:o}\0".encode(errors="surrogateescape"))
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))  # noqa: PTH115
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
