"""Fixtures: one real server for most tests, checked after each that it is as idle as before."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.rootfs import make_rootfs
from support.server import MakeServer, Server, idle_again
from support.tasks import copy_samples, make_task


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample tasks and `ok`, the task of CASES.md. Tests that need other tasks make them with `make_server`."""
    folder = tmp_path_factory.mktemp("tasks")
    copy_samples(folder)
    make_task(folder, "ok")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with bash and a few other programs: a base for images, as TB2_BASES takes it."""
    folder = tmp_path_factory.mktemp("tiny")
    make_rootfs(folder)
    return folder


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), tasks).start()
    yield server
    assert server.stop() == 0
    assert not list(server.scratch.iterdir()), "the scratch folder outlived the server"


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A running server with the fixture tasks, 64 slots and a command limit of 20 s; idle again after the test."""
    with idle_again(shared_server):
        yield shared_server


@pytest.fixture
def make_server(tmp_path: Path, tasks: Path) -> Iterator[MakeServer]:
    """Start a server of the test's own: `make_server({"TB2_COMMAND_TIMEOUT_S": "2"}, tasks=folder)`."""
    started: list[Server] = []

    def make(env: Mapping[str, str] = {}, tasks: Path = tasks, wrap: tuple[str, ...] = ()) -> Server:
        folder = tmp_path / f"server-{len(started)}"
        folder.mkdir()
        started.append(Server(folder, tasks, env, wrap))
        return started[-1].start()

    yield make
    try:
        for server in started:
            if server.process.poll() is None:
                server.assert_idle()
                assert server.stop() == 0
            assert not list(server.scratch.glob("tbench2-*")), "the scratch folder outlived the server"
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
