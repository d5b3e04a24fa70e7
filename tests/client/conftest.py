"""Real servers on 127.0.0.1 in threads of their own, so that a test may block its event loop."""

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

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


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TB2_AUTH_TOKEN", raising=False)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start a server whose every connection runs `script(peer)`; by default an episode that echoes.

    `statuses` are those of the first handshakes, which it refuses.
    """
    servers: list[Server] = []
    with ExitStack() as stack:

        def start(script: Callable[[Peer], None] = Peer.serve_episode, statuses: tuple[int, ...] = ()) -> Server:
            server, refusals = Server(), list(statuses)

            def refuse(ws: ServerConnection, _: object) -> Any:
                return ws.respond(refusals.pop(0), "no\n") if refusals else None

            listener = ws_serve(lambda ws: server.handle(script, ws), "127.0.0.1", 0, process_request=refuse)
            server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            thread = threading.Thread(target=listener.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown)
            servers.append(server)
            return server

        yield start
    assert [server.faults for server in servers if server.faults] == []


class Asked(BaseHTTPRequestHandler):
    """One HTTP request, on a connection of its own, and the means to answer it."""

    protocol_version = "HTTP/1.1"
    server: "Site"
    body = b""

    def handle(self) -> None:
        with suppress(ConnectionError):
            self.handle_one_request()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.route = urlsplit(self.path).path
        self.query = dict(parse_qsl(urlsplit(self.path).query))
        self.server.heard.append(f"{self.command} {self.route}")
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.script(self)

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        return content

    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.read())
        self.server.bodies.append(data)
        return data

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer_json(self, data: object, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(data).encode(), **headers)

    def observe(self, *, reward: float | None = None, done: bool = False, **observation: object) -> None:
        self.answer_json({"observation": observation, "reward": reward, "done": done})

    def fail(self, status: int, code: str, detail: str = "no", **headers: str) -> None:
        problem = {"type": "about:blank", "title": "No", "status": status, "detail": detail, "code": code}
        self.answer_json(problem, status, Content_Type="application/problem+json", **headers)

    def wait_until_lost(self) -> None:
        self.connection.settimeout(10)
        with suppress(ConnectionError):
            while self.connection.recv(65536):
                pass
        self.server.lost.release()

    def serve_episode(self) -> None:
        """What the server does that these tests have in mind; its files are those of `Site.files`."""
        match self.command, self.route:
            case "GET", "/health":
                self.answer_json({"status": "healthy"})
            case "POST", "/reset":
                data = self.data()
                self.server.live.append(data["episode_id"])
                self.observe(instruction=f"do {data.get('task_id')}", metadata={"episode_id": data["episode_id"]})
            case "POST", "/step":
                self._step(self.data())
            case "GET", "/state":
                self.answer_json({"episode_id": self.query["episode_id"], "step_count": 1, "queue": 3})
            case "PUT", _:
                self.server.files[self.query["path"]] = self.read()
                self.answer(204)
            case "GET", _:
                self.answer(200, self.server.files[self.query["path"]])
            case "DELETE", _:
                self._end(self.route.removeprefix("/episodes/"))

    def _step(self, data: dict[str, Any]) -> None:
        action = data["action"]
        if data["episode_id"] not in self.server.live:
            self.fail(409, "EPISODE_ENDED")
        elif action["action_type"] == "evaluate":
            self.observe(reward=1.0, done=True, action_type="evaluate", info={"harness": "tests/test.sh"})
        else:
            self.observe(output=action["command"] or action["content"], action_type=action["action_type"])

    def _end(self, episode_id: str) -> None:
        if episode_id in self.server.live:
            self.server.live.remove(episode_id)
            self.answer(204)
        else:
            self.fail(404, "UNKNOWN_EPISODE")


class Site(ThreadingHTTPServer):
    """What a started HTTP server has seen, and the episodes it has."""

    daemon_threads = False  # so that closing it waits for them
    request_queue_size = 128

    def __init__(self, script: Callable[[Asked], None]) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.script = script
        self.heard: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.live: list[str] = []
        self.faults: list[str] = []
        self.lost = threading.Semaphore(0)

    def handle_error(self, request: object, client_address: object) -> None:
        self.faults.append(traceback.format_exc())


@pytest.fixture
def serve_http() -> Iterator[Callable[..., Site]]:
    """Start an HTTP server that does `script(asked)` for every request; by default an episode that echoes."""
    sites: list[Site] = []
    with ExitStack() as stack:

        def start(script: Callable[[Asked], None] = Asked.serve_episode) -> Site:
            site = stack.enter_context(Site(script))
            thread = threading.Thread(target=site.serve_forever, args=(0.05,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(site.shutdown)
            sites.append(site)
            return site

        yield start
    assert [site.faults for site in sites if site.faults] == []
