"""Fixtures of the server's tests: tasks made for one case, a server whose commands get two seconds, an episode."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import Server, idle_again
from support.talk import begin, http
from support.tasks import make_task

AddTask = Callable[..., str]


@pytest.fixture
def add_task(tasks: Path, request: pytest.FixtureRequest) -> Iterator[AddTask]:
    """Add a task to the folder of the running server, for this test: `add_task("exit 1")` answers with its id."""
    made: list[Path] = []

    def add(test: str | None, **more: Any) -> str:
        name = f"case-{len(made)}-{abs(hash(request.node.nodeid))}"
        made.append(make_task(tasks, name, test, **more))
        return name

    yield add
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shared_quick_server(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("quick"), tasks, {"TB2_COMMAND_TIMEOUT_S": "2"}).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def quick_server(shared_quick_server: Server) -> Iterator[Server]:
    """As `server`, with a command limit of 2 s."""
    with idle_again(shared_quick_server):
        yield shared_quick_server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with http(server) as client:
        yield client


@pytest.fixture
def episode(client: httpx.Client) -> Iterator[str]:
    """The path of a live episode of the task ok."""
    path = f"/episodes/{begin(client)}"
    yield path
    client.delete(path)
