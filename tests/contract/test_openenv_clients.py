"""OpenEnv's own clients, unchanged, against this server.

Importing openenv costs seconds, so the modules that need it do so once for the whole test run.
"""

import asyncio
import time
from typing import Any

import pytest
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from pydantic import Field
from websockets.exceptions import ConnectionClosedOK

from support.server import MakeServer, Server
from support.talk import wire


class UpstreamAction(Action):
    """The fields a client of upstream's package sends; unlike ours, never `metadata`."""

    action_type: str = "exec"
    command: str = ""
    session_id: str | None = None
    block: bool = True
    wait_seconds: float | None = None
    file_path: str = ""
    content: str = ""


class UpstreamObservation(Observation):
    instruction: str = ""
    output: str = ""
    success: bool = True
    error: str = ""
    task_id: str = ""
    task_path: str = ""
    session_id: str | None = None
    action_type: str = ""
    info: dict[str, Any] = Field(default_factory=dict)


class UpstreamState(State):
    task_id: str = ""
    task_path: str = ""
    session_id: str = ""
    terminal_ready: bool = False
    last_action_type: str = ""
    last_command: str = ""
    last_output: str = ""


class UpstreamEnv(EnvClient[UpstreamAction, UpstreamObservation, UpstreamState]):
    """A client in the shape of upstream's: three methods between dictionaries and strict models."""

    def _step_payload(self, action: UpstreamAction) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[UpstreamObservation]:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = UpstreamObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> UpstreamState:
        return UpstreamState.model_validate(payload)


async def test_the_generic_client_plays_an_episode(server: Server) -> None:
    async with GenericEnvClient(base_url=server.url) as env:
        reset = await env.reset(task_id="ok")
        assert (reset.observation["task_id"], reset.observation["success"]) == ("ok", True)
        assert reset.observation["instruction"] == "Write ok to out.txt (ok).\n"
        assert not reset.done

        where = await env.step({"action_type": "exec", "command": "pwd"})
        assert where.observation["output"] == "/app\n"
        written = await env.step({"action_type": "write_file", "file_path": "out.txt", "content": "ok\n"})
        assert (written.observation["success"], written.observation["error"]) == (True, "")

        state = await env.state()
        assert (state["task_id"], state["step_count"], state["last_action_type"]) == ("ok", 2, "write_file")
        verdict = await env.step({"action_type": "evaluate"})
        assert (verdict.reward, verdict.done, verdict.observation["error"]) == (1.0, True, "")
        assert verdict.observation["info"]["harness"] == "tests/test.sh"


async def test_a_client_of_upstreams_shape_plays_an_episode(server: Server) -> None:
    env = UpstreamEnv(base_url=server.url)
    await env.connect()
    reset = await env.reset(task_id="ok")
    assert (reset.observation.task_id, reset.observation.task_path) == ("ok", str(server.tasks / "ok"))

    listing = await env.step(UpstreamAction(command="echo no > out.txt; ls"))
    assert (listing.observation.output, listing.observation.action_type) == ("out.txt\n", "exec")
    unsolved = await env.step(UpstreamAction(action_type="evaluate"))
    assert (unsolved.reward, unsolved.observation.info["tests_passed"]) == (0.0, False)

    await env.step(UpstreamAction(action_type="write_file", file_path="/app/out.txt", content="ok"))
    solved = await env.step(UpstreamAction(action_type="evaluate"))
    assert (solved.reward, solved.observation.reward, solved.done) == (1.0, 1.0, True)

    state = await env.state()
    assert (state.task_id, state.step_count, state.terminal_ready) == ("ok", 4, True)
    assert state.episode_id == reset.observation.metadata["episode_id"]
    await env.close()
    server.assert_idle(within_s=1)


async def test_a_named_terminal_through_an_openenv_client(server: Server) -> None:
    async with UpstreamEnv(base_url=server.url) as env:
        await env.reset(task_id="ok")
        await env.step(UpstreamAction(command="cat", block=False, session_id="cat"))
        written = await env.step(UpstreamAction(action_type="write", session_id="cat", command="purr"))
        heard, deadline = written.observation.output, time.monotonic() + 10
        while heard.count("purr") < 2:  # the terminal's echo and cat's answer
            assert time.monotonic() < deadline, heard
            waited = await env.step(UpstreamAction(action_type="wait", session_id="cat", wait_seconds=0.1))
            heard += waited.observation.output
        waited = await env.step(UpstreamAction(action_type="wait", session_id="cat", wait_seconds=0.1))
        assert (waited.observation.session_id, waited.observation.success) == ("cat", True)
        killed = await env.step(UpstreamAction(action_type="kill", session_id="cat"))
        assert killed.observation.success


def test_the_generic_client_in_blocking_form(server: Server) -> None:
    with GenericEnvClient(base_url=server.url).sync() as env:
        env.reset(task_id="ok")
        assert env.step({"command": "echo ok > out.txt; echo $?"}).observation["output"] == "0\n"
        assert env.step({"action_type": "evaluate"}).reward == 1.0
        assert env.state()["step_count"] == 2


def test_a_client_of_upstreams_shape_in_blocking_form(server: Server) -> None:
    with UpstreamEnv(base_url=server.url).sync() as env:
        assert env.reset(task_id="ok").observation.instruction
        assert env.step(UpstreamAction(command="echo ok > out.txt")).observation.success
        assert env.step(UpstreamAction(action_type="evaluate")).reward == 1.0
        assert env.state().last_action_type == "evaluate"


async def test_an_error_frame_becomes_upstreams_exception_and_the_session_lives_on(server: Server) -> None:
    async with GenericEnvClient(base_url=server.url) as env:
        with pytest.raises(RuntimeError, match=r"^Server error: .*nowhere.* \(code: VALIDATION_ERROR\)$"):
            await env.reset(task_id="nowhere")
        with pytest.raises(RuntimeError, match=r"^Server error: .*reset first.* \(code: EXECUTION_ERROR\)$"):
            await env.step({"command": "ls"})
        assert (await env.reset(task_id="ok")).observation["success"]


async def test_over_capacity_the_frame_says_so_and_the_connection_closes(make_server: MakeServer) -> None:
    server = make_server({"MAX_CONCURRENT_ENVS": "1"})
    async with GenericEnvClient(base_url=server.url) as first:
        await first.reset(task_id="ok")
        async with wire(server) as refused:
            frame = await refused.hear()
            assert (frame["type"], frame["data"]["code"]) == ("error", "CAPACITY_REACHED")
            assert (frame["data"]["active_sessions"], frame["data"]["max_sessions"]) == (1, 1)
            with pytest.raises(ConnectionClosedOK):
                await refused.hear()

        async with GenericEnvClient(base_url=server.url) as second:
            await asyncio.sleep(0.2)  # in which the frame comes, but no close: its library would report only that
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                await second.reset(task_id="ok")
        assert (await first.step({"command": "echo alive"})).observation["output"] == "alive\n"

    # A client's close does not wait for the server's cleaning up.
    await asyncio.to_thread(server.assert_idle, 1)
    async with GenericEnvClient(base_url=server.url) as third:
        assert (await third.reset(task_id="ok")).observation["success"]
