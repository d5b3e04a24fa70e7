"""Ways to talk to a server that the client does not offer: plain HTTP, frames of one's own, a socket that hangs up."""

import asyncio
import base64
import contextlib
import json
import os
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import ConnectionClosed

from support.server import Server

_ANSWER_TIMEOUT_S = 30.0
_TEXT, _MASKED, _LENGTH_64 = 0x81, 0x80, 127


# ---------------------------------------------------------------- HTTP
def http(server: Server, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=_ANSWER_TIMEOUT_S, trust_env=False, **options)


def async_http(server: Server, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=_ANSWER_TIMEOUT_S, trust_env=False, **options)


def begin(client: httpx.Client, task_id: str = "ok", **fields: Any) -> str:
    """Begin an episode; answers with its id."""
    response = client.post("/episodes", json={"task_id": task_id, **fields})
    assert response.status_code == 201, response.text
    return str(response.json()["episode_id"])


def execute(client: httpx.Client, episode: str, command: str, **more: Any) -> dict[str, Any]:
    """The answer to a command of the episode at the path `episode`."""
    response = client.post(f"{episode}/exec", json={"command": command, **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The body of an error answer, which must have this status and code and be a complete problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["code"] == code
    assert body["type"] == "about:blank"
    assert body["title"]
    assert body["detail"]
    return body


def metric(server: Server, name: str, **labels: str) -> float:
    """One sample of /metrics; 0 when there is none yet."""
    key = name + ("{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}" if labels else "")
    for line in httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith(key + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


def slots_active(server: Server) -> int:
    return int(metric(server, "tbench2_slots_active"))


# ---------------------------------------------------------------- WebSocket
def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def observation(frame: dict[str, Any]) -> dict[str, Any]:
    """What a frame of that type says, with `reward` and `done` in it."""
    assert frame["type"] == "observation", frame
    return {**frame["data"]["observation"], "reward": frame["data"]["reward"], "done": frame["data"]["done"]}


class Wire:
    """A WebSocket on which the test sends what it likes."""

    def __init__(self, ws: ClientConnection) -> None:
        self.ws = ws

    async def tell(self, kind: str, data: Any = None) -> None:
        await self.ws.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))

    async def hear(self) -> dict[str, Any]:
        """The next frame, which must be JSON by the letter and in OpenEnv's shape."""
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            frame: dict[str, Any] = json.loads(await self.ws.recv(), parse_constant=_no_constant)
        assert frame.keys() == {"type", "data"}
        return frame

    async def ask(self, kind: str, data: Any = None) -> dict[str, Any]:
        """The whole frame that answers, or that came unasked before the server hung up."""
        with contextlib.suppress(ConnectionClosed):
            await self.tell(kind, data)
        return await self.hear()

    async def ask_raw(self, frame: str | bytes) -> dict[str, Any]:
        """As `ask`, with a frame that need not be a message."""
        await self.ws.send(frame)
        return await self.hear()

    async def reset(self, task_id: str = "ok", **fields: Any) -> dict[str, Any]:
        """The observation of a reset that works, with `reward` and `done` in it."""
        return observation(await self.ask("reset", {"task_id": task_id, **fields}))

    async def step(self, **action: Any) -> dict[str, Any]:
        """The observation of an action, likewise."""
        return observation(await self.ask("step", action))

    def drop(self) -> None:
        """Lose the connection, without a close frame."""
        self.ws.transport.abort()


@contextlib.asynccontextmanager
async def wire(server: Server, **options: Any) -> AsyncIterator[Wire]:
    url = server.url.replace("http://", "ws://") + "/ws"
    async with ws_connect(url, proxy=None, ping_interval=None, max_size=None, close_timeout=5, **options) as ws:
        yield Wire(ws)


async def bare_websocket(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket after its handshake, as a plain connection: nobody answers pings or close frames on it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in head.splitlines()[0], head
    return reader, writer


def text_frame(payload: bytes) -> bytes:
    """A client's text frame (RFC 6455, 5.2), masked with zeros."""
    return bytes([_TEXT, _MASKED | _LENGTH_64]) + struct.pack(">Q", len(payload)) + bytes(4) + payload


def message(kind: str, **data: Any) -> bytes:
    return text_frame(json.dumps({"type": kind, "data": data}).encode())


# ---------------------------------------------------------------- waiting
async def soon(true: Callable[[], Any], within_s: float, why: Callable[[], str] = lambda: "not in time") -> None:
    """`support.server.eventually` for tests whose event loop must go on."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, why()
        await asyncio.sleep(0.02)
