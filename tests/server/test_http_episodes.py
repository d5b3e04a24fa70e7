"""Episodes as resources: CONTRACT section 6, every status with its problem."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import MakeServer, Server, eventually
from support.talk import begin, execute, http, metric, problem
from support.tasks import make_task

from .conftest import AddTask

_LONG = "x" * 300
UNTIL_GO = "until [ -e go ]; do sleep 0.02; done"


# ---------------------------------------------------------------- the whole job
def test_an_episode_from_begin_to_verdict(client: httpx.Client) -> None:
    response = client.post("/episodes", json={"task_id": "ok"})
    assert response.status_code == 201
    created = response.json()
    assert set(created) == {"episode_id", "task_id", "instruction", "info"}
    assert (created["task_id"], created["instruction"]) == ("ok", "Write ok to out.txt (ok).\n")
    assert created["info"]["command_timeout_s"] == 20
    assert created["info"]["verifier_timeout_sec"] == 30
    assert created["info"]["queued_s"] == 0
    episode = response.headers["location"]
    assert episode == f"/episodes/{created['episode_id']}"
    assert client.get(episode).json()["state"] == "live"
    before = client.post(f"{episode}/evaluate").json()
    assert set(before) == {"reward", "done", "output", "error", "info"}
    assert (before["reward"], before["done"], before["error"]) == (0.0, True, "")
    assert execute(client, episode, "echo ok > out.txt; cat out.txt; exit 3") == {
        "output": "ok\n", "success": True, "error": "", "exit_code": 3, "timed_out": False,
    }  # fmt: skip
    after = client.post(f"{episode}/evaluate").json()
    assert (after["reward"], after["info"]["harness"], after["info"]["tests_passed"]) == (1.0, "tests/test.sh", True)
    assert client.get(episode).json()["reward"] == 1.0
    response = client.delete(episode)
    assert (response.status_code, response.content) == (204, b"")
    assert client.get(episode).json()["state"] == "ended"


def test_episodes_have_their_own_files(client: httpx.Client) -> None:
    one, other = (f"/episodes/{begin(client)}" for _ in range(2))
    execute(client, one, "echo mine > f")
    assert execute(client, other, "cat f")["exit_code"] == 1
    client.delete(one)
    assert execute(client, other, "echo ok")["output"] == "ok\n"
    client.delete(other)


def test_an_episode_is_the_same_whatever_shape_is_used(client: httpx.Client, episode: str) -> None:
    episode_id = episode.rpartition("/")[2]
    execute(client, episode, "echo resource > f")
    step = {"episode_id": episode_id, "action": {"command": "cat f; echo openenv > f"}}
    assert client.post("/step", json=step).json()["observation"]["output"] == "resource\n"
    assert client.get(f"{episode}/files?path=f").content == b"openenv\n"
    assert client.get(f"/state?episode_id={episode_id}").json()["step_count"] == 2


def test_a_websockets_episode_is_listed_and_can_be_used(server: Server, client: httpx.Client) -> None:
    with server.client().sync() as env:
        env.reset(task_id="ok", episode_id="from-the-socket")
        (entry,) = client.get("/episodes").json()["episodes"]
        assert (entry["episode_id"], entry["state"]) == ("from-the-socket", "live")
        execute(client, "/episodes/from-the-socket", "echo http > f")
        assert env.exec("cat f").output == "http\n"


def test_a_verdict_may_be_missing(client: httpx.Client, add_task: AddTask) -> None:
    episode = f"/episodes/{begin(client, add_task(None))}"
    response = client.post(f"{episode}/evaluate")
    answer = response.json()
    assert (response.status_code, answer["reward"], answer["info"]["no_verdict"]) == (200, None, "tests_missing")
    assert "tests/" in answer["error"]
    assert client.get(episode).json()["reward"] is None
    client.delete(episode)


def test_a_chosen_id(client: httpx.Client) -> None:
    assert begin(client, episode_id="mine.1-a_b") == "mine.1-a_b"
    second = begin(client, episode_id="mine.1-a_b")
    assert second != "mine.1-a_b", "a live episode is not replaced by a namesake"
    for episode_id in ("mine.1-a_b", second):
        assert client.get(f"/episodes/{episode_id}").json()["state"] == "live"
        client.delete(f"/episodes/{episode_id}")
    assert begin(client, episode_id="mine.1-a_b") == "mine.1-a_b"
    assert client.get("/episodes/mine.1-a_b").json()["state"] == "live"
    client.delete("/episodes/mine.1-a_b")


# ---------------------------------------------------------------- errors
UNKNOWN = [
    ("GET", "/episodes/nope", None),
    ("DELETE", "/episodes/nope", None),
    ("POST", "/episodes/nope/exec", {"command": "ls"}),
    ("POST", "/episodes/nope/exec?wait=0", {"command": "ls"}),
    ("POST", "/episodes/nope/evaluate", None),
    ("POST", "/episodes/nope/evaluate?wait=0", None),
    ("GET", "/episodes/nope/operations/x", None),
    ("PUT", "/episodes/nope/files?path=f", None),
    ("GET", "/episodes/nope/files?path=f", None),
    ("POST", "/step", {"episode_id": "nope", "action": {"command": "ls"}}),
    ("GET", "/state?episode_id=nope", None),
    ("GET", "/episodes/%2e%2e", None),
    ("GET", "/episodes/a%00b", None),
]


@pytest.mark.parametrize(("method", "url", "body"), UNKNOWN)
def test_an_unknown_episode_is_404(client: httpx.Client, method: str, url: str, body: Any) -> None:
    assert "POST /episodes" in problem(client.request(method, url, json=body), 404, "UNKNOWN_EPISODE")["detail"]


@pytest.mark.parametrize(("method", "url", "body"), [one for one in UNKNOWN[1:] if "%" not in one[1]])
def test_an_ended_episode_is_409(client: httpx.Client, method: str, url: str, body: Any) -> None:
    client.delete(f"/episodes/{begin(client, episode_id='over')}")
    if isinstance(body, dict) and "episode_id" in body:
        body = {**body, "episode_id": "over"}
    response = client.request(method, url.replace("nope", "over"), json=body)
    if method == "DELETE":
        assert response.status_code == 204
    else:
        assert "deleted" in problem(response, 409, "EPISODE_ENDED")["detail"]


def test_a_busy_episode_is_409(client: httpx.Client, episode: str) -> None:
    started = client.post(f"{episode}/exec?wait=0", json={"command": f"{UNTIL_GO}; echo ok"})
    eventually(lambda: bool(client.get(episode).json()["busy"]), 2)
    for url, body in (
        (f"{episode}/exec", {"command": "ls"}),
        (f"{episode}/exec?wait=0", {"command": "ls"}),
        (f"{episode}/evaluate", None),
        (f"{episode}/evaluate?wait=0", None),
        ("/step", {"episode_id": episode.rpartition("/")[2], "action": {"command": "ls"}}),
    ):
        problem(client.post(url, json=body), 409, "EPISODE_BUSY")
    assert client.put(f"{episode}/files?path=go").status_code == 204
    url = started.json()["url"]
    eventually(lambda: bool(client.get(url).json()["done"]), 5)
    assert client.get(url).json()["answer"]["output"] == "ok\n", "nobody else got in its way"
    assert execute(client, episode, "echo free")["output"] == "free\n"


@pytest.mark.parametrize("task_id", ["nope", "../ok", "/etc", "a/b", "a\0b", ".", _LONG])
@pytest.mark.parametrize("route", ["/episodes", "/reset"])
@pytest.mark.parametrize("field", ["task_id", "task_path"])
def test_an_unknown_task_is_404(client: httpx.Client, route: str, field: str, task_id: str) -> None:
    detail = problem(client.post(route, json={field: task_id}), 404, "UNKNOWN_TASK")["detail"]
    assert "give one of" in detail


def test_a_broken_task_is_422(client: httpx.Client, add_task: AddTask) -> None:
    task_id = add_task("", toml="[verifier\n")
    problem(client.post("/episodes", json={"task_id": task_id}), 422, "TASK_UNUSABLE")


BAD_BODIES = [
    ("/episodes", b""),
    ("/episodes", b"{"),
    ("/episodes", b"[]"),
    ("/episodes", b'"ok"'),
    ("/episodes", b"null"),
    ("/episodes", b'{"\xff": 1}'),
    ("/episodes", b"[" * 100_000),
    ("/episodes", b'{"task_id": 7}'),
    ("/episodes", b'{"task_id": ["ok"]}'),
    ("/episodes", b'{"task_id": "ok", "episode_id": ""}'),
    ("/episodes", b'{"task_id": "ok", "episode_id": "../x"}'),
    ("/episodes", b'{"task_id": "ok", "episode_id": "a b"}'),
    ("/episodes", b'{"task_id": "ok", "seed": "x"}'),
    ("/reset", b"{"),
    ("/reset", b"[]"),
    ("/reset", b'{"\xff": 1}'),
    ("/reset", b'{"task_id": 7}'),
    ("EXEC", b""),
    ("EXEC", b"{}"),
    ("EXEC", b'{"\xff": 1}'),
    ("EXEC", b'{"command": 7}'),
    ("EXEC", b'{"command": null}'),
    ("EXEC", b'{"command": "ls", "timeout_s": 0}'),
    ("EXEC", b'{"command": "ls", "timeout_s": -1}'),
    ("EXEC", b'{"command": "ls", "timeout_s": "soon"}'),
    ("EXEC", b'{"command": "ls", "timeout_s": NaN}'),
    ("EXEC", b'{"command": "ls", "timeout_s": 1e999}'),
    ("EXEC", b'{"command": "ls", "tmeout_s": 1}'),
    ("EXEC", b'{"command": "ls", "\\ud800": 1}'),
    ("/step", b"{}"),
    ("/step", b'{"\xff": 1}'),
    ("/step", b'{"action": {"command": "ls"}}'),
    ("/step", b'{"episode_id": "EPISODE"}'),
    ("/step", b'{"episode_id": "EPISODE", "action": []}'),
    ("/step", b'{"episode_id": "EPISODE", "action": {"cmd": "ls"}}'),
    ("/step", b'{"episode_id": "EPISODE", "action": {"command": 5}}'),
    ("/step", b'{"episode_id": "EPISODE", "action": {"wait_seconds": "x"}}'),
    ("/step", b'{"episode_id": "", "action": {}}'),
]


@pytest.mark.parametrize(("url", "body"), BAD_BODIES, ids=lambda value: str(value)[:40])
def test_a_bad_body_is_422(client: httpx.Client, episode: str, url: str, body: bytes) -> None:
    """And nothing comes of it."""
    url = url.replace("EXEC", f"{episode}/exec")
    content = body.replace(b"EPISODE", episode.rpartition("/")[2].encode())
    before = client.get("/episodes").json()["total"]
    response = client.post(url, content=content, headers={"content-type": "application/json"})
    problem(response, 422, "VALIDATION_ERROR")
    assert client.get("/episodes").json()["total"] == before


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "offset=-1", "offset=9999999", "state=dead", f"task_id={_LONG}"],
)
def test_a_bad_query_is_422(client: httpx.Client, query: str) -> None:
    detail = problem(client.get(f"/episodes?{query}"), 422, "VALIDATION_ERROR")["detail"]
    assert query.partition("=")[0] in detail


@pytest.mark.parametrize("url", ["/state", "/state?episode_id=", f"/state?episode_id={_LONG}"])
def test_a_state_of_nothing_is_422(client: httpx.Client, url: str) -> None:
    problem(client.get(url), 422, "VALIDATION_ERROR")


@pytest.mark.parametrize("wait", ["2", "-1", "x"])
def test_a_bad_wait_is_422(client: httpx.Client, episode: str, wait: str) -> None:
    problem(client.post(f"{episode}/evaluate?wait={wait}"), 422, "VALIDATION_ERROR")
    problem(client.post(f"{episode}/exec?wait={wait}", json={"command": "ls"}), 422, "VALIDATION_ERROR")


def test_other_errors_are_problems_too(client: httpx.Client) -> None:
    problem(client.get("/nothing/here"), 404, "HTTP_ERROR")
    response = client.put("/episodes")
    problem(response, 405, "HTTP_ERROR")
    assert response.headers["allow"]


def test_capacity_is_429_in_both_shapes(make_server: MakeServer) -> None:
    server = make_server({"MAX_CONCURRENT_ENVS": "1"})
    with http(server) as client:
        held = begin(client)
        for url in ("/episodes", "/reset"):
            response = client.post(url, json={"task_id": "ok"})
            body = problem(response, 429, "CAPACITY_REACHED")
            assert (body["active_sessions"], body["max_sessions"]) == (1, 1)
            assert int(response.headers["retry-after"]) >= 1
            assert "CAPACITY_REACHED" in body["detail"]
        assert client.get("/ready").json()["active"] == 1
        client.delete(f"/episodes/{held}")
        client.delete(f"/episodes/{begin(client)}")


# ---------------------------------------------------------------- not waiting
def test_an_exec_that_is_not_waited_for(client: httpx.Client, episode: str) -> None:
    begun = time.monotonic()
    response = client.post(f"{episode}/exec?wait=0", json={"command": f"echo some; {UNTIL_GO}; exit 5"})
    assert time.monotonic() - begun < 1
    assert response.status_code == 202
    assert set(response.json()) == {"handle", "url"}
    url = response.headers["location"]
    assert url == response.json()["url"]
    first = client.get(url).json()
    assert first == {"handle": response.json()["handle"], "done": False, "answer": None}
    assert client.put(f"{episode}/files?path=go").status_code == 204
    eventually(lambda: bool(client.get(url).json()["done"]), 6)
    answer = client.get(url).json()["answer"]
    assert answer == {"output": "some\n", "success": True, "error": "", "exit_code": 5, "timed_out": False}
    assert client.get(url).json()["answer"] == answer, "it can be asked for again"


def test_an_evaluate_that_is_not_waited_for(client: httpx.Client, episode: str) -> None:
    execute(client, episode, "echo ok > out.txt")
    url = client.post(f"{episode}/evaluate?wait=0").json()["url"]
    eventually(lambda: bool(client.get(url).json()["done"]), 6)
    answer = client.get(url).json()["answer"]
    assert (answer["reward"], answer["info"]["harness"]) == (1.0, "tests/test.sh")


def test_a_command_that_times_out_unwatched(client: httpx.Client, episode: str) -> None:
    url = client.post(f"{episode}/exec?wait=0", json={"command": "sleep 99", "timeout_s": 0.5}).json()["url"]
    eventually(lambda: bool(client.get(url).json()["done"]), 4)
    answer = client.get(url).json()["answer"]
    assert (answer["success"], answer["timed_out"]) == (False, True)


def test_operations_belong_to_their_episode(client: httpx.Client, episode: str) -> None:
    handle = client.post(f"{episode}/exec?wait=0", json={"command": "true"}).json()["handle"]
    other = f"/episodes/{begin(client)}"
    problem(client.get(f"{other}/operations/{handle}"), 404, "UNKNOWN_EPISODE")
    problem(client.get(f"{episode}/operations/nope"), 404, "UNKNOWN_EPISODE")
    client.delete(other)


def test_many_operations_are_not_kept_for_ever(client: httpx.Client, episode: str) -> None:
    urls = []
    for number in range(80):
        urls.append(client.post(f"{episode}/exec?wait=0", json={"command": f"echo {number}"}).json()["url"])
        eventually(lambda: bool(client.get(urls[-1]).json()["done"]), 5)
    assert client.get(urls[-1]).json()["answer"]["output"] == "79\n"
    assert client.get(urls[-60]).json()["answer"]["output"] == "20\n"
    assert client.get(urls[0]).status_code == 404


def test_deleting_ends_what_runs_unwatched(client: httpx.Client, server: Server) -> None:
    episode = f"/episodes/{begin(client)}"
    url = client.post(f"{episode}/exec?wait=0", json={"command": "sleep 999"}).json()["url"]
    begun = time.monotonic()
    assert client.delete(episode).status_code == 204
    assert time.monotonic() - begun < 2
    problem(client.get(url), 409, "EPISODE_ENDED")
    server.assert_idle(2)


# ---------------------------------------------------------------- listing
def test_listing_pages_and_filters(make_server: MakeServer, tmp_path: Path) -> None:
    for task_id in ("ok", "ok-two"):
        make_task(tmp_path / "tasks", task_id)
    server = make_server(tasks=tmp_path / "tasks")
    with http(server) as client:
        assert client.get("/episodes").json() == {"episodes": [], "total": 0, "next_offset": None}
        ids = [begin(client, "ok" if number % 2 else "ok-two") for number in range(7)]

        def listed(query: str) -> list[str]:
            """All pages, of two episodes each."""
            found: list[str] = []
            offset: int | None = 0
            while offset is not None:
                page = client.get(f"/episodes?limit=2&offset={offset}{query}").json()
                assert len(page["episodes"]) <= 2
                found += [entry["episode_id"] for entry in page["episodes"]]
                offset = page["next_offset"]
            assert page["total"] == len(found)
            return found

        assert listed("") == ids
        assert listed("&task_id=ok") == ids[1::2]
        assert listed("&task_id=nope") == []
        assert listed("&state=ended") == []
        for episode_id in (ids[4], ids[1]):
            client.delete(f"/episodes/{episode_id}")
        assert listed("") == [ids[n] for n in (0, 2, 3, 5, 6)]
        assert listed("&state=ended") == [ids[4], ids[1]]
        assert listed("&state=ended&task_id=ok") == [ids[1]]
        assert sorted(listed("&state=all")) == sorted(ids)
        page = client.get("/episodes?limit=5").json()
        assert (page["total"], page["next_offset"]) == (5, None), "no page after a full last one"
        assert client.get("/episodes?offset=5").json() == {"episodes": [], "total": 5, "next_offset": None}
        entry = client.get("/episodes?limit=1").json()["episodes"][0]
        assert entry == client.get(f"/episodes/{ids[0]}").json()
        assert (entry["state"], entry["busy"], entry["reward"], entry["end"]) == ("live", False, None, None)
        for episode_id in ids:
            client.delete(f"/episodes/{episode_id}")


# ---------------------------------------------------------------- OpenEnv's shape
def test_reset_then_step(client: httpx.Client) -> None:
    """CASE 21."""
    answer = client.post("/reset", json={"task_id": "ok"}).json()
    assert set(answer) == {"observation", "reward", "done"}
    assert (answer["reward"], answer["done"]) == (0.0, False)
    observation = answer["observation"]
    assert (observation["task_id"], observation["success"]) == ("ok", True)
    assert observation["instruction"] == "Write ok to out.txt (ok).\n"
    episode_id = observation["metadata"]["episode_id"]

    def step(**action: Any) -> dict[str, Any]:
        response = client.post("/step", json={"episode_id": episode_id, "action": action})
        assert response.status_code == 200, response.text
        stepped: dict[str, Any] = response.json()
        return stepped

    assert step(command="echo ok > out.txt; pwd")["observation"]["output"] == "/app\n"
    assert step(command="cat out.txt")["observation"]["output"] == "ok\n"
    assert step(action_type="nonsense")["observation"]["success"] is False
    assert step(command="cat", session_id="t", block=False)["observation"]["success"] is True
    typed = step(action_type="write", session_id="t", command="hello")["observation"]
    assert "hello" in typed["output"]
    assert step(action_type="write_file", file_path="a/b", content="x")["observation"]["success"] is True
    state = client.get(f"/state?episode_id={episode_id}").json()
    assert (state["episode_id"], state["task_id"], state["step_count"]) == (episode_id, "ok", 6)
    assert (state["terminal_ready"], state["last_action_type"]) == (True, "write_file")
    verdict = step(action_type="evaluate")
    assert (verdict["reward"], verdict["done"]) == (1.0, True)
    assert verdict["observation"]["info"]["harness"] == "tests/test.sh"
    assert step(action_type="close")["done"] is True
    response = client.post("/step", json={"episode_id": episode_id, "action": {"command": "ls"}})
    assert "closed" in problem(response, 409, "EPISODE_ENDED")["detail"]


def test_reset_takes_what_openenv_sends(make_server: MakeServer) -> None:
    server = make_server({"TB2_DEFAULT_TASK_ID": "ok"})
    with http(server) as client:
        for body in (None, {}, {"task_name": "ok", "extra": 1}):
            answer = client.post("/reset", json=body).json()
            assert answer["observation"]["task_id"] == "ok", body
            client.delete(f"/episodes/{answer['observation']['metadata']['episode_id']}")


def test_a_reset_over_http_never_ends_another_episode(client: httpx.Client, server: Server) -> None:
    ids = [client.post("/reset", json={"task_id": "ok"}).json() for _ in range(3)]
    assert client.get("/episodes").json()["total"] == 3
    assert metric(server, "tbench2_slots_active") == 3
    for answer in ids:
        client.delete(f"/episodes/{answer['observation']['metadata']['episode_id']}")
