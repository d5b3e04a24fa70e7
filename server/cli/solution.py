"""A task's reference solution, carried out as harbor's oracle agent does (`harbor/agents/oracle.py`).

What is in solution/ is put to /solution, and solve.sh there is run in the working directory, non-interactively as far
as Debian is concerned, with `[solution.env]`. Harbor executes the file; by `bash` it also runs where, as in 37 of the
89 tasks of Terminal-Bench 2.0, a comment stands before its `#!`.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tbench2_env import Tbench2Error, Tbench2HttpEnv
from tbench2_env.server import sources, taskconfig
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task

_PLACE = "/solution"
_SCRIPT = "solve.sh"
_FINISHING_TIMEOUT_S = 60.0
_HOST_VARIABLE = re.compile(r"\$\{\w+")


@dataclass(frozen=True)
class Solution:
    """The files, in a folder here, and the variables."""

    folder: Path
    env: dict[str, str]

    @property
    def command(self) -> str:
        env = {"DEBIAN_FRONTEND": "noninteractive", **self.env}
        return f"{shlex.join(['env', *(f'{key}={value}' for key, value in env.items())])} bash {_PLACE}/{_SCRIPT}"


def load(task: Task, folder: Path) -> Solution:
    """Copy the task's solution to `folder`, which is made; from git's HEAD if it is not on disk any more.

    Raises: TaskError, OSError, git.GitError.
    """
    env = taskconfig.parse((task.path / "task.toml").read_text()).solution.env
    for key, value in env.items():
        if _HOST_VARIABLE.search(value):
            raise TaskError(f"task.toml: solution.env.{key} = {value}: variables of this machine are not passed on")
    sources.locate(task).copy_solution_to(folder)
    if not (folder / _SCRIPT).is_file():
        raise TaskError(f"task {task.task_id} has no solution/{_SCRIPT}")
    return Solution(folder, env)


async def upload(env: Tbench2HttpEnv, solution: Solution) -> None:
    """Put the files into the episode, with what an upload does not carry. Raises: Tbench2Error, OSError."""
    finishing = [f"mkdir -p {_PLACE}"]
    for path in _walk(solution.folder):
        place = f"{_PLACE}/{path.relative_to(solution.folder)}"
        finishing += _finishing(path, shlex.quote(place))
        if path.is_file() and not path.is_symlink():
            await env.upload(place, path)
    done = await env.exec(" && ".join(finishing), timeout_s=_FINISHING_TIMEOUT_S)
    if done.info.get("exit_code") != 0:
        raise Tbench2Error(f"{_PLACE} cannot be made in the episode: {done.error or done.output}")


def _walk(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.rglob("*")))


def _finishing(path: Path, place: str) -> list[str]:
    if path.is_symlink():
        return [f"ln -sfn {shlex.quote(str(path.readlink()))} {place}"]
    if path.is_dir():
        return [f"mkdir -p {place}"]
    return [f"chmod 755 {place}"] if os.access(path, os.X_OK) else []
