"""What nobody would think of sending: schemathesis over the OpenAPI document, and random WebSocket frames.

In CI a few hundred cases, the same ones each time; by hand, with fresh ones:

TB2_FUZZ_CASES=5000 TB2_FUZZ_FRAMES=2000 pytest --timeout 3600 --log-cli-level WARNING tests/server/test_http_fuzz.py
"""

import asyncio
import collections
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.server import Server
from support.talk import bare_websocket, http, wire
from support.tasks import make_task

log = logging.getLogger(__name__)
CASES = int(os.environ.get("TB2_FUZZ_CASES", "300"))
FRAMES = int(os.environ.get("TB2_FUZZ_FRAMES", "300"))
BY_HAND = bool({"TB2_FUZZ_CASES", "TB2_FUZZ_FRAMES"} & set(os.environ))
STEPS_OF_ONE_RUN = 12
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
#: No generated limit may make the run wait.
PATIENCE_S = 0.3

_COMMON = settings(
    deadline=None,
    derandomize=not BY_HAND,
    database=None,
    phases=[Phase.explicit, Phase.generate] if BY_HAND else [Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    make_task(folder / "tasks", "ok")
    env = {"TB2_COMMAND_TIMEOUT_S": "1", "TB2_DEFAULT_TASK_ID": "ok", "TB2_KEEP_RUNS": "100"}
    server = Server(folder, folder / "tasks", env).start()
    yield server
    server.assert_idle()
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


def _bounded(body: Any) -> None:
    """Shorten what a valid request could make the run wait for, in place."""
    if not isinstance(body, dict):
        return
    if _is_number(body.get("timeout_s")) and body["timeout_s"] > PATIENCE_S:
        body["timeout_s"] = PATIENCE_S
    action = body.get("action")
    if isinstance(action, dict) and _is_number(action.get("wait_seconds")) and action["wait_seconds"] > PATIENCE_S:
        action["wait_seconds"] = PATIENCE_S


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_no_request_breaks_the_server(target: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    sent, statuses = 0, collections.Counter[int]()

    class Workflow(schema.as_state_machine()):  # type: ignore[misc]
        """Requests that follow from each other's answers: an episode that was created is used and deleted."""

        def before_call(self, case: Any) -> None:
            body = case.body
            _bounded(body)
            if case.path in ("/episodes", "/reset") and isinstance(body, dict) and len(json.dumps(body)) % 3:
                body["task_id"] = "ok"
                body.pop("task_path", None)
                body.pop("path", None)

        def validate_response(self, response: Any, case: Any, **more: Any) -> None:
            nonlocal sent
            sent += 1
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        def teardown(self) -> None:
            with http(target) as client:
                for entry in client.get("/episodes?limit=1000").json()["episodes"]:
                    assert client.delete(f"/episodes/{entry['episode_id']}").status_code == 204
                assert client.get("/health").status_code == 200
                assert client.get("/episodes").json()["total"] == 0

    runs = CASES // STEPS_OF_ONE_RUN
    run_state_machine_as_test(
        Workflow, settings=settings(_COMMON, max_examples=runs, stateful_step_count=STEPS_OF_ONE_RUN)
    )
    assert sent >= CASES / 2, f"only {sent} requests were sent"
    with http(target) as client:
        begun = client.get("/episodes?state=ended&limit=1").json()["total"]
    assert begun >= runs / 4, f"only {begun} episodes were begun"
    log.warning("%d requests, statuses %s, %d episodes", sent, dict(statuses), begun)


# ---------------------------------------------------------------- frames
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_ACTION_TYPES = ("exec", "write", "view", "wait", "kill", "write_file", "evaluate", "close", "", "EXEC")
_FIELDS = ("action_type", "command", "session_id", "block", "wait_seconds", "file_path", "content", "metadata", "x")
_ACTIONS = st.fixed_dictionaries(
    {},
    optional={
        "action_type": st.sampled_from(_ACTION_TYPES) | _JSON,
        "command": st.text(max_size=30),
        "session_id": st.sampled_from([None, "t", ""]) | st.text(max_size=5),
        "block": st.booleans(),
        "wait_seconds": st.none() | st.floats(max_value=PATIENCE_S) | st.just(float("nan")),
        "file_path": st.text(max_size=20),
        "content": st.text(max_size=50),
    },
)
_MALFORMED = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4).map(
    lambda action: {key: value for key, value in action.items() if key != "wait_seconds" or not _is_number(value)}
)
_RESETS = st.dictionaries(st.sampled_from(("task_id", "task_path", "episode_id", "seed", "y")), _JSON, max_size=3)
_KINDS = ("reset", "step", "state", "mcp", "observation", "")
_MESSAGES = st.one_of(
    st.builds(lambda data: {"type": "step", "data": data}, _ACTIONS | _MALFORMED | _JSON),
    st.builds(lambda data: {"type": "reset", "data": data}, _RESETS | _JSON | st.just({"task_id": "ok"})),
    st.builds(lambda kind, data: {"type": kind, "data": data}, st.sampled_from(_KINDS), _JSON),
    st.builds(lambda method, number: {"type": "mcp", "data": {"method": method, "id": number}}, _JSON, _JSON),
    _JSON,
)
_TEXTS = st.one_of(
    _MESSAGES.map(json.dumps),
    _MESSAGES.map(json.dumps).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])),
    st.sampled_from(["", "[" * 100_000, "9" * 5000, '{"type":"state"}' * 2, '"\\ud800"', '{"type":"\\ud800"}', "\0"]),
    st.text(max_size=50),
)
FRAME = _TEXTS | st.binary(max_size=50) | _TEXTS.map(lambda text: text.encode("utf-8", "replace"))


def _closes(frame: str | bytes) -> bool:
    try:
        message = json.loads(frame if isinstance(frame, str) else frame.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("type") == "close"


async def _talk(server: Server, frames: list[str | bytes]) -> None:
    async with wire(server) as session:
        await session.reset()
        for frame in frames:
            answer = await session.ask_raw(frame)
            assert answer["type"] in ("observation", "state", "error", "mcp")
            assert isinstance(answer["data"], dict)
            if answer["type"] == "error":
                assert answer["data"]["code"] in (
                    "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"
                )  # fmt: skip
                assert answer["data"]["message"]
        # Whatever was wrong, the connection is still of use.
        assert (await session.ask("state"))["type"] == "state"


def test_no_frame_breaks_the_server(target: Server) -> None:
    with httpx.Client(trust_env=False) as client, asyncio.Runner() as runner:

        @example(['{"type":"mcp","data":{"id":NaN,"method":"x"}}'])
        @settings(_COMMON, max_examples=FRAMES)
        @given(st.lists(FRAME.filter(lambda frame: not _closes(frame)), min_size=1, max_size=2))
        def check(frames: list[str | bytes]) -> None:
            runner.run(_talk(target, frames))
            assert client.get(f"{target.url}/health").json() == {"status": "healthy"}

        check()


async def _send_bare(server: Server, data: bytes) -> None:
    reader, writer = await bare_websocket(server)
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()


def test_no_bytes_below_the_protocol_break_the_server(target: Server) -> None:
    """Frames that are none: wrong lengths, opcodes, masks and fragments."""
    heads = st.binary(min_size=1, max_size=14)
    with httpx.Client(trust_env=False) as client, asyncio.Runner() as runner:

        @settings(_COMMON, max_examples=FRAMES // 3)
        @given(st.builds(lambda head, body: head + body, heads, st.binary(max_size=200)))
        def check(data: bytes) -> None:
            runner.run(_send_bare(target, data))
            assert client.get(f"{target.url}/health").json() == {"status": "healthy"}

        check()
