"""The HTTP endpoints that OpenEnv's tools read, beside the sessions on /ws."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openenv.cli._validation import validate_running_environment
from pydantic import BaseModel

from support.server import Server, eventually
from tbench2_env import BadRequest, Tbench2Action, Tbench2Observation, Tbench2State

_TIMEOUT_S = 60


def fetch(url: str, body: bytes | None = None) -> tuple[int, str, str]:
    """GET, or POST of a JSON body; answers with status, media type and text."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return response.status, response.headers.get_content_type(), response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get_content_type(), error.read().decode()


def fetch_json(url: str, body: Any = None) -> Any:
    status, media_type, text = fetch(url, None if body is None else json.dumps(body).encode())
    assert (status, media_type) == (200, "application/json"), text
    return json.loads(text)


def test_health(server: Server) -> None:
    assert fetch_json(f"{server.url}/health") == {"status": "healthy"}


def test_metadata(server: Server) -> None:
    metadata = fetch_json(f"{server.url}/metadata")
    assert metadata["name"] == "tbench2_env"
    assert isinstance(metadata["description"], str)
    assert metadata["version"]


@pytest.mark.parametrize(
    ("name", "model"), [("action", Tbench2Action), ("observation", Tbench2Observation), ("state", Tbench2State)]
)
def test_schema(server: Server, name: str, model: type[BaseModel]) -> None:
    schema = fetch_json(f"{server.url}/schema")
    assert schema.keys() == {"action", "observation", "state"}
    assert schema[name] == model.model_json_schema()


def test_docs_and_openapi(server: Server) -> None:
    status, media_type, page = fetch(f"{server.url}/docs")
    assert (status, media_type) == (200, "text/html")
    assert "/openapi.json" in page
    description = fetch_json(f"{server.url}/openapi.json")
    assert description["info"]["version"] == fetch_json(f"{server.url}/metadata")["version"]
    assert {"/health", "/metadata", "/schema", "/mcp"} <= description["paths"].keys()


@pytest.mark.parametrize(
    ("body", "request_id", "code"),
    [
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}', 1, -32603),
        (b'{"jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": {"name": "x"}}', "a", -32603),
        (b'{"jsonrpc": "2.0", "id": 2, "method": "no/such"}', 2, -32601),
        (b"{}", None, -32600),
        (b"[]", None, -32600),
        (b"null", None, -32600),
        (b'{"id": 3, "method": 4}', None, -32600),
        (b"", None, -32600),
        (b"{", None, -32600),
        (b"\xff\xfe\x00", None, -32600),
        (b"[" * 200_000, None, -32600),
        (b'{"id": 1, "method": "\\ud800"}', 1, -32601),
        (b'{"id": "\\ud800", "method": "x"}', "\ud800", -32601),
        (b'{"id": {"a": 1}, "method": "x"}', {"a": 1}, -32601),
        (b'{"id": NaN, "method": "x"}', None, -32601),
        (b'{"jsonrpc": "2.0", "id": 1}', None, -32600),
    ],
)
def test_mcp_answers_json_rpc_whatever_comes(server: Server, body: bytes, request_id: Any, code: int) -> None:
    status, media_type, text = fetch(f"{server.url}/mcp", body)
    assert (status, media_type) == (200, "application/json")
    answer = json.loads(text)
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", request_id)
    # A parse error may also be told apart from an invalid request.
    assert answer["error"]["code"] in ({code, -32700} if code == -32600 else {code})
    assert answer["error"]["message"]


def test_openenvs_validator_finds_no_fault(server: Server) -> None:
    """What `openenv validate --url` does."""
    report = validate_running_environment(server.url, timeout_s=_TIMEOUT_S)
    assert report["criteria"]
    assert report["passed"], [each for each in report["criteria"] if not each["passed"]]


# ------------------------------------------------------------ ENABLE_WEB_INTERFACE=true
@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Iterator[Server]:
    """OpenEnv's pages behind our routes: one server for all these tests, because it starts slowly."""
    env = {"ENABLE_WEB_INTERFACE": "true", "GRADIO_ANALYTICS_ENABLED": "False", "TB2_DEFAULT_TASK_ID": "ok"}
    server = Server(tmp_path_factory.mktemp("web"), tasks, env).start()
    yield server
    server.assert_idle()
    assert server.stop() == 0
    assert not list(server.scratch.iterdir())


def test_web_pages_are_served(web: Server) -> None:
    status, media_type, page = fetch(f"{web.url}/web/")
    assert (status, media_type) == (200, "text/html")
    assert "gradio" in page
    assert fetch(f"{web.url}/web")[0] == 200


def test_beside_the_pages_the_endpoints_are_still_ours(web: Server) -> None:
    assert fetch_json(f"{web.url}/health") == {"status": "healthy"}
    assert fetch_json(f"{web.url}/schema")["action"] == Tbench2Action.model_json_schema()
    assert fetch_json(f"{web.url}/mcp", {"method": "x"})["error"]["code"] == -32601
    version = fetch_json(f"{web.url}/metadata")["version"]
    assert fetch_json(f"{web.url}/openapi.json")["info"]["version"] == version


async def test_beside_the_pages_the_sessions_are_still_ours(web: Server) -> None:
    async with web.client() as env:
        with pytest.raises(BadRequest, match="nowhere"):  # openenv's own route would say EXECUTION_ERROR
            await env.reset(task_id="nowhere")
        await env.reset(task_id="ok")
        await env.exec("echo ok > out.txt")
        assert (await env.evaluate()).reward == 1.0


def test_an_episode_through_the_pages(web: Server) -> None:
    reset = fetch_json(f"{web.url}/web/reset", {})
    assert reset["observation"]["task_id"] == "ok"
    assert fetch_json(f"{web.url}/web/step", {"action": {"command": "pwd"}})["observation"]["output"] == "/app\n"
    fetch_json(f"{web.url}/web/step", {"action": {"command": "echo ok > out.txt"}})
    assert fetch_json(f"{web.url}/web/state")["step_count"] == 2
    assert fetch_json(f"{web.url}/web/step", {"action": {"action_type": "evaluate"}})["reward"] == 1.0
    assert fetch_json(f"{web.url}/web/step", {"action": {"action_type": "close"}})["done"] is True
    eventually(lambda: not web.worktrees(), 3)
