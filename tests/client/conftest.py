"""A real WebSocket server on 127.0.0.1 in threads of its own, so that a test may block its event loop."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as ws_serve


@dataclass
class Peer:
    """The server's end of one connection."""

    ws: ServerConnection
    server: "Server"

    def request(self, timeout_s: float = 10) -> dict[str, Any]:
        request: dict[str, Any] = json.loads(self.ws.recv(timeout=timeout_s))
        self.server.requests.append(request)
        return request

    def send(self, kind: str, data: object) -> None:
        self.ws.send(json.dumps({"type": kind, "data": data}))

    def observe(self, *, reward: float | None = None, done: bool = False, **observation: object) -> None:
        self.send("observation", {"observation": observation, "reward": reward, "done": done})

    def fail(self, message: str, code: str, **more: object) -> None:
        self.send("error", {"message": message, "code": code, **more})

    def answer(self, request: dict[str, Any]) -> None:
        data = request.get("data", {})
        if request["type"] == "reset":
            self.observe(instruction=f"do {data.get('task_id')}", task_id=data.get("task_id", ""))
        elif request["type"] == "state":
            self.send("state", {"episode_id": "e1", "step_count": len(self.server.requests), "queue": 3})
        elif data["action_type"] == "evaluate":
            self.observe(reward=1.0, done=True, action_type="evaluate", info={"harness": "tests/test.sh"})
        else:
            self.observe(output=data["command"] or data["content"], action_type=data["action_type"])

    def serve_episode(self) -> None:
        while (request := self.request())["type"] != "close":
            self.answer(request)

    def wait_until_lost(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                self.ws.recv(timeout=10)


@dataclass
class Server:
    """What a started server has seen, over all connections."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def wait_ended(self, sessions: int = 1) -> bool:
        """Whether so many sessions end within two seconds each."""
        return all(self.ended.acquire(timeout=2) for _ in range(sessions))

    def handle(self, script: Callable[[Peer], None], ws: ServerConnection) -> None:
        assert ws.request is not None
        self.headers.append({name.lower(): value for name, value in ws.request.headers.raw_items()})
        try:
            script(Peer(ws, self))
        except ConnectionClosed:
            pass
        except Exception as exc:
            self.faults.append(exc)
        finally:
            self.ended.release()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start a server whose every connection runs `script(peer)`; by default an episode that echoes."""
    servers: list[Server] = []
    with ExitStack() as stack:

        def start(script: Callable[[Peer], None] = Peer.serve_episode) -> Server:
            server = Server()
            listener = ws_serve(lambda ws: server.handle(script, ws), "127.0.0.1", 0)
            server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            thread = threading.Thread(target=listener.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown)
            servers.append(server)
            return server

        yield start
    assert [server.faults for server in servers if server.faults] == []
