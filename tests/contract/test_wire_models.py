"""Names and defaults on the wire are what existing clients were written against: they are pinned here."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel

from support.server import Server
from support.talk import Wire, wire
from tbench2_env import Tbench2Action, Tbench2Observation, Tbench2State

_ACTION: dict[str, Any] = {
    "action_type": "exec",
    "command": "",
    "session_id": None,
    "block": True,
    "wait_seconds": None,
    "file_path": "",
    "content": "",
    "metadata": {},
}
_OBSERVATION: dict[str, Any] = {
    "instruction": "",
    "output": "",
    "success": True,
    "error": "",
    "task_id": "",
    "task_path": "",
    "session_id": None,
    "action_type": "",
    "info": {},
    "reward": None,
    "done": False,
    "metadata": {},
}
_STATE: dict[str, Any] = {
    "episode_id": None,
    "step_count": 0,
    "task_id": "",
    "task_path": "",
    "session_id": "",
    "terminal_ready": False,
    "last_action_type": "",
    "last_command": "",
    "last_output": "",
}


@pytest.fixture
async def raw(server: Server) -> AsyncIterator[Wire]:
    """A connection without any client in between."""
    async with wire(server) as session:
        yield session


@pytest.mark.parametrize(
    ("model", "fields"), [(Tbench2Action, _ACTION), (Tbench2Observation, _OBSERVATION), (Tbench2State, _STATE)]
)
def test_fields_and_defaults(model: type[BaseModel], fields: dict[str, Any]) -> None:
    assert model().model_dump() == fields
    assert list(model.model_json_schema()["properties"]) == list(fields)


async def test_the_frames_of_an_episode(raw: Wire) -> None:
    reset = await raw.ask("reset", {"task_id": "ok", "episode_id": "wire-1", "seed": 7})
    assert reset["type"] == "observation"
    assert reset["data"].keys() == {"observation", "reward", "done"}
    assert reset["data"]["observation"].keys() == _OBSERVATION.keys() - {"reward", "done"}
    assert reset["data"]["done"] is False
    info = reset["data"]["observation"]["info"]
    assert (info["verifier_timeout_sec"], info["command_timeout_s"]) == (30.0, 20.0)

    step = await raw.ask("step", {"command": "echo hi"})
    assert (step["type"], step["data"]["reward"], step["data"]["done"]) == ("observation", None, False)
    assert step["data"]["observation"].keys() == _OBSERVATION.keys() - {"reward", "done"}

    state = await raw.ask("state")
    assert state["type"] == "state"
    assert state["data"] == {
        "episode_id": "wire-1",
        "step_count": 1,
        "task_id": "ok",
        "task_path": step["data"]["observation"]["task_path"],
        "session_id": "",
        "terminal_ready": True,
        "last_action_type": "exec",
        "last_command": "echo hi",
        "last_output": "hi\n",
    }

    verdict = await raw.ask("step", {"action_type": "evaluate"})
    assert (verdict["data"]["reward"], verdict["data"]["done"]) == (0.0, True)
    assert verdict["data"]["observation"]["info"].items() >= {"tests_passed": False, "harness": "tests/test.sh"}.items()
    await raw.tell("close")
    await raw.ws.wait_closed()
    assert raw.ws.close_code == 1000


async def test_state_before_any_reset_is_the_default(raw: Wire) -> None:
    assert (await raw.ask("state"))["data"] == _STATE


@pytest.mark.parametrize("name", ["task_id", "task_name", "task_path", "path"])
async def test_each_way_of_naming_a_task(raw: Wire, server: Server, name: str) -> None:
    value = str(server.tasks / "ok") if "path" in name else "ok"
    answer = await raw.ask("reset", {name: value})
    assert answer["data"]["observation"]["task_id"] == "ok"


@pytest.mark.parametrize(
    ("message", "code", "named"),
    [
        ("{", "INVALID_JSON", "JSON"),
        ("", "INVALID_JSON", "JSON"),
        ("[1]", "INVALID_JSON", "JSON"),
        (b"\xff\xfe", "INVALID_JSON", "JSON"),
        ("[" * 100_000, "INVALID_JSON", "JSON"),
        ({"type": "dance"}, "UNKNOWN_TYPE", "dance"),
        ({"data": {}}, "UNKNOWN_TYPE", "type"),
        ({"type": "step", "data": {"command": "ls", "timeout": 3}}, "VALIDATION_ERROR", "timeout"),
        ({"type": "step", "data": {"command": 5}}, "VALIDATION_ERROR", "command"),
        ({"type": "step"}, "VALIDATION_ERROR", "data"),
        ({"type": "step", "data": [1]}, "VALIDATION_ERROR", "data"),
        ({"type": "reset", "data": "ok"}, "VALIDATION_ERROR", "data"),
        ({"type": "reset", "data": {"task_id": "nowhere"}}, "VALIDATION_ERROR", "nowhere"),
        ({"type": "reset", "data": {"task_id": "../ok"}}, "VALIDATION_ERROR", "task_id"),
        ({"type": "reset", "data": {"task_path": "/etc"}}, "VALIDATION_ERROR", "task_path"),
        ({"type": "reset", "data": {"task_id": "ok", "episode_id": "../x"}}, "VALIDATION_ERROR", "episode_id"),
        ({"type": "step", "data": {"command": "ls"}}, "EXECUTION_ERROR", "reset"),
    ],
)
async def test_a_protocol_error_has_its_code_and_leaves_the_connection_usable(
    raw: Wire, message: Any, code: str, named: str
) -> None:
    answer = await raw.ask_raw(message if isinstance(message, str | bytes) else json.dumps(message))
    assert (answer["type"], answer["data"]["code"]) == ("error", code)
    assert named in answer["data"]["message"]
    assert (await raw.ask("state"))["type"] == "state"


async def test_a_wrong_message_in_mid_episode_costs_nothing(raw: Wire) -> None:
    await raw.ask("reset", {"task_id": "ok"})
    await raw.ask("step", {"command": "echo ok > out.txt"})
    assert (await raw.ask_raw("{"))["type"] == "error"
    assert (await raw.ask("step", {"comand": "ls"}))["type"] == "error"
    assert (await raw.ask("reset", {"task_id": "nowhere"}))["type"] == "error"
    verdict = await raw.ask("step", {"action_type": "evaluate"})
    assert verdict["data"]["reward"] == 1.0


async def test_mcp_frames_are_answered(raw: Wire) -> None:
    answer = await raw.ask("mcp", {"jsonrpc": "2.0", "id": 3, "method": "tools/list"})
    assert answer["type"] == "mcp"
    assert (answer["data"]["jsonrpc"], answer["data"]["id"]) == ("2.0", 3)
    assert answer["data"]["error"]["code"] == -32603


async def test_reset_again_replaces_the_episode(raw: Wire) -> None:
    first = await raw.ask("reset", {"task_id": "ok"})
    await raw.ask("step", {"command": "touch mine"})
    second = await raw.ask("reset", {"task_id": "ok"})
    episode_ids = [each["data"]["observation"]["metadata"]["episode_id"] for each in (first, second)]
    assert len(set(episode_ids)) == 2
    assert (await raw.ask("state"))["data"]["episode_id"] == episode_ids[1]
    listing = await raw.ask("step", {"command": "ls"})
    assert listing["data"]["observation"]["output"] == ""
