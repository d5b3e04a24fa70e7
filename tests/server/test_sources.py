"""Where a task's files come from: HEAD, or the folder as it is."""

import os
import shutil
from pathlib import Path

import pytest

from support.files import picture
from support.git import commit_all, git
from support.tasks import make_task
from tbench2_env.server.sources import fingerprint, locate, read
from tbench2_env.server.tasks import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A task with an executable, a link and a binary, in no repository."""
    folder = make_task(tmp_path / "repo", "t", files={"tests/data.bin": bytes(range(256)), "tests/run": "#!/bin/sh\n"})
    (folder / "tests" / "run").chmod(0o755)
    (folder / "tests" / "link").symlink_to("../nowhere")
    return Task("t", folder)


def copied(task: Task, tmp_path: Path, name: str = "copy") -> Path:
    locate(task).copy_to(tmp_path / name)
    return tmp_path / name


def without_solution(folder: Path) -> dict[str, tuple[int, str]]:
    return {path: what for path, what in picture(folder).items() if not path.startswith("solution")}


def test_a_plain_folder_is_copied_as_it_is_without_its_solution(task: Task, tmp_path: Path) -> None:
    before = picture(task.path)
    assert locate(task).commit is None
    assert picture(copied(task, tmp_path)) == without_solution(task.path)
    assert picture(task.path) == before


def test_only_the_tasks_own_solution_is_withheld(task: Task, tmp_path: Path) -> None:
    (task.path / "environment" / "solution").mkdir()
    (task.path / "environment" / "solution" / "f").touch()
    assert (copied(task, tmp_path) / "environment" / "solution" / "f").exists()
    commit_all(task.path.parent)
    assert (copied(task, tmp_path, "again") / "environment" / "solution" / "f").exists()


def test_a_clean_checkout_is_taken_from_head(task: Task, tmp_path: Path) -> None:
    head = commit_all(task.path.parent)
    assert locate(task).commit == head
    copy = copied(task, tmp_path)
    assert picture(copy) == without_solution(task.path)
    assert not (copy / "solution").exists()


def test_tests_deleted_from_the_disk_come_from_head(task: Task, tmp_path: Path) -> None:
    whole = without_solution(task.path)
    head = commit_all(task.path.parent)
    shutil.rmtree(task.path / "tests")
    shutil.rmtree(task.path / "solution")
    before = picture(task.path.parent)
    assert locate(task).commit == head
    assert picture(copied(task, tmp_path)) == whole
    assert picture(task.path.parent) == before


def test_a_deleted_file_of_the_environment_is_a_change(task: Task, tmp_path: Path) -> None:
    commit_all(task.path.parent)
    (task.path / "environment" / "Dockerfile").unlink()
    assert locate(task).commit is None
    assert not (copied(task, tmp_path) / "environment" / "Dockerfile").exists()


@pytest.mark.parametrize("change", ["edit", "untracked", "mode", "staged"])
def test_a_changed_task_is_taken_from_the_disk(task: Task, tmp_path: Path, change: str) -> None:
    repo = task.path.parent
    commit_all(repo)
    match change:
        case "edit":
            (task.path / "instruction.md").write_text("other")
        case "untracked":
            (task.path / "new é file").write_text("new")
        case "mode":
            (task.path / "instruction.md").chmod(0o755)
        case "staged":
            (task.path / "instruction.md").write_text("other")
            git(repo, "add", "--all")
    assert locate(task).commit is None
    assert picture(copied(task, tmp_path)) == without_solution(task.path)


def test_a_changed_task_without_its_tests_has_those_of_head(task: Task, tmp_path: Path) -> None:
    commit_all(task.path.parent)
    tests = picture(task.path / "tests")
    shutil.rmtree(task.path / "tests")
    (task.path / "instruction.md").write_text("other")
    copy = copied(task, tmp_path)
    assert locate(task).commit is None
    assert (copy / "instruction.md").read_text() == "other"
    assert picture(copy / "tests") == tests


def test_a_change_elsewhere_in_the_repository_does_not_matter(task: Task) -> None:
    make_task(task.path.parent, "t2")
    make_task(task.path.parent, "t-other")
    head = commit_all(task.path.parent)
    (task.path.parent / "t2" / "instruction.md").write_text("changed")
    shutil.rmtree(task.path.parent / "t-other")
    assert locate(task).commit == head


def test_a_subfolder_of_a_larger_repository(task: Task, tmp_path: Path) -> None:
    head = commit_all(tmp_path)
    assert locate(task).commit == head
    assert picture(copied(task, tmp_path)) == without_solution(task.path)


def test_a_folder_with_strange_characters(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "r é:[x]*", "t a*")
    other = make_task(tmp_path / "r é:[x]*", "t ab")
    head = commit_all(tmp_path / "r é:[x]*")
    (other / "instruction.md").write_text("changed")
    assert locate(Task("t a*", folder)).commit == head


def test_an_ignored_task_is_taken_from_the_disk(task: Task, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("repo\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "--quiet", "--message", "x")
    assert locate(task).commit is None
    assert picture(copied(task, tmp_path)) == without_solution(task.path)


def test_a_repository_without_a_commit(task: Task, tmp_path: Path) -> None:
    git(task.path.parent, "init", "--quiet")
    assert locate(task).commit is None
    assert picture(copied(task, tmp_path)) == without_solution(task.path)


def test_a_broken_repository_is_a_folder(task: Task, tmp_path: Path) -> None:
    (task.path.parent / ".git").mkdir()
    assert locate(task).commit is None
    (task.path.parent / ".git").rmdir()
    (task.path.parent / ".git").write_text("gitdir: /nowhere\n")
    assert locate(task).commit is None


@pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")
def test_a_checkout_of_another_user(task: Task) -> None:
    head = commit_all(task.path.parent)
    for path in [task.path.parent, *task.path.parent.rglob("*")]:
        os.chown(path, 1234, 1234, follow_symlinks=False)
    assert locate(task).commit == head


def test_reading_a_checkout_writes_nothing_to_it(task: Task, tmp_path: Path) -> None:
    commit_all(task.path.parent)
    os.utime(task.path / "instruction.md", (1, 1))  # git status would refresh its index
    index = (task.path.parent / ".git" / "index").stat()
    copied(task, tmp_path)
    after = (task.path.parent / ".git" / "index").stat()
    assert (after.st_mtime_ns, after.st_ino) == (index.st_mtime_ns, index.st_ino)


def test_the_fingerprint_changes_with_the_files_and_with_head(task: Task) -> None:
    seen = [fingerprint(task)]
    assert fingerprint(task) == seen[0]
    commit_all(task.path.parent)
    seen.append(fingerprint(task))
    (task.path / "tests" / "run").write_text("#!/bin/bash\n")
    seen.append(fingerprint(task))
    (task.path / "tests" / "run").chmod(0o644)
    seen.append(fingerprint(task))
    (task.path / "empty").mkdir()
    seen.append(fingerprint(task))
    (task.path / "tests" / "link").unlink()
    seen.append(fingerprint(task))
    repo, linked = task.path.parent, Task("t", task.path.parent.parent / "linked" / "t")
    git(repo, "commit", "--allow-empty", "--message", "x")
    seen.append(fingerprint(task))
    git(repo, "pack-refs", "--all")
    packed = fingerprint(task)
    git(repo, "commit", "--allow-empty", "--message", "y")
    seen.append(fingerprint(task))
    assert packed not in seen
    git(repo, "checkout", "-q", "--detach", "HEAD~1")
    seen.append(fingerprint(task))
    git(repo, "worktree", "add", "-q", "-b", "linked", str(linked.path.parent))
    seen.append(fingerprint(linked))
    git(linked.path.parent, "commit", "--allow-empty", "--message", "z")
    seen.append(fingerprint(linked))
    assert fingerprint(linked) == seen[-1]
    assert len(set(seen)) == len(seen)


def test_one_file_of_a_task(task: Task) -> None:
    assert read(task, "tests/data.bin") == bytes(range(256))
    assert read(task, "tests/nothing") is None
    assert read(task, "task.toml/x") is None


def test_one_file_that_was_deleted_from_the_disk(task: Task) -> None:
    commit_all(task.path.parent)
    shutil.rmtree(task.path / "tests")
    assert read(task, "tests/data.bin") == bytes(range(256))
    assert read(task, "tests/nothing") is None
