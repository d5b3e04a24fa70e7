"""A task's solution: its files, its variables, its command line."""

import shutil
from pathlib import Path

import pytest

from support.files import picture
from support.git import commit_all
from support.tasks import TOML, make_task
from tbench2_env.server.cli import solution
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task


def loaded(folder: Path, tmp_path: Path) -> solution.Solution:
    return solution.load(Task(folder.name, folder), tmp_path / "copy")


def test_its_files_are_those_on_disk(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", files={"solution/data/x.bin": bytes(range(256))})
    (task / "solution" / "link").symlink_to("data/x.bin")
    (task / "solution" / "solve.sh").chmod(0o755)
    loaded(task, tmp_path)
    assert picture(tmp_path / "copy") == picture(task / "solution")


def test_what_was_deleted_from_the_disk_comes_from_head(tmp_path: Path) -> None:
    task = make_task(tmp_path / "repo", "t", files={"solution/data/x": "x"})
    before = picture(task / "solution")
    commit_all(tmp_path / "repo")
    shutil.rmtree(task / "solution")
    loaded(task, tmp_path)
    assert picture(tmp_path / "copy") == before


def test_also_of_a_task_that_was_changed_otherwise(tmp_path: Path) -> None:
    task = make_task(tmp_path / "repo", "t")
    commit_all(tmp_path / "repo")
    shutil.rmtree(task / "solution")
    (task / "instruction.md").write_text("another")
    loaded(task, tmp_path)
    assert (tmp_path / "copy" / "solve.sh").is_file()


@pytest.mark.parametrize("committed", [True, False])
def test_a_task_without_any(tmp_path: Path, committed: bool) -> None:
    task = make_task(tmp_path / "repo", "t")
    shutil.rmtree(task / "solution")
    if committed:
        commit_all(tmp_path / "repo")
    with pytest.raises(TaskError, match="task t has no solution/, neither on disk nor in HEAD"):
        loaded(task, tmp_path)


def test_one_without_its_script(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", files={"solution/other.sh": ""})
    (task / "solution" / "solve.sh").unlink()
    with pytest.raises(TaskError, match=r"task t has no solution/solve\.sh"):
        loaded(task, tmp_path)


def test_its_variables_are_on_its_command_line(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", toml=TOML + '[solution.env]\nKEY = "it\'s"\n')
    command = loaded(task, tmp_path).command
    assert command == """env DEBIAN_FRONTEND=noninteractive 'KEY=it'"'"'s' bash /solution/solve.sh"""


def test_no_variable_of_this_machine_is_passed_on(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", toml=TOML + '[solution.env]\nKEY = "${HOME}"\n')
    with pytest.raises(TaskError, match=r"solution\.env\.KEY = \$\{HOME\}"):
        loaded(task, tmp_path)
