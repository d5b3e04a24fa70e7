"""OpenEnv's protocol on the wire: errors leave the connection usable, answers come in order."""

import json

import pytest
from websockets.exceptions import ConnectionClosed

from support.server import Server
from support.talk import observation, wire

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


@pytest.mark.parametrize(("frame", "code"), ERRORS.values(), ids=ERRORS.keys())
async def test_an_error_leaves_the_connection_and_the_episode_usable(
    server: Server, frame: str | bytes, code: str
) -> None:
    async with wire(server) as session:
        await session.reset()
        await session.step(command="echo kept > f")
        answer = await session.ask_raw(frame)
        assert answer["type"] == "error"
        assert answer["data"]["code"] == code
        assert 0 < len(answer["data"]["message"]) < 1000
        assert (await session.step(command="cat f"))["output"] == "kept\n"


async def test_a_validation_error_names_the_fields(server: Server) -> None:
    async with wire(server) as session:
        answer = await session.ask_raw('{"type": "step", "data": {"comand": "ls", "block": []}}')
        assert {error["loc"][0] for error in answer["data"]["errors"]} == {"comand", "block"}
        assert "comand" in answer["data"]["message"]


async def test_a_step_before_a_reset(server: Server) -> None:
    async with wire(server) as session:
        answer = await session.ask("step", {"command": "echo x"})
        assert (answer["type"], answer["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert "reset" in answer["data"]["message"]
        assert (await session.ask("state"))["data"]["step_count"] == 0
        assert (await session.reset())["success"] is True


async def test_a_binary_frame_of_json_is_as_good_as_text(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        answer = await session.ask_raw(b'{"type": "step", "data": {"command": "echo hi"}}')
        assert observation(answer)["output"] == "hi\n"


async def test_the_shape_of_answers(server: Server) -> None:
    async with wire(server) as session:
        reset = await session.ask("reset", {"task_id": "ok"})
        assert set(reset["data"]) == {"observation", "reward", "done"}
        assert (reset["data"]["reward"], reset["data"]["done"]) == (0.0, False)
        assert {"instruction", "output", "success", "error", "task_id", "task_path", "info"} <= set(
            reset["data"]["observation"]
        )
        step = (await session.ask("step", {"command": "exit 3"}))["data"]
        assert (step["reward"], step["done"], step["observation"]["success"]) == (None, False, True)
        state = await session.ask("state")
        assert (state["type"], state["data"]["step_count"], state["data"]["last_command"]) == ("state", 1, "exit 3")
        assert state["data"]["terminal_ready"] is True


async def test_messages_sent_ahead_are_answered_in_order(server: Server) -> None:
    async with wire(server) as session:
        await session.tell("reset", {"task_id": "ok"})
        for number in range(100):
            command = f"echo {number} >> f; tail -1 f" if number % 10 == 0 else f"echo {number}"
            await session.tell("step", {"command": command})
            if number % 25 == 0:
                await session.tell("state")
                await session.tell("nonsense")
        assert observation(await session.hear())["action_type"] == "reset"
        for number in range(100):
            assert observation(await session.hear())["output"] == f"{number}\n"
            if number % 25 == 0:
                assert (await session.hear())["data"]["step_count"] == number + 1
                assert (await session.hear())["data"]["code"] == "UNKNOWN_TYPE"


async def test_reset_replaces_the_episode(server: Server) -> None:
    async with wire(server) as session:
        first = await session.reset()
        await session.step(command="echo x > f; sleep 600 & true")
        second = await session.reset()
        assert first["metadata"] != second["metadata"]
        assert (await session.step(command="ls -A; pgrep -c sleep"))["output"] == "0\n"
        assert (await session.ask("state"))["data"]["step_count"] == 1
        assert sum("sleep 600" in command for command in server.descendants().values()) == 0


async def test_close_ends_the_connection_in_order(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        await session.tell("close")
        with pytest.raises(ConnectionClosed):
            await session.hear()
        assert session.ws.close_code == 1000


async def test_the_close_action_ends_the_episode_and_not_the_session(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        assert (await session.step(action_type="close"))["done"] is True
        assert (await session.ask("step", {"command": "echo x"}))["data"]["code"] == "EXECUTION_ERROR"
        assert (await session.reset())["success"] is True


async def test_an_unknown_action_is_an_observation(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        answer = await session.step(action_type="dance")
        assert (answer["success"], "dance" in answer["error"]) == (False, True)


async def test_a_message_of_many_megabytes(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        answer = await session.step(action_type="write_file", file_path="big", content="x" * (40 << 20))
        assert answer["success"] is True
        assert (await session.step(command="stat -c %s big"))["output"] == f"{40 << 20}\n"
