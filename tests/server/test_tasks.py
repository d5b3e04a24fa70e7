"""The catalogue: ids and paths are confined to it."""

from pathlib import Path

import pytest

from support.server import Server
from support.tasks import make_task
from tbench2_env import BadRequest
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Catalogue, DefaultCatalogue, UnknownTask

WRONG_IDS = [
    "../ok", "ok/", "/ok", "./ok", "sub/ok", ".", "..", "ok\0", "x" * 5000, "é" * 255, "OK", "file", "empty", "~", "*",
    "ok/../ok", "tasks/ok", ".git", " ok",
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of tasks with strays in it, beside a task that is out of bounds."""
    folder = tmp_path / "root"
    make_task(folder, "ok")
    make_task(folder / "sub", "ok")
    make_task(tmp_path, "outside")
    (folder / "file").write_text("no task")
    (folder / "empty").mkdir()
    (folder / ".git").mkdir()
    (folder / "README.md").touch()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    return folder


def test_only_tasks_are_listed(root: Path) -> None:
    make_task(root, "b")
    (root / "only-toml").mkdir()
    (root / "only-toml" / "task.toml").touch()
    assert [task.task_id for task in Catalogue(root).list()] == ["b", "ok", "only-toml"]


def test_tasks_may_lie_in_a_folder_called_tasks(root: Path) -> None:
    make_task(root / "tasks", "inner")
    make_task(root / "tasks", "ok")
    catalogue = Catalogue(root)
    assert [task.task_id for task in catalogue.list()] == ["inner", "ok"]
    assert catalogue.find("inner").path == root / "tasks" / "inner"
    assert catalogue.find("ok").path == root / "ok", "the folder itself comes first"


def test_a_task_added_later_is_found(root: Path) -> None:
    catalogue = Catalogue(root)
    with pytest.raises(UnknownTask):
        catalogue.find("later")
    make_task(root, "later")
    assert catalogue.find("later").task_id == "later"


@pytest.mark.parametrize("task_id", [*WRONG_IDS, "../outside", "", "dangling", "loop"])
def test_ids_are_names_of_tasks_and_nothing_else(root: Path, task_id: str) -> None:
    with pytest.raises(UnknownTask, match="task") as caught:
        Catalogue(root).find(task_id)
    assert len(str(caught.value)) < 1000
    assert "ok" in str(caught.value), "it does not say what there is"


def test_a_path_is_that_of_a_task(root: Path, tmp_path: Path) -> None:
    catalogue = Catalogue(root)
    path = str(catalogue.find("ok").path)
    assert catalogue.find(None, path).task_id == "ok"
    assert catalogue.find("other", path + "/").task_id == "ok", "the path decides"
    for wrong in (
        str(tmp_path / "outside"),
        "ok",
        f"{path}/../ok",
        f"{path}/tests",
        str(root),
        "/",
        "/etc",
        "\0",
        "x" * 9999,
    ):
        with pytest.raises(UnknownTask, match="task_path"):
            catalogue.find("ok", wrong)


def test_an_empty_folder_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UnknownTask, match="TB2_TASKS_DIR"):
        Catalogue(tmp_path).find("ok")


async def test_a_missing_folder_says_what_to_set_and_may_come_later(tmp_path: Path, root: Path) -> None:
    catalogue = DefaultCatalogue(Settings(tasks_dir=tmp_path / "later"))
    with pytest.raises(TaskError, match="TB2_TASKS_DIR"):
        await catalogue.get()
    (tmp_path / "later").symlink_to(root)
    assert (await catalogue.get()).find("ok").path == root / "ok"


# ---------------------------------------------------------------- over the server
@pytest.mark.parametrize("task_id", WRONG_IDS)
async def test_a_wrong_id_is_the_clients_mistake(server: Server, task_id: str) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        with pytest.raises(BadRequest, match="task"):
            await env.reset(task_id=task_id)
        assert (await env.exec("echo kept")).output == "kept\n", "a wrong request cost the episode"


async def test_the_path_that_reset_answers_is_accepted_by_reset(server: Server) -> None:
    async with server.client() as env:
        path = (await env.reset(task_id="ok")).observation.task_path
        for key in ("task_path", "path"):
            assert (await env.reset(**{key: path})).observation.task_id == "ok"
        with pytest.raises(BadRequest, match="task_path"):
            await env.reset(task_path="/etc")
        assert (await env.reset(task_name="ok")).observation.task_path == path
        with pytest.raises(BadRequest, match="headless-terminal"):
            await env.reset()  # the default task is not among the fixtures
