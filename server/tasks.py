"""The catalogue: which tasks there are. Ids and paths that clients send are confined to it."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from tbench2_env.server import download
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import TaskError

#: Bytes of a file name.
_ID_MAX = 255
#: What makes a folder a task, on disk or in a commit.
_MARKERS = ("task.toml", "instruction.md")
_NAMED_MAX = 8


class UnknownTask(TaskError):
    """The client asked for a task that is not in the catalogue."""


@dataclass(frozen=True)
class Task:
    """One task: its id, which is its folder's name, and that folder on the host."""

    task_id: str
    path: Path


class Catalogue:
    """The tasks of one folder, directly in it or under its tasks/."""

    def __init__(self, root: Path) -> None:
        self.roots = [folder for folder in (root, root / "tasks") if folder.is_dir()]

    def find(self, task_id: str | None, task_path: str | None = None) -> Task:
        """The task with this id, or the one whose folder is `task_path` (as a reset's answer names it).

        Raises: UnknownTask naming the field, and the catalogue's folder.
        """
        if task_path:
            return self._find_path(task_path)
        if not task_id or not _is_name(task_id):
            raise UnknownTask(f"task_id {_short(task_id)} is not the name of a task: {self._hint()}")
        for root in self.roots:
            if _is_task(root / task_id):
                return Task(task_id, (root / task_id).resolve())
        raise UnknownTask(f"there is no task {_short(task_id)}: {self._hint()}")

    def _find_path(self, task_path: str) -> Task:
        for task in self.list():
            if str(task.path) == task_path.rstrip("/"):
                return task
        raise UnknownTask(f"task_path {_short(task_path)} is not a task's folder: {self._hint()}")

    def list(self) -> list[Task]:
        """All tasks, by id."""
        folders = {path.name: path for root in reversed(self.roots) for path in root.iterdir() if _is_task(path)}
        return [Task(name, folders[name].resolve()) for name in sorted(folders)]

    def _hint(self) -> str:
        names = [task.task_id for task in self.list()]
        if not names:
            return f"{self.roots or 'the folder'} holds no tasks; check TB2_TASKS_DIR"
        more = "" if len(names) <= _NAMED_MAX else f" and {len(names) - _NAMED_MAX} more"
        return f"give one of {', '.join(names[:_NAMED_MAX])}{more}"


def _is_name(task_id: str) -> bool:
    """Whether this could be a folder's name."""
    try:
        short = len(os.fsencode(task_id)) <= _ID_MAX
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return short and "\0" not in task_id and "/" not in task_id and task_id not in (".", "..")


def _is_task(path: Path) -> bool:
    return any((path / marker).is_file() for marker in _MARKERS)


def _short(text: str | None) -> str:
    return repr(text) if text is None or len(text) <= 80 else f"{text[:60]!r}... ({len(text)} characters)"


class DefaultCatalogue:
    """The catalogue of the settings; the default tasks are downloaded at the first use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._catalogue: Catalogue | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> Catalogue:
        """Raises: TaskError when the folder is missing or the download fails; both name the variable."""
        async with self._lock:
            if self._catalogue is None:
                self._catalogue = await asyncio.to_thread(self._open)
            return self._catalogue

    def _open(self) -> Catalogue:
        folder = self._settings.tasks_dir
        if folder is None:
            folder = download.default_tasks(self._settings.repo_url, self._settings.cache_dir)
        if not folder.is_dir():
            raise TaskError(f"TB2_TASKS_DIR: {folder} is not a folder; point it at a checkout of terminal-bench-2")
        return Catalogue(folder.resolve())
