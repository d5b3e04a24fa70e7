"""Snapshots: made once for each content, tests and solution kept apart from what the agent sees."""

import asyncio
from pathlib import Path

import pytest

from support.tasks import make_task
from tbench2_env.isolation.spec import RUNGS
from tbench2_env.server.images import dockerfile, environments
from tbench2_env.server.images.environments import Environment, Environments
from tbench2_env.server.snapshots import Ground, Snapshots
from tbench2_env.server.taskconfig import TaskConfig, TaskError
from tbench2_env.server.tasks import Task


class NothingBuilt(Environments):
    """Every task is laid over the node, as where its base is not to be had."""

    def __init__(self) -> None:
        """Without a spawner and a store, which nothing here wants."""

    async def prepare(self, task: Task, context: Path, config: TaskConfig, workdir: str | None) -> Environment:
        path = context / "Dockerfile"
        return environments.on_node(dockerfile.load(path)) if path.is_file() else environments.folder_of(task)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    (tmp_path / "layers").mkdir()
    return Ground(tmp_path / "layers", RUNGS["E"], ())


@pytest.fixture
def snapshots(ground: Ground) -> Snapshots:
    return Snapshots(ground, NothingBuilt(), None)


DOCKERFILE = "FROM debian\nENV A=1 B=2\nWORKDIR /app\nCOPY data.txt /srv/data.txt\n"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    folder = make_task(
        tmp_path / "tasks",
        "t",
        dockerfile=DOCKERFILE,
        toml='[environment.env]\nB = "3"\n',
        files={"environment/data.txt": "d"},
    )
    return Task("t", folder)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


async def test_the_layer_holds_what_the_dockerfile_makes_and_the_tests_apart(
    snapshots: Snapshots, ground: Ground, task: Task
) -> None:
    snapshot = await snapshots.get(task)
    folder = ground.layers / snapshot.name
    assert names(folder / "root") == {"srv/data.txt"}
    assert (folder / "root" / "app").is_dir()
    assert names(folder / "tests") == {"test.sh", "test_outputs.py"}
    assert {path.name for path in folder.iterdir()} == {"root", "tests"}
    assert (snapshot.workdir, snapshot.env) == ("/app", {"A": "1", "B": "3"})
    assert (snapshot.has_tests, snapshot.test_script is not None) == (True, True)
    assert snapshot.instruction == "Write ok to out.txt (t).\n"
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"ANSWERKEY" not in everything


async def test_without_a_dockerfile_the_folder_itself_is_seen(
    snapshots: Snapshots, ground: Ground, tmp_path: Path
) -> None:
    folder = make_task(tmp_path / "tasks", "plain", dockerfile=None, files={"notes/a": "a"})
    snapshot = await snapshots.get(Task("plain", folder))
    assert snapshot.workdir == str(folder)
    seen = ground.layers / snapshot.name / "root" / folder.relative_to("/")
    assert names(seen) == {"instruction.md", "task.toml", "notes/a"}


async def test_a_snapshot_is_made_once(snapshots: Snapshots, ground: Ground, task: Task) -> None:
    first, *others = await asyncio.gather(*(snapshots.get(task) for _ in range(8)))
    assert all(other is first for other in others)
    assert [path.name for path in ground.layers.iterdir()] == [first.name], "half-made folders are left"


async def test_a_change_makes_another_and_the_old_one_stays(snapshots: Snapshots, ground: Ground, task: Task) -> None:
    first = await snapshots.get(task)
    (task.path / "environment" / "data.txt").write_text("other")
    second = await snapshots.get(task)
    assert first.name != second.name
    assert first.digest != second.digest
    assert (ground.layers / first.name / "root" / "srv" / "data.txt").read_text() == "d"
    assert (ground.layers / second.name / "root" / "srv" / "data.txt").read_text() == "other"
    (task.path / "environment" / "data.txt").write_text("d")
    assert (await snapshots.get(task)).name == first.name, "the same content has the same name"
    (task.path / "solution" / "solve.sh").write_text("other")
    assert (await snapshots.get(task)).name == first.name, "the solution is no part of it"


async def test_tasks_without_tests(snapshots: Snapshots, tmp_path: Path) -> None:
    none = await snapshots.get(Task("none", make_task(tmp_path / "tasks", "none", None)))
    assert (none.has_tests, none.test_script) == (False, None)
    only = make_task(tmp_path / "tasks", "pytest", None, files={"tests/test_it.py": ""})
    pytest_only = await snapshots.get(Task("pytest", only))
    assert (pytest_only.has_tests, pytest_only.test_script) == (True, None)


async def test_who_decides_the_working_directory(ground: Ground, tmp_path: Path) -> None:
    toml = '[environment]\nworkdir = "/from-toml"\n'
    both = Task("both", make_task(tmp_path / "tasks", "both", toml=toml))
    docker = Task("docker", make_task(tmp_path / "tasks", "docker", toml=""))
    neither = Task("neither", make_task(tmp_path / "tasks", "neither", toml="", dockerfile="FROM debian\n"))
    snapshots = Snapshots(ground, NothingBuilt(), None)
    assert [(await snapshots.get(task)).workdir for task in (both, docker, neither)] == ["/from-toml", "/app", "/"]
    overridden = Snapshots(ground, NothingBuilt(), "/over/ride")
    for task in (both, docker, neither):
        snapshot = await overridden.get(task)
        assert snapshot.workdir == "/over/ride"
        assert (ground.layers / snapshot.name / "root" / "over" / "ride").is_dir()


@pytest.mark.parametrize(
    ("path", "content", "word"),
    [
        ("task.toml", b"[verifier\n", "task.toml"),
        ("task.toml", b"\xff\xfe", "t "),
        ("environment/Dockerfile", b"FROM debian\nCOPY missing.txt /x\n", "missing.txt"),
        ("environment/Dockerfile", b"FROM debian\nCOPY ../tests/test.sh /x\n", "Dockerfile"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_a_task_is_named(
    snapshots: Snapshots, ground: Ground, task: Task, path: str, content: bytes, word: str
) -> None:
    (task.path / path).write_bytes(content)
    with pytest.raises(TaskError, match="task t") as caught:
        await snapshots.get(task)
    assert word in str(caught.value)
    assert not list(ground.layers.iterdir()), "something half-made is left"
    (task.path / path).write_bytes(b"" if path == "task.toml" else b"FROM debian\n")
    assert (await snapshots.get(task)).config.agent.timeout_sec is None


async def test_a_copied_answer_is_still_out_of_reach(snapshots: Snapshots, ground: Ground, task: Task) -> None:
    """Links in the build context that point at tests/ or solution/ do not bring them in."""
    (task.path / "environment" / "peek").symlink_to("../solution/solve.sh")
    (task.path / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY . /app/\n")
    snapshot = await snapshots.get(task)
    root = ground.layers / snapshot.name / "root"
    found = [path for path in root.rglob("*") if path.is_file() and b"KEY" in path.read_bytes()]
    assert found == []
