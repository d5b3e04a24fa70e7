"""The evidence over HTTP: of episodes that live, have ended, were an earlier server's, or have none."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import MakeServer, Server, eventually
from support.talk import begin, execute, http, problem
from support.tasks import OK_TEST, make_task

from .conftest import AddTask

REPORT = '{ "results": {"summary": {"tests": 1, "passed": 1}, "tests": [ {"name": "t", "status": "passed"} ]} }\n'
TEST = f"echo graded\ncat > /logs/verifier/ctrf.json <<'X'\n{REPORT}X\n{OK_TEST}"
ROUTES = ("verdict", "verifier/log", "verifier/ctrf")


def evidence(client: httpx.Client, episode: str) -> tuple[dict[str, Any], str, str]:
    """Verdict, log and report of the episode at the path `episode`, each with its type."""
    verdict, log, report = (client.get(f"{episode}/{route}") for route in ROUTES)
    assert [answer.status_code for answer in (verdict, log, report)] == [200] * 3
    assert verdict.headers["content-type"] == report.headers["content-type"] == "application/json"
    assert log.headers["content-type"] == "text/plain; charset=utf-8"
    for answer in (verdict, log, report):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert int(answer.headers["content-length"]) == len(answer.content)
    return verdict.json(), log.text, report.text


def ended(client: httpx.Client, server: Server, episode: str) -> None:
    client.delete(episode)
    name = episode.rpartition("/")[2]
    eventually(lambda: any(server.runs.glob(f"*.{name}/result.json")), 5)


# ---------------------------------------------------------------- what is there
def test_live_and_ended(server: Server, client: httpx.Client, add_task: AddTask) -> None:
    task = add_task(TEST)
    episode = f"/episodes/{begin(client, task)}"
    first = client.post(f"{episode}/evaluate?keep=1").json()
    verdict, log, report = evidence(client, episode)
    assert {key: verdict[key] for key in first} == first
    assert (verdict["episode_id"], verdict["task_id"]) == (episode.rpartition("/")[2], task)
    assert (verdict["reward"], verdict["done"], verdict["info"]["tests"]["passed"]) == (0.0, False, 1)
    assert (log, report) == ("graded\n", REPORT)
    execute(client, episode, "echo ok > out.txt")
    second = client.post(f"{episode}/evaluate").json()
    assert second["reward"] == 1.0
    assert {key: evidence(client, episode)[0][key] for key in second} == second, "the last one"
    live = evidence(client, episode)
    ended(client, server, episode)
    assert evidence(client, episode) == live


def test_a_websockets_episode(server: Server, client: httpx.Client) -> None:
    with server.client().sync() as env:
        env.reset(task_id="ok", episode_id="ws.1")
        env.evaluate()
        assert client.get("/episodes/ws.1/verdict").json()["reward"] == 0.0
        assert client.get("/episodes/ws.1/verifier/log").text == ""


def test_no_verdict_has_its_evidence_too(client: httpx.Client, add_task: AddTask) -> None:
    episode = f"/episodes/{begin(client, add_task('echo so far; uvx pytest --ctrf /logs/verifier/ctrf.json; exit 1'))}"
    client.post(f"{episode}/evaluate")
    verdict = client.get(f"{episode}/verdict").json()
    assert (verdict["reward"], verdict["done"], verdict["info"]["no_verdict"]) == (None, False, "reward_missing")
    assert verdict["error"].startswith("no verdict: ")
    assert client.get(f"{episode}/verifier/log").text.startswith("so far\n")
    problem(client.get(f"{episode}/verifier/ctrf"), 404, "NOT_KEPT")
    client.delete(episode)


def test_after_a_restart(make_server: MakeServer, tmp_path: Path) -> None:
    make_task(tmp_path / "own", "dotted.task", TEST)
    make_task(tmp_path / "own", "dotted", TEST)
    server = make_server(tasks=tmp_path / "own")
    with http(server) as client:
        for name, task in (("task.1", "dotted"), ("1", "dotted.task"), ("again", "dotted"), ("again", "dotted")):
            episode = f"/episodes/{begin(client, task, episode_id=name)}"
            execute(client, episode, "echo ok > out.txt" if name == "again" else "true")
            client.post(f"{episode}/evaluate")
            ended(client, server, episode)
            time.sleep(0.02)
        before = {name: evidence(client, f"/episodes/{name}") for name in ("task.1", "1", "again")}
    assert server.stop() == 0
    server.start()
    with http(server) as client:
        assert client.get("/episodes/again").status_code == 404
        for name, found in before.items():
            assert evidence(client, f"/episodes/{name}") == found
        assert (before["task.1"][0]["task_id"], before["1"][0]["task_id"]) == ("dotted", "dotted.task")
        assert (before["again"][0]["reward"], before["1"][0]["reward"]) == (1.0, 0.0)
        newest = json.loads((server.runs / "dotted.again.2" / "verdict.json").read_text())
        assert before["again"][0] == newest
        problem(client.get("/episodes/dotted.task.1/verdict"), 404, "UNKNOWN_EPISODE")
        live = f"/episodes/{begin(client, 'dotted', episode_id='again')}"
        problem(client.get(f"{live}/verdict"), 404, "NOT_KEPT")
        client.delete(live)


# ---------------------------------------------------------------- what is not there
@pytest.mark.parametrize("route", ROUTES)
def test_nothing_to_show(server: Server, client: httpx.Client, route: str) -> None:
    for unknown in ("nope", "..", "%2e%2e", "ok", ".*", "a%00b", "repo_cache", "%0a", "(", "x" * 255):
        response = client.get(f"/episodes/{unknown}/{route}")
        if response.headers["content-type"] != "application/problem+json":
            assert unknown == ".."  # the client's own idea of a path
            continue
        problem(response, 404, "HTTP_ERROR" if unknown == ".." else "UNKNOWN_EPISODE")
    problem(client.get(f"/episodes/{'x' * 256}/{route}"), 422, "VALIDATION_ERROR")
    episode = f"/episodes/{begin(client)}"
    assert "not evaluated" in problem(client.get(f"{episode}/{route}"), 404, "NOT_KEPT")["detail"]
    ended(client, server, episode)
    problem(client.get(f"{episode}/{route}"), 404, "NOT_KEPT")


def test_what_was_pruned(make_server: MakeServer) -> None:
    server = make_server({"TB2_KEEP_RUNS": "1"})
    with http(server) as client:
        for name in ("old", "new"):
            episode = f"/episodes/{begin(client, episode_id=name)}"
            client.post(f"{episode}/evaluate")
            ended(client, server, episode)
        eventually(lambda: not list(server.runs.glob("ok.old")), 5)
        assert "any more" in problem(client.get("/episodes/old/verdict"), 404, "NOT_KEPT")["detail"]
        assert client.get("/episodes/new/verdict").json()["reward"] == 0.0


def test_the_token_is_asked_for(make_server: MakeServer) -> None:
    server = make_server({"TB2_AUTH_TOKEN": "abc"})
    with http(server) as client:
        for route in ROUTES:
            assert client.get(f"/episodes/x/{route}").status_code == 401


# ---------------------------------------------------------------- content
def test_the_log_is_whole_within_its_bound(make_server: MakeServer, tmp_path: Path) -> None:
    make_task(tmp_path / "own", "ok")
    make_task(tmp_path / "own", "long", "seq 100000\nprintf 'a\\0\\tb\\x1b]0;title\\x07\\n'\n" + OK_TEST)
    make_task(tmp_path / "own", "endless", "head -c 50M /dev/zero | tr '\\0' x; echo END\n" + OK_TEST)
    server = make_server({"TB2_OUTPUT_LIMIT_BYTES": str(1 << 20)}, tasks=tmp_path / "own")
    with http(server) as client:
        episode = f"/episodes/{begin(client, 'long')}"
        answer = client.post(f"{episode}/evaluate").json()
        log = client.get(f"{episode}/verifier/log").text
        assert log == "".join(f"{number}\n" for number in range(1, 100_001)) + "a\0\tb\n"
        assert len(answer["output"]) == 20_000
        assert log.endswith(answer["output"])
        client.delete(episode)
        episode = f"/episodes/{begin(client, 'endless')}"
        client.post(f"{episode}/evaluate")
        log = client.get(f"{episode}/verifier/log").text
        assert (1 << 20) <= len(log) < (1 << 20) + 100
        assert "bytes of output cut" in log
        assert log.endswith("END\n")
        client.delete(episode)


def test_a_report_that_is_no_json_comes_as_it_was(client: httpx.Client, add_task: AddTask) -> None:
    task = add_task("printf '{\\xff\\n' > /logs/verifier/ctrf.json; echo 1 > /logs/verifier/reward.txt")
    episode = f"/episodes/{begin(client, task)}"
    assert client.post(f"{episode}/evaluate").json()["reward"] == 1.0
    assert client.get(f"{episode}/verifier/ctrf").content == b"{\xff\n"
    client.delete(episode)


def test_a_reader_keeps_what_it_reads_while_the_next_verifier_replaces_it(
    server: Server, client: httpx.Client, add_task: AddTask
) -> None:
    task = add_task("cat big 2>/dev/null; echo small\n" + OK_TEST)
    episode = f"/episodes/{begin(client, task)}"
    execute(client, episode, "yes | head -c 1000000 > big")
    client.post(f"{episode}/evaluate")
    with http(server) as other, other.stream("GET", f"{episode}/verifier/log") as answer:
        execute(client, episode, "rm big")
        client.post(f"{episode}/evaluate")
        assert len(answer.read()) == 1_000_006
    assert client.get(f"{episode}/verifier/log").text == "small\n"
    client.delete(episode)


def test_readers_that_hang_up_leave_no_descriptor(server: Server, client: httpx.Client, add_task: AddTask) -> None:
    episode = f"/episodes/{begin(client, add_task('seq 100000; echo 1 > /logs/verifier/reward.txt'))}"
    client.post(f"{episode}/evaluate")
    before = server.descriptors()
    for _ in range(40):
        with client.stream("GET", f"{episode}/verifier/log") as answer:
            assert answer.status_code == 200
    eventually(lambda: server.descriptors() <= before + 1, 5, lambda: f"{server.descriptors()}, before {before}")
    assert client.get(f"{episode}/verifier/log").text.endswith("\n100000\n")
    client.delete(episode)


# ---------------------------------------------------------------- the server's own log
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_no_name_and_no_output_forges_a_line_of_the_servers_log(
    make_server: MakeServer, tmp_path: Path, log_format: str
) -> None:
    name = "x\n2026-11-29T00:00:00Z [info     ] FORGED\x1b[2J\u2028\x85y"
    make_task(tmp_path / "own", name, "printf '2026 [info] FORGED\\n'; echo '{' > /logs/verifier/reward.json")
    server = make_server({"TB2_LOG_FORMAT": log_format}, tasks=tmp_path / "own")
    with http(server) as client:
        episode = f"/episodes/{begin(client, name)}"
        assert client.post(f"{episode}/evaluate").json()["info"]["no_verdict"] == "reward_invalid"
        assert client.get(f"{episode}/verdict").json()["task_id"] == name
        assert client.get(f"{episode}/verifier/log").text == "2026 [info] FORGED\n"
        client.delete(episode)
        eventually(lambda: "episode ended" in server.log.read_text(), 5)
        text = server.log.read_text()
        assert not [line for line in text.splitlines() if line.startswith("2026") and "] FORGED" in line[:50]]
        assert "\x1b" not in text
        assert "FORGED" in text, "told as what it is: a part of the task's name"
        assert client.get(f"{episode}/verdict").json()["task_id"] == name, "found again, name and all"
