"""Episodes of tasks whose environments were built: over a whole server, from reset to the verdict."""

import concurrent.futures
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.building import ledger, write_task
from support.processes import spawner
from support.server import MakeServer, Server, eventually, idle_again
from support.talk import begin, execute, http
from tbench2_env import Tbench2Action

#: Right when the agent's user has written ok, and who grades is root and finds the image's variables.
TEST = """echo $(id -u) $HOME $GREETING $PWD; [ "$(cat out.txt)" = ok ] && [ $(id -u) = 0 ] && r=1 || r=0
echo $r >/logs/verifier/reward.txt
"""
USER = """
ENV GREETING=hello
WORKDIR /srv/app
RUN chown someone /srv/app && echo secret >/root/secret && chmod 600 /root/secret
USER someone
"""
LAYERS = 25


@pytest.fixture(scope="module")
def image_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image-tasks")
    write_task(folder, "user", USER, test=TEST)
    write_task(folder, "root", "WORKDIR /app\nRUN mkdir -p /opt/t && echo kept >/opt/t/kept && echo 1 >/opt/t/gone\n")
    write_task(folder, "bad", "RUN sleep 2.2; echo what went wrong; exit 3\n")
    files: dict[str, str | bytes] = {f"f{number}": str(number) for number in range(LAYERS)}
    write_task(folder, "one", "COPY f0 /f/\n", files=files)
    write_task(folder, "many", "".join(f"COPY {name} /f/\n" for name in files), files=files)
    write_task(folder, "stand-in", "FROM nowhere:1\nRUN true\nCOPY f0 /f/\n", files={"f0": "0"})
    return folder


def image_env(tiny: Path) -> dict[str, str]:
    return {"TB2_BASES": f"tiny*={tiny}", "TB2_NETWORK": "private"}


@pytest.fixture(scope="module")
def shared_image_server(tmp_path_factory: pytest.TempPathFactory, image_tasks: Path, tiny: Path) -> Iterator[Server]:
    env = {**image_env(tiny), "TB2_WARM": "0"}  # resets are timed
    server = Server(tmp_path_factory.mktemp("images"), image_tasks, env).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def image_server(shared_image_server: Server) -> Iterator[Server]:
    with idle_again(shared_image_server):
        yield shared_image_server


@pytest.fixture
def api(image_server: Server) -> Iterator[httpx.Client]:
    with http(image_server) as client:
        yield client


def reset(api: httpx.Client, task: str) -> tuple[str, dict[str, Any]]:
    """A new episode's path, and `info`."""
    response = api.post("/episodes", json={"task_id": task})
    assert response.status_code == 201, response.text
    return f"/episodes/{response.json()['episode_id']}", response.json()["info"]


def output(api: httpx.Client, episode: str, command: str) -> list[str]:
    answer = execute(api, episode, command)
    assert answer["exit_code"] == 0, answer
    return str(answer["output"]).splitlines()


# ---------------------------------------------------------------- users, variables, folders
async def test_the_user_of_an_image(image_server: Server) -> None:
    """It is the agent's in commands, terminals and files; tests are root's."""
    async with image_server.client() as env:
        info = (await env.reset(task_id="user")).observation.info
        assert info["environment"] == {
            "source": "environment/Dockerfile, built on tiny", "layers": 3, "over_node": False,
        }  # fmt: skip
        assert info["workdir"] == "/srv/app"
        assert not [each for each in info["unmet"] if "network" not in each]
        who = "id -u; id -G; echo $HOME $GREETING $PWD; cat /root/secret 2>/dev/null || echo refused"
        expected = ["33", "33 44", "/home/someone hello /srv/app", "refused"]
        assert (await env.exec(who)).output.splitlines() == expected
        started = await env.step(Tbench2Action(action_type="exec", command=who, session_id="t", block=False))
        seen, deadline = started.observation.output, time.monotonic() + 5
        while "refused" not in seen and time.monotonic() < deadline:
            seen += (await env.step(Tbench2Action(action_type="view", session_id="t"))).observation.output
        assert seen.splitlines() == expected
        assert (await env.write_file("out.txt", "ok\n")).success
        assert "Permission denied" in (await env.write_file("/etc/x", "x")).error
        assert (await env.exec("stat -c '%u %g' out.txt")).output == "33 33\n"
        result = await env.evaluate()
        assert result.reward == 1.0
        assert result.observation.output.splitlines()[-1] == "0 /root hello /srv/app"


def test_files_of_the_user_of_an_image(api: httpx.Client) -> None:
    episode, _ = reset(api, "user")
    assert api.put(f"{episode}/files", params={"path": "up"}, content=b"loaded").status_code == 204
    assert output(api, episode, "stat -c '%u %g' up; cat up") == ["33 33", "loaded"]
    assert api.get(f"{episode}/files", params={"path": "/root/secret"}).status_code != 200
    api.delete(episode)


def test_the_workdir_that_the_operator_wants(make_server: MakeServer, image_tasks: Path, tiny: Path) -> None:
    server = make_server({**image_env(tiny), "TB2_TASK_WORKDIR": "/elsewhere"}, tasks=image_tasks)
    with http(server) as api:
        episode, info = reset(api, "user")
        assert info["workdir"] == "/elsewhere"
        assert output(api, episode, "pwd; ls -d /srv/app; echo $GREETING") == ["/elsewhere", "/srv/app", "hello"]
        api.delete(episode)


# ---------------------------------------------------------------- what is changed
def test_changes_over_an_image(api: httpx.Client) -> None:
    episode, info = reset(api, "root")
    other, _ = reset(api, "root")
    assert info["environment"]["over_node"] is False
    change = "echo ok >out.txt; rm /opt/t/gone; echo more >>/opt/t/kept; echo toor:x:0:0::/:/bin/sh >>/etc/passwd"
    output(api, episode, f"{change}; touch /etc/ld.so.preload; chmod 700 /opt/t")
    assert output(api, other, "ls; cat /opt/t/*; ls /etc/ld.so.preload 2>/dev/null || echo none") == [
        *("1", "kept", "none"),
    ]
    diff = api.get(f"{episode}/diff").json()
    found = {name: [(each["path"], each["kind"]) for each in diff[name]] for name in ("added", "modified", "deleted")}
    assert found == {
        "added": [("/app/out.txt", "added"), ("/etc/ld.so.preload", "added")],
        "modified": [("/etc/passwd", "modified"), ("/opt/t", "metadata"), ("/opt/t/kept", "modified")],
        "deleted": [("/opt/t/gone", "deleted")],
    }
    assert api.get(f"{episode}/diff", params={"path": "/opt/t/kept"}).text == "kept\nmore\n"
    assert not any(api.get(f"{other}/diff").json().values())
    answer = api.post(f"{episode}/evaluate", json={}).json()
    assert answer["reward"] == 1.0
    tampered = {each["path"]: each["kind"] for each in answer["info"]["tampered"]}
    assert tampered == {"/etc/ld.so.preload": "added", "/etc/passwd": "modified"}
    answer = api.post(f"{other}/evaluate", json={}).json()
    assert (answer["reward"], answer["info"]["tampered"]) == (0.0, [])
    for each in (episode, other):
        api.delete(each)


def test_the_node_stands_in_for_a_base(api: httpx.Client) -> None:
    """TB2_ENVIRONMENT=auto: what needs no base is laid over it, and the rest is told of."""
    episode, info = reset(api, "stand-in")
    assert info["environment"] == {
        "source": "files of environment/Dockerfile on the node's own root", "layers": 0, "over_node": True,
    }  # fmt: skip
    assert any("RUN true" in each for each in info["unmet"])
    assert any("nothing of TB2_BASES matches it" in each for each in info["unmet"])
    assert output(api, episode, "cat /f/f0") == ["0"]
    api.delete(episode)


# ---------------------------------------------------------------- failures and speed
def test_a_build_that_fails(api: httpx.Client) -> None:
    """Everybody is told the same, soon if it is known, while other tasks go on."""

    def fail() -> str:
        response = api.post("/episodes", json={"task_id": "bad"})
        assert response.status_code == 422, response.text
        return str(response.json()["detail"])

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        told = [threads.submit(fail) for _ in range(8)]
        begun = time.monotonic()
        api.delete(f"/episodes/{begin(api, 'one')}")
        assert time.monotonic() - begun < 2
        details = {each.result() for each in told}
    (detail,) = details
    assert detail.startswith("task bad: environment/Dockerfile line 2: RUN sleep 2.2; echo what went wrong; exit 3:")
    assert "ended with exit code 3" in detail
    assert detail.endswith("\nwhat went wrong")
    begun = time.monotonic()
    assert fail() == detail
    assert time.monotonic() - begun < 1


def test_the_spawner_dies_while_a_task_is_built(make_server: MakeServer, tmp_path: Path, tiny: Path) -> None:
    """Whoever waits for it gets it from the next one."""
    with ledger() as reports:
        write_task(tmp_path / "tasks", "t", reports.run("one") + reports.run("two") + "WORKDIR /app\n")
        server = make_server({**image_env(tiny), "TB2_NETWORK": "host"}, tasks=tmp_path / "tasks")
        reports.holds = "two"
        with http(server) as api, concurrent.futures.ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(reset, api, "t") for _ in range(2)]
            eventually(lambda: "two" in reports.lines, 10)
            reports.holds = ""
            os.kill(spawner(server), signal.SIGKILL)
            for each in waiting:
                api.delete(each.result()[0])
        assert reports.lines == ["one", "two", "two"]


def test_many_layers_reset_nearly_as_fast_as_one(api: httpx.Client) -> None:
    for task, layers in (("one", 2), ("many", LAYERS + 1)):
        episode, info = reset(api, task)
        assert info["environment"]["layers"] == layers
        api.delete(episode)

    def ratio() -> float:
        seconds: dict[str, list[float]] = {"one": [], "many": []}
        for _ in range(15):
            for task, taken in seconds.items():
                begun = time.perf_counter()
                episode, _ = reset(api, task)
                taken.append(time.perf_counter() - begun)
                api.delete(episode)
        return statistics.median(seconds["many"]) / statistics.median(seconds["one"])

    # 24 more layers are two milliseconds, of nine in all. Once more on a noisy machine.
    assert ratio() < 1.5 or ratio() < 1.5
