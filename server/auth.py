"""Who may come in: a bearer token on every route but /health, HTTP and WebSocket alike, and bounds on what is sent."""

import hmac
import ipaddress
import json

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health"})
#: Bytes of a request's path and query, as in most proxies.
PATH_MAX_BYTES = 8192
#: Bytes of a JSON body, as much as of a WebSocket message.
BODY_MAX_BYTES = 100 << 20


class Guard:
    """ASGI middleware: 401 without the right token, 414 for an endless path.

    A WebSocket is refused before it is accepted, which the client sees as the handshake's HTTP status.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif len(scope["raw_path"]) + len(scope["query_string"]) > PATH_MAX_BYTES:
            detail = f"path and query are over {PATH_MAX_BYTES} bytes: shorten them"
            await _refuse(scope, send, 414, "URI too long", "VALIDATION_ERROR", detail)
        elif not self._may_enter(scope):
            detail = "this server wants a token: send Authorization: Bearer with the value of TB2_AUTH_TOKEN"
            await _refuse(scope, send, 401, "Unauthorized", "UNAUTHORIZED", detail)
        else:
            await self._app(scope, _bounded(scope, receive), send)

    def _may_enter(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        # Takes the same time however many characters are right.
        return hmac.compare_digest(given, self._expected)


def _bounded(scope: Scope, receive: Receive) -> Receive:
    """`receive` that raises 413 once a body is too large; files are streamed, and so may have any size."""
    if scope["type"] != "http" or (scope["method"] == "PUT" and scope["path"].endswith("/files")):
        return receive
    total = 0

    async def bounded() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > BODY_MAX_BYTES:
            raise HTTPException(413, f"the body is over {BODY_MAX_BYTES} bytes: upload large files with PUT .../files")
        return message

    return bounded


async def _refuse(scope: Scope, send: Send, status: int, title: str, code: str, detail: str) -> None:
    body = json.dumps(
        {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code}
    ).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
