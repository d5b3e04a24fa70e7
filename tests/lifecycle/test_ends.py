"""Every end of an episode, of its helper and of its server: what is told, and that nothing is left."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import Stopped, inits, kill_init, launcher, matching, running, spawner
from support.server import HELPERS, MakeServer, Server, eventually
from support.talk import Wire, async_http, begin, http, metric, problem, slots_active, soon, wire

#: Seconds that all of a dead helper's episodes have to answer.
TOLD_WITHIN_S = 2.0
BUSY = 8
KILLS = 5


def result(server: Server, episode_id: str) -> dict[str, Any]:
    """result.json of an episode, once it is there."""

    def files() -> list[Path]:
        return list(server.runs.glob(f"*.{episode_id}/result.json"))

    eventually(lambda: bool(files()), 5, lambda: f"no result.json: {list(server.runs.iterdir())}")
    found: dict[str, Any] = json.loads(files()[0].read_text())
    return found


def ended(server: Server, episode_id: str) -> dict[str, Any]:
    """How GET /episodes?state=ended lists it, once it does."""

    def entries() -> list[dict[str, Any]]:
        listed = httpx.get(f"{server.url}/episodes?state=ended&limit=1000", trust_env=False).json()["episodes"]
        return [entry for entry in listed if entry["episode_id"] == episode_id]

    eventually(lambda: bool(entries()), 5)
    (entry,) = entries()
    return entry


async def _closed(server: Server) -> str:
    async with wire(server) as session:
        episode_id = str((await session.reset())["metadata"]["episode_id"])
        await session.tell("close")
        await session.ws.wait_closed()
        return episode_id


async def _closed_by_action(server: Server) -> str:
    async with wire(server) as session:
        episode_id = str((await session.reset())["metadata"]["episode_id"])
        assert (await session.step(action_type="close"))["done"] is True
        return episode_id


async def _replaced(server: Server) -> str:
    async with wire(server) as session:
        episode_id = str((await session.reset())["metadata"]["episode_id"])
        await session.reset()
        return episode_id


async def _deleted(server: Server) -> str:
    with http(server) as client:
        episode_id = begin(client)
        assert client.delete(f"/episodes/{episode_id}").status_code == 204
        return episode_id


async def _disconnected(server: Server) -> str:
    async with wire(server) as session:
        episode_id = str((await session.reset())["metadata"]["episode_id"])
        session.drop()
        return episode_id


async def _died(server: Server) -> str:
    with http(server) as client:
        episode_id = begin(client)
        kill_init(server)
        return episode_id


async def _idle(server: Server) -> str:
    with http(server) as client:
        return begin(client)


ENDS = {
    "closed": (_closed, {}),
    "closed by action": (_closed_by_action, {}),
    "replaced": (_replaced, {}),
    "deleted": (_deleted, {}),
    "disconnected": (_disconnected, {}),
    "died": (_died, {}),
    "idle": (_idle, {"TB2_IDLE_TIMEOUT_S": "0.5"}),
    "deadline": (_idle, {"TB2_EPISODE_TIMEOUT_S": "0.5"}),
}


@pytest.mark.parametrize("name", ENDS)
async def test_an_end_is_told_alike_everywhere(
    server: Server, make_server: MakeServer, life_tasks: Path, name: str
) -> None:
    end, (cause, env) = name.split(" ")[0], ENDS[name]
    if env:
        server = make_server(env, tasks=life_tasks)
    before = metric(server, "tbench2_ends_total", reason=end)
    episode_id = await cause(server)
    entry = ended(server, episode_id)
    assert (entry["state"], entry["end"], entry["task_id"], entry["busy"]) == ("ended", end, "ok", False)
    assert metric(server, "tbench2_ends_total", reason=end) == before + 1
    outcome = result(server, episode_id)
    assert (outcome["end"], outcome["end_message"]) == (end, entry["message"])
    assert (outcome["episode_id"], outcome["task_id"], outcome["reward"]) == (episode_id, "ok", None)
    with http(server) as client:
        detail = problem(client.get(f"/state?episode_id={episode_id}"), 409, "EPISODE_ENDED")["detail"]
        assert detail == entry["message"]
        assert client.get(f"/episodes/{episode_id}").json() == entry


async def test_the_verdict_outlives_the_episode(server: Server) -> None:
    with http(server) as client:
        episode_id = begin(client)
        client.post(f"/episodes/{episode_id}/exec", json={"command": "echo ok > out.txt"})
        assert client.post(f"/episodes/{episode_id}/evaluate").json()["reward"] == 1.0
        client.delete(f"/episodes/{episode_id}")
        assert client.get(f"/episodes/{episode_id}").json()["reward"] == 1.0
    assert result(server, episode_id)["reward"] == 1.0


# ---------------------------------------------------------------- death of PID 1
async def test_a_dead_sandbox_answers_everything_with_what_died(server: Server) -> None:
    before = metric(server, "tbench2_ends_total", reason="died")
    async with wire(server) as session:
        await session.reset()
        assert (await session.step(command="echo ok > out.txt"))["success"] is True
        await session.step(command="cat", session_id="t", block=False)
        kill_init(server)
        await soon(lambda: metric(server, "tbench2_ends_total", reason="died") == before + 1, 2)
        for action in (
            {"command": "ls"},
            {"action_type": "write_file", "file_path": "f", "content": "x"},
            {"command": "cat", "session_id": "new", "block": False},
            {"action_type": "view", "session_id": "t"},
            {"action_type": "write", "session_id": "t", "command": "x"},
            {"action_type": "evaluate"},
            {"action_type": "close"},
        ):
            answer = await session.step(**action)
            assert (answer["success"], answer["reward"], answer["done"]) == (False, None, True), action
            assert "PID 1" in answer["error"]
        verdict = await session.step(action_type="evaluate")
        assert verdict["info"]["no_verdict"] == "sandbox_dead"
        assert "harness" not in verdict["info"]
        assert not inits(server), "it is never replaced by a fresh one"
        await session.reset()
        assert (await session.step(command="cat out.txt"))["info"]["exit_code"] == 1
        assert (await session.step(action_type="evaluate"))["reward"] == 0.0
        assert slots_active(server) == 1


async def test_death_in_mid_command_is_told(server: Server) -> None:
    async with wire(server) as session:
        for _ in range(10):
            await session.reset()
            await session.tell("step", {"command": "echo some; sleep 999"})
            await soon(lambda: running(server, "sleep 999"), 5)
            kill_init(server)
            answer = (await session.hear())["data"]
            assert answer["observation"]["success"] is False
            assert "PID 1" in answer["observation"]["error"]
            assert answer["done"] is True


@pytest.mark.parametrize("task_id", ["hang", "score-then-hang"])
async def test_death_in_mid_evaluate_is_never_a_score(server: Server, task_id: str) -> None:
    """Even if the reward is written already."""
    before, scored = (metric(server, "tbench2_verdicts_total", outcome=each) for each in ("sandbox_dead", "reward_1"))
    async with wire(server) as session:
        for number in range(10):
            await session.reset(task_id)
            await session.tell("step", {"action_type": "evaluate"})
            await soon(lambda: running(server, "sleep 999"), 5)
            kill_init(server)
            answer = (await session.hear())["data"]
            assert (answer["reward"], answer["done"]) == (None, True), answer
            assert answer["observation"]["success"] is False
            assert "PID 1" in answer["observation"]["error"]
            assert answer["observation"]["info"] == {"no_verdict": "sandbox_dead"}
            assert metric(server, "tbench2_verdicts_total", outcome="sandbox_dead") == before + number + 1
    assert metric(server, "tbench2_verdicts_total", outcome="reward_1") == scored


async def test_death_over_http(server: Server) -> None:
    async with async_http(server) as client:
        for route in ("exec", "evaluate"):
            created = await client.post("/episodes", json={"task_id": "score-then-hang"})
            url = f"/episodes/{created.json()['episode_id']}"
            body = {"command": "sleep 999"} if route == "exec" else None
            call = asyncio.create_task(client.post(f"{url}/{route}", json=body))
            await soon(lambda: running(server, "sleep 999"), 5)
            kill_init(server)
            response = await call
            # Whichever comes first, the answer or the end; but never a success, and never a score.
            told = response.json()
            if response.status_code == 200:
                assert told.get("reward") is None
                assert "PID 1" in told["error"]
            else:
                assert "PID 1" in problem(response, 409, "EPISODE_ENDED")["detail"]
            await soon(lambda: slots_active(server) == 0, 2)
            problem(await client.post(f"{url}/evaluate"), 409, "EPISODE_ENDED")
            assert (await client.get(url)).json()["reward"] is None


# ---------------------------------------------------------------- death of the helpers
@asynccontextmanager
async def _busy(server: Server, marker: str) -> AsyncIterator[tuple[list[Wire], "asyncio.Future[Any]"]]:
    """Six WebSocket and two HTTP episodes that run `marker`, and the gathered answers."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(async_http(server))
        sessions = [await stack.enter_async_context(wire(server)) for _ in range(6)]
        await asyncio.gather(*(session.reset() for session in sessions))
        ids = [(await client.post("/episodes", json={"task_id": "ok"})).json()["episode_id"] for _ in range(2)]
        calls = [session.ask("step", {"command": marker}) for session in sessions]
        posts = [client.post(f"/episodes/{one}/exec", json={"command": marker, "timeout_s": 600}) for one in ids]
        answers: asyncio.Future[Any] = asyncio.gather(*calls, *posts, return_exceptions=True)
        await soon(lambda: len(running(server, marker)) == BUSY, 20)
        yield sessions, answers
        await answers


@pytest.mark.parametrize("helper", [spawner, launcher])
async def test_a_helper_that_dies_under_load_is_replaced(
    make_server: MakeServer, life_tasks: Path, helper: Any
) -> None:
    server = make_server(tasks=life_tasks)
    for restarts in range(1, 3):
        async with _busy(server, "sleep 999") as (sessions, answers), async_http(server) as client:
            (old,) = server.scratch.glob("tbench2-*")
            os.kill(helper(server), signal.SIGKILL)
            async with asyncio.timeout(TOLD_WITHIN_S):
                told = await answers
            for answer in told[:6]:
                observation = answer["data"]["observation"]
                assert (observation["success"], answer["data"]["done"]) == (False, True), answer
                assert "spawner" in observation["error"]
            for response in told[6:]:
                body = response.json()
                assert response.status_code in (200, 409)
                assert body.get("success", False) is False
                assert "spawner" in body.get("error", "") + body.get("detail", "")
            assert (await client.get("/health")).status_code == 200
            await soon(lambda: not running(server, "sleep 999"), 2)
            late = await sessions[0].step(action_type="evaluate")
            assert (late["reward"], late["info"]) == (None, {"no_verdict": "sandbox_dead"})
            await asyncio.gather(*(session.reset() for session in sessions))
            for session in sessions:
                assert (await session.step(command="echo ok"))["output"] == "ok\n"
            assert metric(server, "tbench2_helper_restarts") == restarts
            assert metric(server, "tbench2_ends_total", reason="died") == restarts * BUSY
            assert slots_active(server) == 6
            await soon(lambda: len(list(server.scratch.glob("tbench2-*"))) == 1, 5)
            assert not old.exists()
        await soon(lambda: slots_active(server) == 0, 2)
    await soon(lambda: len(server.descendants()) == HELPERS, 2)  # warm sandboxes end a little later


async def test_a_reset_during_the_helpers_death_gets_the_new_helper(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server(tasks=life_tasks)
    async with wire(server) as session, async_http(server) as client:
        with Stopped(pid := spawner(server)):
            await session.tell("reset", {"task_id": "ok"})
            creation = asyncio.create_task(client.post("/episodes", json={"task_id": "ok"}))
            await soon(lambda: slots_active(server) == 2, 2)
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            assert (await session.hear())["type"] == "observation"
            created = await creation
        assert created.status_code == 201, created.text
        assert (await session.step(command="echo ok"))["output"] == "ok\n"
        url = f"/episodes/{created.json()['episode_id']}"
        answer = await client.post(f"{url}/exec", json={"command": "echo ok"})
        assert answer.json()["output"] == "ok\n"
        assert slots_active(server) == 2
        assert metric(server, "tbench2_helper_restarts") == 1
        await client.delete(url)


async def test_acts_on_an_episode_that_is_still_being_made(server: Server) -> None:
    """Its id is the client's own choice, and so may be known before there is an answer."""
    async with async_http(server) as client, async_http(server) as other:
        for act in ("exec", "evaluate", "get", "delete"):
            with Stopped(spawner(server)):
                creation = asyncio.create_task(client.post("/episodes", json={"task_id": "ok", "episode_id": act}))
                await soon(lambda: slots_active(server) == 1, 2)
                await asyncio.sleep(0.2)
                calls = {
                    "exec": other.post(f"/episodes/{act}/exec", json={"command": "ls"}),
                    "evaluate": other.post(f"/episodes/{act}/evaluate"),
                    "get": other.get(f"/episodes/{act}"),
                    "delete": other.delete(f"/episodes/{act}"),
                }
                call = asyncio.create_task(calls.pop(act))
                for unused in calls.values():
                    unused.close()
                await asyncio.sleep(0.3)
            response = await call
            assert response.status_code < 500, f"{act}: {response.text}"
            await creation
            await client.delete(f"/episodes/{act}")
            await soon(lambda: slots_active(server) == 0, 3)
            server.assert_idle()


# ---------------------------------------------------------------- death and end of the server
@pytest.fixture
def pair(tmp_path: Path, life_tasks: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers on one scratch folder."""
    shared = tmp_path / "scratch"
    servers = []
    for name in ("victim", "neighbour"):
        (tmp_path / name).mkdir()
        server = Server(tmp_path / name, life_tasks, {"TB2_SCRATCH_DIR": str(shared)})
        server.scratch = shared
        servers.append(server.start())
    yield servers[0], servers[1]
    for server in servers:
        server.stop()
    assert not list(shared.iterdir())


async def test_a_killed_server_leaves_nothing_and_its_neighbour_alone(pair: tuple[Server, Server]) -> None:
    victim, neighbour = pair
    async with wire(neighbour) as other:
        await other.reset()
        await other.step(command="echo kept > f; sleep 998 & echo")
        (folder,) = {path for path in victim.scratch.iterdir() if _holds(path, spawner(neighbour))}
        for number in range(KILLS):
            marker = f"sleep 99{number}{os.getpid()}"
            async with _busy(victim, marker):
                helpers = [spawner(victim), launcher(victim)]
                if number == KILLS - 1:
                    # With its helper killed first, nobody is left to clean up: that is the next start's work.
                    os.kill(helpers[0], signal.SIGSTOP)
                victim.process.kill()
                victim.process.wait()
                if number == KILLS - 1:
                    os.kill(helpers[0], signal.SIGKILL)
            await soon(lambda marker=marker: not matching(marker), 3, lambda marker=marker: f"{matching(marker)}")  # type: ignore[misc]
            await soon(lambda helpers=helpers: not any(Path(f"/proc/{pid}").exists() for pid in helpers), 5)  # type: ignore[misc]
            victim.start()
            eventually(lambda: len(list(victim.scratch.glob("tbench2-*"))) == 2, 5)
            assert folder.is_dir()
            assert (await other.step(command="cat f; pgrep -c -x sleep"))["output"] == "kept\n1\n"
        async with wire(victim) as session:
            await session.reset()
            assert (await session.step(command="echo ok"))["output"] == "ok\n"


def _holds(folder: Path, pid: int) -> bool:
    return Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()


async def test_the_next_start_sweeps_what_nobody_could(pair: tuple[Server, Server]) -> None:
    victim, neighbour = pair
    async with wire(victim) as session, wire(neighbour) as other:
        await session.reset()
        await session.step(command="seq 500 | xargs touch")
        await other.reset()
        helper = spawner(victim)
        (left,) = {path for path in victim.scratch.iterdir() if _holds(path, helper)}
        os.kill(helper, signal.SIGSTOP)
        victim.process.kill()
        victim.process.wait()
        os.kill(helper, signal.SIGKILL)
        await soon(lambda: not Path(f"/proc/{helper}").exists(), 3)
        assert left.is_dir(), "the test is about what is left"
        victim.start()
        assert not left.exists()
        assert len(list(victim.scratch.iterdir())) == 2
        assert (await other.step(command="echo ok"))["output"] == "ok\n"


async def test_a_big_upper_is_deleted_in_the_background(server: Server) -> None:
    async with async_http(server) as client:
        ids = [(await client.post("/episodes", json={"task_id": "ok"})).json()["episode_id"] for _ in range(2)]
        for episode_id in ids:
            command = "mkdir d; cd d; seq 20000 | xargs touch; ls | wc -l"
            answer = (
                await client.post(f"/episodes/{episode_id}/exec", json={"command": command, "timeout_s": 90})
            ).json()
            assert answer["output"] == "20000\n"
        for episode_id in ids:
            begun = time.monotonic()
            assert (await client.delete(f"/episodes/{episode_id}")).status_code == 204
            assert time.monotonic() - begun < 1
        assert slots_active(server) == 0
        begun = time.monotonic()
        assert (await client.get("/health")).status_code == 200
        assert time.monotonic() - begun < 1
    await soon(lambda: not server.worktrees(), 20)


async def test_sigterm_ends_http_episodes_too(make_server: MakeServer, life_tasks: Path) -> None:
    server = make_server(tasks=life_tasks)
    with http(server) as client:
        ids = [begin(client, "hang") for _ in range(3)]
        client.post(f"/episodes/{ids[0]}/exec?wait=0", json={"command": "sleep 999", "timeout_s": 900})
        client.post(f"/episodes/{ids[1]}/evaluate?wait=0")
    async with async_http(server) as waiting:
        call = asyncio.create_task(waiting.post(f"/episodes/{ids[2]}/exec", json={"command": "sleep 999"}))
        await soon(lambda: len(running(server, "sleep 999")) == 3, 5)
        left = set(server.descendants())
        begun = time.monotonic()
        assert await asyncio.to_thread(server.stop) == 0
        assert time.monotonic() - begun < 8
        # The end is told where there is time to, and the connection lost where not.
        with contextlib.suppress(httpx.TransportError):
            assert (await call).status_code >= 400
    await soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 3)
    assert [result(server, episode_id)["end"] for episode_id in ids] == ["shutdown"] * 3
    assert not list(server.scratch.iterdir())
