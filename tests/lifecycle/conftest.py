"""Tasks whose verifiers hang, and servers to break."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server, idle_again
from support.talk import slots_active
from support.tasks import TOML, make_task

HANG_TEST = "sleep 999\n"
#: The reward is there before the end: whoever ends the verifier now must not be taken for its verdict.
SCORE_THEN_HANG_TEST = "echo 1 > /logs/verifier/reward.txt\nsleep 999\n"


@pytest.fixture(scope="session")
def life_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ok; hang and score-then-hang, whose verifiers run for 999 s; brief, whose agent gets 2 s."""
    folder = tmp_path_factory.mktemp("life-tasks")
    make_task(folder, "ok")
    long = TOML.replace("30.0", "900.0")
    make_task(folder, "hang", HANG_TEST, toml=long)
    make_task(folder, "score-then-hang", SCORE_THEN_HANG_TEST, toml=long)
    make_task(folder, "brief", toml=TOML + "[agent]\ntimeout_sec = 2.0\n")
    return folder


@pytest.fixture(scope="session")
def life_server(tmp_path_factory: pytest.TempPathFactory, life_tasks: Path) -> Iterator[Server]:
    # Without warm sandboxes: tests kill and count first processes, and must know whose.
    server = Server(tmp_path_factory.mktemp("life"), life_tasks, {"TB2_WARM": "0"}).start()
    yield server
    assert server.stop() == 0
    assert not list(server.scratch.iterdir()), "the scratch folder outlived the server"


@pytest.fixture
def server(life_server: Server) -> Iterator[Server]:
    """A server with these tasks, idle before and after the test."""
    with idle_again(life_server):
        yield life_server
    assert slots_active(life_server) == 0, "a slot is nobody's"
