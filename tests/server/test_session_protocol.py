"""OpenEnv's protocol on the wire: errors leave the connection usable, answers come in order."""

import json
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from support.server import Server
from support.wire import Wire

NESTED = '{"a":' * 200 + "1" + "}" * 200
ERRORS: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("hello", "INVALID_JSON"),
    "empty": ("", "INVALID_JSON"),
    "half": ('{"type": "state"', "INVALID_JSON"),
    "a list": ("[]", "INVALID_JSON"),
    "a number": ("1", "INVALID_JSON"),
    "null": ("null", "INVALID_JSON"),
    "a string": ('"state"', "INVALID_JSON"),
    "deep": ("[" * 100_000, "INVALID_JSON"),
    "deep and closed": ("[" * 100_000 + "]" * 100_000, "INVALID_JSON"),
    "many digits": ("9" * 10_000, "INVALID_JSON"),
    "binary": (b"\xff\xfe\x00", "INVALID_JSON"),
    "no type": ("{}", "UNKNOWN_TYPE"),
    "unknown type": ('{"type": "dance"}', "UNKNOWN_TYPE"),
    "a null type": ('{"type": null}', "UNKNOWN_TYPE"),
    "a list as type": ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
    "a long type": (json.dumps({"type": "x" * 100_000}), "UNKNOWN_TYPE"),
    "step without data": ('{"type": "step"}', "VALIDATION_ERROR"),
    "step with a list": ('{"type": "step", "data": [1]}', "VALIDATION_ERROR"),
    "step with a number": ('{"type": "step", "data": 1}', "VALIDATION_ERROR"),
    "unknown field": ('{"type": "step", "data": {"comand": "ls"}}', "VALIDATION_ERROR"),
    "wrong field": ('{"type": "step", "data": {"command": 1}}', "VALIDATION_ERROR"),
    "wrong block": ('{"type": "step", "data": {"block": "perhaps"}}', "VALIDATION_ERROR"),
    "nested action": ('{"type": "step", "data": {"command": ' + NESTED + "}}", "VALIDATION_ERROR"),
    "reset with a list": ('{"type": "reset", "data": ["ok"]}', "VALIDATION_ERROR"),
    "reset with a number": ('{"type": "reset", "data": {"task_id": 5}}', "VALIDATION_ERROR"),
    "reset of no task": ('{"type": "reset", "data": {"task_id": "no-such"}}', "VALIDATION_ERROR"),
}


def output(message: dict[str, Any]) -> str:
    assert message["type"] == "observation", message
    return str(message["data"]["observation"]["output"])


@pytest.mark.parametrize(("frame", "code"), ERRORS.values(), ids=ERRORS.keys())
async def test_an_error_leaves_the_connection_and_the_episode_usable(
    server: Server, frame: str | bytes, code: str
) -> None:
    async with await Wire.open(server) as wire:
        await wire.reset()
        await wire.exec("echo kept > f")
        await wire.receive()
        answer = await wire.ask(frame)
        assert answer["type"] == "error"
        assert answer["data"]["code"] == code
        assert 0 < len(answer["data"]["message"]) < 1000
        await wire.exec("cat f")
        assert output(await wire.receive()) == "kept\n"


async def test_a_validation_error_names_the_fields(server: Server) -> None:
    async with await Wire.open(server) as wire:
        answer = await wire.ask('{"type": "step", "data": {"comand": "ls", "block": []}}')
        assert {error["loc"][0] for error in answer["data"]["errors"]} == {"comand", "block"}
        assert "comand" in answer["data"]["message"]


async def test_a_step_before_a_reset(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.exec("echo x")
        answer = await wire.receive()
        assert (answer["type"], answer["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert "reset" in answer["data"]["message"]
        assert (await wire.ask('{"type": "state"}'))["data"]["step_count"] == 0
        assert (await wire.reset())["type"] == "observation"


async def test_a_binary_frame_of_json_is_as_good_as_text(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.reset()
        assert output(await wire.ask(b'{"type": "step", "data": {"command": "echo hi"}}')) == "hi\n"


async def test_the_shape_of_answers(server: Server) -> None:
    async with await Wire.open(server) as wire:
        reset = await wire.reset()
        assert set(reset) == {"type", "data"}
        assert set(reset["data"]) == {"observation", "reward", "done"}
        assert (reset["data"]["reward"], reset["data"]["done"]) == (0.0, False)
        assert {"instruction", "output", "success", "error", "task_id", "task_path", "info"} <= set(
            reset["data"]["observation"]
        )
        await wire.exec("exit 3")
        step = (await wire.receive())["data"]
        assert (step["reward"], step["done"], step["observation"]["success"]) == (None, False, True)
        state = await wire.ask('{"type": "state"}')
        assert (state["type"], state["data"]["step_count"], state["data"]["last_command"]) == ("state", 1, "exit 3")
        assert state["data"]["terminal_ready"] is True


async def test_messages_sent_ahead_are_answered_in_order(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.send("reset", {"task_id": "ok"})
        for number in range(100):
            await wire.exec(f"echo {number} >> f; tail -1 f" if number % 10 == 0 else f"echo {number}")
            if number % 25 == 0:
                await wire.send("state")
                await wire.send("nonsense")
        assert (await wire.receive())["data"]["observation"]["action_type"] == "reset"
        for number in range(100):
            assert output(await wire.receive()) == f"{number}\n"
            if number % 25 == 0:
                assert (await wire.receive())["data"]["step_count"] == number + 1
                assert (await wire.receive())["data"]["code"] == "UNKNOWN_TYPE"


async def test_reset_replaces_the_episode(server: Server) -> None:
    async with await Wire.open(server) as wire:
        first = await wire.reset()
        await wire.exec("echo x > f; sleep 600 & true")
        await wire.receive()
        second = await wire.reset()
        assert first["data"]["observation"]["metadata"] != second["data"]["observation"]["metadata"]
        await wire.exec("ls -A; pgrep -c sleep")
        assert output(await wire.receive()) == "0\n"
        assert (await wire.ask('{"type": "state"}'))["data"]["step_count"] == 1
        assert sum("sleep 600" in command for command in server.descendants().values()) == 0


async def test_close_ends_the_connection_in_order(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.reset()
        await wire.send("close")
        with pytest.raises(ConnectionClosed):
            await wire.receive()
        assert wire.socket.close_code == 1000


async def test_the_close_action_ends_the_episode_and_not_the_session(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.reset()
        closed = await wire.ask('{"type": "step", "data": {"action_type": "close"}}')
        assert closed["data"]["done"] is True
        await wire.exec("echo x")
        assert (await wire.receive())["data"]["code"] == "EXECUTION_ERROR"
        assert (await wire.reset())["type"] == "observation"


async def test_an_unknown_action_is_an_observation(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.reset()
        answer = await wire.ask('{"type": "step", "data": {"action_type": "dance"}}')
        observation = answer["data"]["observation"]
        assert (observation["success"], "dance" in observation["error"]) == (False, True)


async def test_a_message_of_many_megabytes(server: Server) -> None:
    async with await Wire.open(server) as wire:
        await wire.reset()
        await wire.send("step", {"action_type": "write_file", "file_path": "big", "content": "x" * (40 << 20)})
        assert (await wire.receive())["data"]["observation"]["success"] is True
        await wire.exec("stat -c %s big")
        assert output(await wire.receive()) == f"{40 << 20}\n"
