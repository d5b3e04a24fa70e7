import logging
from collections.abc import Callable
from typing import Any

import pytest

from tbench2_env import Tbench2Env, Tbench2HttpEnv, Unauthorized
from tbench2_env.auth import request_headers

Serve = Callable[..., Any]

TOKEN = "zzzTOKENzzz"


async def test_the_token_is_sent_as_a_bearer(serve: Serve) -> None:
    server = serve()
    async with Tbench2Env(base_url=server.url, token=TOKEN) as env:
        await env.state()
    assert server.headers[0]["authorization"] == f"Bearer {TOKEN}"


async def test_the_token_is_sent_with_every_http_request(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url, token=TOKEN) as env:
        await env.reset()
    assert [headers["authorization"] for headers in site.headers] == [f"Bearer {TOKEN}"] * 3


@pytest.mark.parametrize(
    ("variable", "headers", "token", "expected"),
    [
        (None, None, None, None),
        ("", None, None, None),
        ("v", None, None, "Bearer v"),
        ("v", None, "t", "Bearer t"),
        ("v", None, "", None),
        ("v", {"authorization": "Basic h"}, "t", "Basic h"),
        ("v", {"X-Other": "o"}, "t", "Bearer t"),
    ],
)
def test_where_the_token_comes_from(
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    headers: dict[str, str] | None,
    token: str | None,
    expected: str | None,
) -> None:
    if variable is not None:
        monkeypatch.setenv("TB2_AUTH_TOKEN", variable)
    sent = {name.lower(): value for name, value in request_headers(headers, token).items()}
    assert sent.get("authorization") == expected
    assert {name.lower(): value for name, value in (headers or {}).items()}.items() <= sent.items()


@pytest.mark.parametrize(
    ("headers", "token"),
    [({}, f"{TOKEN}\n"), ({}, f"{TOKEN} x"), ({}, f"{TOKEN}é"), ({"Authorization": f"{TOKEN}\r\nX: y"}, None)],
)
@pytest.mark.parametrize("client", [Tbench2Env, Tbench2HttpEnv])
def test_an_impossible_token_is_refused_but_not_shown(client: Any, headers: dict[str, str], token: str | None) -> None:
    with pytest.raises(ValueError, match=r"TB2_AUTH_TOKEN|Authorization") as caught:
        client(base_url="http://localhost:8003", headers=headers, token=token)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_handshake_refused_for_the_token(serve: Serve, status: int) -> None:
    server = serve(statuses=(status,) * 2)
    env = Tbench2Env(base_url=server.url, token=TOKEN)
    with pytest.raises(Unauthorized, match=rf"HTTP {status} .*token= .*TB2_AUTH_TOKEN") as caught:
        await env.connect()
    with pytest.raises(Unauthorized):
        await env.connect(retry_capacity_s=60)
    assert caught.value.code == "UNAUTHORIZED"
    assert TOKEN not in str(caught.value)


async def test_an_http_request_refused_for_the_token(serve_http: Serve) -> None:
    site = serve_http(lambda asked: asked.fail(401, "UNAUTHORIZED", "this server wants a token"))
    env = Tbench2HttpEnv(base_url=site.url, token=TOKEN, retry_capacity_s=60)
    with pytest.raises(Unauthorized, match=r"^Server error: this server wants a token; token= .*TB2_AUTH_TOKEN") as got:
        await env.reset()
    assert TOKEN not in str(got.value)
    assert site.heard == ["POST /reset"]


@pytest.mark.parametrize("client", [Tbench2Env, Tbench2HttpEnv])
def test_no_repr_shows_the_token(client: Any) -> None:
    env = client(base_url="http://localhost:8003", token=TOKEN)
    assert TOKEN not in repr(env)
    assert TOKEN not in repr(vars(env))


async def test_no_log_shows_the_token(serve: Serve, serve_http: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with Tbench2Env(base_url=serve().url, token=TOKEN) as env:
            await env.state()
        async with Tbench2HttpEnv(base_url=serve_http().url, token=TOKEN) as http:
            await http.reset()
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("websockets.client")]
    assert "> Authorization: ***" in logged
    assert not [line for line in caplog.text.splitlines() if TOKEN in line and "websockets.server" not in line]
