"""Fixtures: a store, and a workshop to build in, after which nothing is left of what it did."""

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from support.building import Ledger, Workshop, ledger, settings_of, workshop
from tbench2_env.server.images.store import Kind, Store

#: Of a store that a test makes: as the best rung would, without a shift, if we are root.
ONE_ID = Kind(0, False, "user")
KIND = Kind(0, True, "trusted") if os.geteuid() == 0 else ONE_ID

StartWorkshop = Callable[..., Awaitable[Workshop]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store in which nothing is left half-made and nothing locked."""
    store = Store(tmp_path / "store", KIND)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield store
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    for name in ("making", "locks"):
        folder = store.folder / name
        assert not folder.exists() or not list(folder.iterdir())


@pytest.fixture
async def start_workshop(tmp_path: Path, tiny: Path) -> AsyncIterator[StartWorkshop]:
    """Start one: `await start_workshop(isolation="2")`; those of one test share a store."""
    async with AsyncExitStack() as stack:

        async def start(**more: Any) -> Workshop:
            made = await stack.enter_async_context(workshop(settings_of(tmp_path, tiny, **more), tmp_path))
            stack.callback(made.assert_idle)
            return made

        yield start


@pytest.fixture
async def shop(start_workshop: StartWorkshop) -> Workshop:
    return await start_workshop()


@pytest.fixture
def web() -> Iterator[Callable[[str, bytes], str]]:
    """A web server on the loopback: `web("a.txt", b"content")` has a file there and answers with its URL."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = files.get(unquote(self.path))
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            """No word on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def add(name: str, content: bytes) -> str:
            files[f"/{name}"] = content
            return f"http://127.0.0.1:{server.server_port}/{quote(name)}"

        yield add
        server.shutdown()
        thread.join()


@pytest.fixture
def reports() -> Iterator[Ledger]:
    with ledger() as made:
        yield made
