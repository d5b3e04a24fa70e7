"""Where a task's files come from: the tree of HEAD, or the folder as it is.

HEAD when the tasks' folder is a git checkout in which nothing of the task was changed. tests/ or solution/ missing
from the disk do not count as a change: upstream's server deletes them, and HEAD still has them.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import git

from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task

_SYMLINK = 0o120000
#: A reference may be to a reference, and may come back to itself.
_REFERENCES_MAX = 8
_MAY_BE_MISSING = ("tests/", "solution/")
_GIT_ENV = {
    # Another user's checkout is as good as ours to read; git would refuse its "dubious ownership".
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    # Reading a checkout must not write to it.
    "GIT_OPTIONAL_LOCKS": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A task's files. `commit` is set when they are exactly that commit's."""

    task: Task
    commit: str | None

    def copy_to(self, target: Path) -> None:
        """Write the task's files, without solution/, into `target`, which is made.

        Raises: OSError, git.GitError.
        """
        if self.commit is not None:
            _copy_commit(self.task, "", target)
            return
        shutil.copytree(self.task.path, target, symlinks=True, ignore=self._without_solution)
        if not (target / "tests").exists():
            # A changed task whose tests/ were deleted from the disk still has those of HEAD.
            with contextlib.suppress(KeyError, git.GitError, ValueError):
                _copy_commit(self.task, "tests", target / "tests")

    def copy_solution_to(self, target: Path) -> None:
        """Write what is in the task's solution/ into `target`, which is made.

        Raises: TaskError when there is none, OSError, git.GitError.
        """
        try:
            if self.commit is None and (self.task.path / "solution").is_dir():
                shutil.copytree(self.task.path / "solution", target, symlinks=True)
            else:
                _copy_commit(self.task, "solution", target)
        except (KeyError, ValueError, git.InvalidGitRepositoryError):
            raise TaskError(f"task {self.task.task_id} has no solution/, neither on disk nor in HEAD") from None

    def _without_solution(self, folder: str, names: list[str]) -> list[str]:
        return ["solution"] if Path(folder) == self.task.path else []


def locate(task: Task) -> Source:
    """Decide where the task's files come from. A folder in no repository, or one git cannot read, is taken as it is."""
    try:
        with _repository(task) as (repo, prefix):
            _ = repo.head.commit.tree / prefix
            return Source(task, None if _is_changed(repo, prefix) else repo.head.commit.hexsha)
    except (git.GitError, ValueError, KeyError):
        return Source(task, None)


def read(task: Task, name: str) -> bytes | None:
    """The content of one of the task's files, from HEAD if it is not on disk; None when it is in neither.

    Raises: OSError.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (task.path / name).read_bytes()
    with contextlib.suppress(KeyError, ValueError, git.GitError), _repository(task) as (repo, prefix):
        content: bytes = (repo.head.commit.tree / f"{prefix}/{name}").data_stream.read()
        return content
    return None


def fingerprint(task: Task) -> str:
    """A cheap digest that changes when the task's files on disk, or the checkout's HEAD, change."""
    digest = hashlib.sha256(_head(str(task.path)).encode(errors="surrogateescape"))
    for path in sorted(_files(task.path)):
        info = os.lstat(path)
        digest.update(f"{path}\0{info.st_mode}\0{info.st_size}\0{info.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        yield from (os.path.join(parent, name) for name in (*folders, *files))  # noqa: PTH118 - hot path of reset


def _head(folder: str) -> str:
    """Tells one HEAD of the checkout that the folder lies in from another. By hand: opening a repository with GitPython
    takes ten times as long as all the rest of a fingerprint."""
    while True:
        with contextlib.suppress(OSError):
            return _follow_head(os.path.join(folder, ".git"))  # noqa: PTH118 - hot path of reset
        if folder == (folder := os.path.dirname(folder)):  # noqa: PTH120
            return ""


def _follow_head(git_folder: str) -> str:
    """What HEAD says, and what it refers to, see gitrepository-layout(5). Raises: OSError: that is no repository."""
    if os.path.isfile(git_folder):  # noqa: PTH113 - a linked worktree, or a submodule
        parent = os.path.dirname(git_folder)  # noqa: PTH120
        git_folder = os.path.join(parent, _line(git_folder).removeprefix("gitdir: "))  # noqa: PTH118
    found = [git_folder, _line(f"{git_folder}/HEAD")]
    shared = git_folder
    with contextlib.suppress(OSError):
        shared = os.path.join(git_folder, _line(f"{git_folder}/commondir"))  # noqa: PTH118
    while found[-1].startswith("ref: ") and len(found) < _REFERENCES_MAX:
        with contextlib.suppress(OSError):
            found.append(_line(f"{shared}/{found[-1][5:]}"))
            continue
        with contextlib.suppress(OSError):
            packed = os.stat(f"{shared}/packed-refs")  # noqa: PTH116
            found.append(f"{packed.st_ino} {packed.st_mtime_ns} {packed.st_size}")
        break
    return "\n".join(found)


def _line(path: str) -> str:
    with open(path, errors="surrogateescape") as file:
        return file.readline().rstrip("\n")


@contextlib.contextmanager
def _repository(task: Task) -> Iterator[tuple[git.Repo, str]]:
    """The repository that the task's folder lies in, and the folder's path in it. Raises: git.GitError."""
    repo = git.Repo(task.path, search_parent_directories=True)
    try:
        if repo.working_tree_dir is None:
            raise git.InvalidGitRepositoryError(task.path)
        repo.git.update_environment(**_GIT_ENV)
        yield repo, str(task.path.relative_to(Path(repo.working_tree_dir).resolve()))
    finally:
        repo.close()


def _is_changed(repo: git.Repo, prefix: str) -> bool:
    """Whether the task on disk differs from HEAD in more than missing tests/ or solution/ files."""
    where = f":(top,literal){prefix}"
    status = repo.git.status("--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", where)
    return any(not _is_withheld(entry, prefix) for entry in status.split("\0") if entry)


def _is_withheld(entry: str, prefix: str) -> bool:
    state, path = entry[:2], entry[3:]
    return set(state) <= {" ", "D"} and path.removeprefix(prefix + "/").startswith(_MAY_BE_MISSING)


def _copy_commit(task: Task, part: str, target: Path) -> None:
    with _repository(task) as (repo, prefix):
        path = f"{prefix}/{part}".rstrip("/")
        tree = repo.head.commit.tree / path
        target.mkdir(parents=True, exist_ok=True)
        for item in tree.traverse():
            relative = Path(str(item.path)).relative_to(path)  # type: ignore[union-attr]
            if not part and relative.parts[0] == "solution":
                continue
            _write(item, target / relative)  # type: ignore[arg-type]


def _write(item: git.Blob | git.Tree, path: Path) -> None:
    if item.type == "tree":
        path.mkdir(exist_ok=True)
    elif item.type == "blob" and item.mode == _SYMLINK:
        path.symlink_to(os.fsdecode(item.data_stream.read()))
    elif item.type == "blob":
        path.write_bytes(item.data_stream.read())
        path.chmod(0o755 if item.mode & 0o111 else 0o644)
