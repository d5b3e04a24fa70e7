"""CASES.md 7: the tasks' folder is only ever read, whoever reads it, and downloaded once."""

import asyncio
import http.server
import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from support.files import picture
from support.git import commit_all
from support.server import MakeServer, free_port
from support.tasks import make_task
from tbench2_env import ExecutionFailed, Tbench2Env


async def play(env: Tbench2Env, task_id: str = "ok") -> tuple[float | None, str | None]:
    """Solve and evaluate; answers with the reward and the task's commit."""
    async with env:
        reset = await env.reset(task_id=task_id)
        await env.exec("echo ok > out.txt")
        result = await env.evaluate()
        assert result.observation.error == ""
        return result.reward, reset.observation.info["task_commit"]


async def test_evaluate_restart_evaluate(make_server: MakeServer, tmp_path: Path) -> None:
    make_task(tmp_path / "own", "ok")
    before = picture(tmp_path / "own")
    server = make_server(tasks=tmp_path / "own")
    assert await play(server.client()) == (1.0, None)
    assert server.stop() == 0
    server.start()
    assert await play(server.client()) == (1.0, None)
    assert picture(tmp_path / "own") == before


async def test_a_server_killed_outright_starts_again(make_server: MakeServer, tmp_path: Path) -> None:
    make_task(tmp_path / "own", "ok")
    server = make_server(tasks=tmp_path / "own")
    env = server.client()
    await env.reset(task_id="ok")
    assert server.stop(9) == -9
    await env.close()
    server.start()
    assert await play(server.client()) == (1.0, None)


async def test_two_servers_share_tasks_and_scratch(make_server: MakeServer, tmp_path: Path) -> None:
    make_task(tmp_path / "own", "ok")
    before = picture(tmp_path / "own")
    scratch = tmp_path / "scratch"
    first, second = (make_server({"TB2_SCRATCH_DIR": str(scratch)}, tasks=tmp_path / "own") for _ in range(2))
    outcomes = await asyncio.gather(*(play(server.client()) for server in (first, second) * 8))
    assert outcomes == [(1.0, None)] * 16
    assert first.stop() == 0
    assert await play(second.client()) == (1.0, None)
    assert second.stop() == 0
    assert picture(tmp_path / "own") == before
    assert not list(scratch.glob("tbench2-*"))


async def test_a_checkout_that_lost_its_tests_evaluates_from_head(make_server: MakeServer, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "own", "ok")
    make_task(tmp_path / "own", "other")
    head = commit_all(tmp_path / "own")
    shutil.rmtree(folder / "tests")
    shutil.rmtree(folder / "solution")
    before = picture(tmp_path / "own")
    server = make_server(tasks=tmp_path / "own")
    assert await play(server.client(), "ok") == (1.0, head)
    assert await play(server.client(), "other") == (1.0, head)
    assert picture(tmp_path / "own") == before, "reading the checkout changed it"


async def test_a_changed_checkout_is_taken_from_the_disk(make_server: MakeServer, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "own", "ok")
    head = commit_all(tmp_path / "own")
    server = make_server(tasks=tmp_path / "own")
    assert await play(server.client()) == (1.0, head)
    (folder / "tests" / "test.sh").write_text("echo 0.25 > /logs/verifier/reward.txt\n")
    assert await play(server.client()) == (0.25, None)
    fixed = commit_all(tmp_path / "own")
    assert await play(server.client()) == (0.25, fixed)


# ---------------------------------------------------------------- the default tasks
def clones(trace: Path) -> int:
    """How many `git clone` were started, by git's own trace (GIT_TRACE2_EVENT: a file for each process)."""
    events = [json.loads(line) for file in trace.iterdir() for line in file.read_text().splitlines()]
    return sum("clone" in event["argv"] for event in events if event["event"] == "start")


async def test_eight_first_resets_of_two_servers_clone_once(make_server: MakeServer, tmp_path: Path) -> None:
    upstream, trace = tmp_path / "upstream", tmp_path / "trace"
    make_task(upstream, "ok")
    head = commit_all(upstream)
    trace.mkdir()
    env = {
        "TB2_TASKS_DIR": "",
        "TB2_REPO_URL": f"file://{upstream}",
        "TB2_CACHE_DIR": str(tmp_path / "cache"),
        "GIT_TRACE2_EVENT": str(trace),
    }
    servers = [make_server(env), make_server(env)]
    outcomes = await asyncio.gather(*(play(servers[number % 2].client()) for number in range(8)))
    assert outcomes == [(1.0, head)] * 8
    assert clones(trace) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["download.lock", "terminal-bench-2"]


async def test_a_path_is_a_repository_too(make_server: MakeServer, tmp_path: Path) -> None:
    make_task(tmp_path / "upstream" / "tasks", "ok")
    head = commit_all(tmp_path / "upstream")
    server = make_server({"TB2_TASKS_DIR": "", "TB2_REPO_URL": str(tmp_path / "upstream")})
    assert await play(server.client()) == (1.0, head)
    assert (server.runs / "repo_cache" / "terminal-bench-2" / "tasks" / "ok").is_dir()


class Archive(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and counts."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def archive_url(tmp_path: Path) -> Iterator[str]:
    """The address of a .zip of a checkout, as GitHub makes them."""
    make_task(tmp_path / "zipped" / "terminal-bench-2-main", "ok")
    served = tmp_path / "served"
    served.mkdir()
    with zipfile.ZipFile(served / "main.zip", "w") as file:
        for path in (tmp_path / "zipped").rglob("*"):
            file.write(path, path.relative_to(tmp_path / "zipped"))
    Archive.requests.clear()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: Archive(*arguments, directory=str(served))
    ) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


async def test_eight_first_resets_fetch_an_archive_once(
    make_server: MakeServer, archive_url: str, tmp_path: Path
) -> None:
    server = make_server({"TB2_TASKS_DIR": "", "TB2_REPO_URL": f"{archive_url}/main.zip"})
    outcomes = await asyncio.gather(*(play(server.client()) for _ in range(8)))
    assert outcomes == [(1.0, None)] * 8
    assert Archive.requests == ["/main.zip"]


@pytest.mark.parametrize("path", ["missing.zip", "missing.git"])
async def test_tasks_that_cannot_be_fetched_are_a_clear_error_and_tried_again(
    make_server: MakeServer, archive_url: str, path: str
) -> None:
    server = make_server({"TB2_TASKS_DIR": "", "TB2_REPO_URL": f"{archive_url}/{path}"})
    async with server.client() as env:
        for _ in range(2):
            with pytest.raises(ExecutionFailed, match="TB2_TASKS_DIR"):
                await env.reset(task_id="ok")
    assert len(Archive.requests) >= 2, "the second reset did not try again"


async def test_an_address_where_nobody_answers_is_a_clear_error(make_server: MakeServer) -> None:
    url = f"http://127.0.0.1:{free_port()}/tasks.git"
    server = make_server({"TB2_TASKS_DIR": "", "TB2_REPO_URL": url})
    async with server.client() as env:
        with pytest.raises(ExecutionFailed, match=f"(?s){url}.*TB2_TASKS_DIR"):
            await env.reset(task_id="ok")
    cache = server.runs / "repo_cache"
    assert [path.name for path in cache.iterdir()] == ["download.lock"], "a failed download left something"
