"""Who may come in, and how much they may send: TB2_AUTH_TOKEN, and the bounds."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from support.server import Server, eventually, idle_again
from support.talk import begin, http, problem, slots_active, wire
from tbench2_env import Tbench2Env, Tbench2HttpEnv, Unauthorized

TOKEN = "t0psecret-T0KEN"
WRONG = [
    None,
    "",
    "Bearer",
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"bearer{TOKEN}",
    f"Basic {TOKEN}",
    TOKEN,
    "Bearer \xff",
]
WARNING = "set TB2_AUTH_TOKEN"


@pytest.fixture(scope="module")
def _guarded(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("guarded"), tasks, {"TB2_AUTH_TOKEN": TOKEN}).start()
    yield server
    assert server.stop() == 0
    assert TOKEN not in server.log.read_text()
    assert not any(TOKEN in path.read_text(errors="replace") for path in server.runs.rglob("*") if path.is_file())


@pytest.fixture
def guarded(_guarded: Server) -> Iterator[Server]:
    with idle_again(_guarded):
        yield _guarded


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TB2_AUTH_TOKEN", raising=False)


def _headers(value: str | None) -> dict[str, Any]:
    return {} if value is None else {"authorization": value.encode("latin-1")}


def _routes(server: Server) -> list[tuple[str, str]]:
    with http(server, headers=_headers(f"Bearer {TOKEN}")) as client:
        paths = client.get("/openapi.json").json()["paths"]
    routes = [(method.upper(), path.replace("{", "").replace("}", "")) for path in paths for method in paths[path]]
    assert len(routes) > 15
    return [*routes, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/redoc"), ("GET", "/ws"), ("GET", "/nope")]


@pytest.mark.parametrize("value", WRONG)
def test_every_route_but_health_wants_the_token(guarded: Server, value: str | None) -> None:
    with http(guarded, headers=_headers(value)) as client:
        for method, path in _routes(guarded):
            response = client.request(method, path)
            if path == "/health":
                assert response.status_code == 200
            else:
                body = problem(response, 401, "UNAUTHORIZED")
                assert "TB2_AUTH_TOKEN" in body["detail"]
                assert response.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in response.text


def test_the_token_opens_every_route(guarded: Server) -> None:
    with http(guarded, headers=_headers(f"Bearer {TOKEN}")) as client:
        for method, path in _routes(guarded):
            assert client.request(method, path).status_code != 401, path
        episode_id = begin(client)
        answer = client.post(f"/episodes/{episode_id}/exec", json={"command": "echo ok; env; cat /proc/1/environ"})
        assert answer.json()["output"].startswith("ok\n")
        assert TOKEN not in answer.text
        client.delete(f"/episodes/{episode_id}")


@pytest.mark.parametrize("value", WRONG[:6])
async def test_a_websocket_without_the_token_is_refused_at_the_handshake(guarded: Server, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    with pytest.raises(InvalidStatus) as refused:
        async with wire(guarded, additional_headers=headers):
            pass
    response = refused.value.response
    assert response.status_code == 401
    assert response.headers["content-type"] == "application/problem+json"
    assert json.loads(response.body or b"")["code"] == "UNAUTHORIZED"
    with http(guarded, headers=_headers(f"Bearer {TOKEN}")) as client:
        assert client.get("/ready").json()["active"] == 0


@pytest.mark.parametrize("kind", [Tbench2Env, Tbench2HttpEnv])
async def test_the_client_brings_the_token(
    guarded: Server, monkeypatch: pytest.MonkeyPatch, kind: type[Tbench2Env] | type[Tbench2HttpEnv]
) -> None:
    for wrong in ("", "wrong"):
        with pytest.raises(Unauthorized, match="TB2_AUTH_TOKEN") as refused:
            async with kind(guarded.url, token=wrong) as env:
                await env.reset(task_id="ok")
        assert refused.value.code == "UNAUTHORIZED"
    async with kind(guarded.url, token=TOKEN) as env:
        await env.reset(task_id="ok")
        assert (await env.exec("echo ok")).output == "ok\n"
    monkeypatch.setenv("TB2_AUTH_TOKEN", TOKEN)
    async with kind(guarded.url) as env:
        await env.reset(task_id="ok")
        assert (await env.exec("echo ok")).output == "ok\n"


def test_the_blocking_client_brings_the_token(guarded: Server) -> None:
    with Tbench2Env(guarded.url, token=TOKEN).sync() as env:
        env.reset(task_id="ok")
        assert env.exec("echo ok").output == "ok\n"


@pytest.mark.parametrize(
    ("host", "env", "warns"),
    [
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("0.0.0.0", {"TB2_AUTH_TOKEN": TOKEN}, False),
        ("127.0.0.2", {}, False),
        ("localhost", {}, False),
    ],
)
def test_one_warning_where_anyone_may_come_in(
    tmp_path: Path, tasks: Path, host: str, env: dict[str, str], warns: bool
) -> None:
    if host == "::" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    server = Server(tmp_path, tasks, env)
    server._argv[server._argv.index("--host") + 1] = host
    if host in ("127.0.0.2", "::"):
        _start_elsewhere(server, host)
    else:
        server.start()
    try:
        eventually(lambda: "listening" in server.log.read_text(), 5)
        assert server.log.read_text().count(WARNING) == (1 if warns else 0)
        assert TOKEN not in server.log.read_text()
    finally:
        assert server.stop() == 0


def _start_elsewhere(server: Server, host: str) -> None:
    server._healthy = lambda: "listening" in server.log.read_text()  # type: ignore[method-assign]
    server.start()
    with socket.create_connection((host, server.port), 5):
        pass


# ---------------------------------------------------------------- bounds
def test_an_endless_path_is_414(server: Server) -> None:
    with http(server) as client:
        for url in ("/episodes/" + "x" * 9000, "/episodes?task_id=" + "x" * 9000, "/health?" + "x" * 9000):
            problem(client.get(url), 414, "VALIDATION_ERROR")
        assert client.get("/health?" + "x" * 8000).status_code == 200


def test_an_endless_path_is_414_without_the_token_too(guarded: Server) -> None:
    with http(guarded) as client:
        assert client.get("/episodes/" + "x" * 9000).status_code in (401, 414)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_413(server: Server, chunked: bool) -> None:
    def blocks() -> Iterator[bytes]:
        yield b'{"command": "'
        for _ in range(101):
            yield b"x" * (1 << 20)
        yield b'"}'

    with http(server) as client:
        episode_id = begin(client)
        headers = {"content-type": "application/json"}
        if not chunked:
            headers["content-length"] = str(13 + (101 << 20) + 2)
        for url in (f"/episodes/{episode_id}/exec", "/step", "/episodes", "/reset", "/mcp"):
            response = client.post(url, content=blocks(), headers=headers)
            assert "files" in problem(response, 413, "HTTP_ERROR")["detail"]
        assert client.get(f"/episodes/{episode_id}").json()["busy"] is False
        client.delete(f"/episodes/{episode_id}")


def test_a_body_below_the_limit_is_taken(server: Server) -> None:
    with http(server) as client:
        episode_id = begin(client)
        command = "true " + "x" * (20 << 20) + "\necho ok"
        answer = client.post(f"/episodes/{episode_id}/exec", json={"command": command}).json()
        assert answer["output"] == "ok\n", answer["error"]
        client.delete(f"/episodes/{episode_id}")


async def test_a_huge_message_ends_the_connection(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        with contextlib.suppress(ConnectionClosed):
            await session.ws.send("x" * (101 << 20))
        await session.ws.wait_closed()
        assert session.ws.close_code == 1009
    eventually(lambda: slots_active(server) == 0, 3)
