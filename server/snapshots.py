"""Snapshots: a task's content made once, immutable, shared by all its episodes.

A snapshot is a folder of the spawner's layers, named by what is in it: `root/` is the overlay layer that an agent sees
(what the Dockerfile's COPY, ADD and WORKDIR make, or the task's folder), `tests/` is what only verifiers see. solution/
is in neither.
"""

import asyncio
import collections
import hashlib
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import git

from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS, Rung
from tbench2_env.server import limits, sources, taskconfig
from tbench2_env.server.harness import TEXT_MAX_BYTES, Script
from tbench2_env.server.images import copying, dockerfile
from tbench2_env.server.taskconfig import TaskConfig, TaskError
from tbench2_env.server.tasks import Task

_NAME_LENGTH = 24


@dataclass(frozen=True)
class Snapshot:
    """What an episode needs to know of its task. `name` is its folder in the layers, `digest` of all its files."""

    name: str
    digest: str
    commit: str | None
    instruction: str
    config: TaskConfig
    workdir: str
    env: dict[str, str] = field(hash=False)
    unmet: tuple[str, ...] = ()
    has_tests: bool = False
    #: tests/test.sh, if there is one.
    test_script: Script | None = None


@dataclass(frozen=True)
class Ground:
    """Where snapshots are built and what over: the spawner's layers, its rung, the hidden host paths."""

    layers: Path
    rung: Rung
    hide: tuple[str, ...]

    @property
    def owner(self) -> copying.Owner:
        return copying.Owner(self.rung.owner_shift, change=self.rung.has_id_range)

    def base(self) -> copying.BaseView:
        if not self.rung.isolated:
            return copying.BaseView(Path("/"))
        names = {entry.name for entry in os.scandir("/")} - SYSTEM_FOLDERS
        hidden = {*names, *PRIVATE_FOLDERS, *(path.lstrip("/") for path in self.hide)}
        return copying.BaseView(Path("/"), frozenset("/" + path for path in hidden))


class Snapshots:
    """The snapshots of one server life."""

    def __init__(self, ground: Ground, workdir_override: str | None) -> None:
        self._ground, self._workdir_override = ground, workdir_override
        self._known: dict[str, tuple[str, Snapshot]] = {}
        self._locks: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)

    async def get(self, task: Task) -> Snapshot:
        """The snapshot of the task as it is now; made again only if something changed.

        Raises: TaskError naming the file and what is wrong with it.
        """
        async with self._locks[task.task_id]:
            return await asyncio.to_thread(self._get, task)

    def _get(self, task: Task) -> Snapshot:
        fingerprint = sources.fingerprint(task)
        known = self._known.get(task.task_id)
        if known is None or known[0] != fingerprint:
            known = (fingerprint, self._make(task))
            self._known[task.task_id] = known
        return known[1]

    def _make(self, task: Task) -> Snapshot:
        with tempfile.TemporaryDirectory(prefix=".making-", dir=self._ground.layers) as folder:
            files = Path(folder, "files")
            try:
                source = sources.locate(task)
                source.copy_to(files)
                return self._build(task, source.commit, files, Path(folder, "layer"))
            except dockerfile.DockerfileError as error:
                raise TaskError(f"task {task.task_id}: environment/Dockerfile: {error}") from None
            except TaskError as error:
                raise TaskError(f"task {task.task_id}: {error}") from None
            except (OSError, UnicodeDecodeError, git.GitError) as error:
                raise TaskError(f"task {task.task_id} cannot be read: {error}") from None

    def _build(self, task: Task, commit: str | None, files: Path, made: Path) -> Snapshot:
        config = taskconfig.parse(_text(files / "task.toml"))
        plan = self._plan(task, files, config)
        digest = _digest(files, f"{task.path}\n{plan.workdir}")
        name = digest[:_NAME_LENGTH]
        if not (self._ground.layers / name).exists():
            self._build_layers(task, plan, files, made)
            made.rename(self._ground.layers / name)
        tests = files / "tests"
        limits.of_task(config.environment, enforced=True)  # a size that is none is told of now
        return Snapshot(
            name, digest, commit, _text(files / "instruction.md"), config, plan.workdir or "/",
            {**plan.env, **config.environment.env}, (*plan.unmet, *config.unmet()),
            has_tests=tests.is_dir(), test_script=_script(tests / "test.sh"),
        )  # fmt: skip

    def _plan(self, task: Task, files: Path, config: TaskConfig) -> dockerfile.BuildPlan:
        """What to build, with the working directory decided: override, task.toml, Dockerfile, the task's folder."""
        path = files / "environment" / "Dockerfile"
        plan = dockerfile.load(path) if path.is_file() else dockerfile.BuildPlan(workdir=str(task.path))
        workdir = self._workdir_override or config.environment.workdir or plan.workdir or "/"
        return replace(plan, workdir=workdir, steps=(*plan.steps, dockerfile.Workdir(workdir)))

    def _build_layers(self, task: Task, plan: dockerfile.BuildPlan, files: Path, made: Path) -> None:
        owner, root = self._ground.owner, made / "root"
        (made / "tests").mkdir(parents=True)
        owner.give(made / "tests", 0, 0)
        if (files / "tests").is_dir():
            copying.copy_tree(files / "tests", made / "tests", owner)
        root.mkdir()
        _make_private_folders(root, owner)
        if not (files / "environment" / "Dockerfile").is_file():
            here = root / task.path.relative_to("/")
            copying.build_layer(
                dockerfile.BuildPlan(steps=(dockerfile.Workdir(str(task.path)),)),
                files,
                root,
                self._ground.base(),
                owner,
            )
            copying.copy_tree(files, here, owner, skip=frozenset({"tests", "solution"}))
        copying.build_layer(plan, files / "environment", root, self._ground.base(), owner)
        _remove_unused_private_folders(root)


def _make_private_folders(root: Path, owner: copying.Owner) -> None:
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
