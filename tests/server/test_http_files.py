"""Files in and out of an episode over HTTP: any size, streamed, and confined to the episode."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from support.processes import inits, running
from support.server import HELPERS, Server, eventually
from support.talk import async_http, begin, execute, problem, soon

#: MiB of the large file: 1024 by hand.
LARGE_MIB = int(os.environ.get("TB2_LARGE_MIB", "256"))
GROWTH_MAX_BYTES = 64 << 20


def _put(client: httpx.Client, episode: str, path: str, content: bytes) -> httpx.Response:
    return client.put(f"{episode}/files", params={"path": path}, content=content)


def _get(client: httpx.Client, episode: str, path: str) -> httpx.Response:
    return client.get(f"{episode}/files", params={"path": path})


def _exec(client: httpx.Client, episode: str, command: str) -> str:
    answer = execute(client, episode, command)
    assert answer["success"] is True, answer
    return str(answer["output"])


@pytest.mark.parametrize(
    "path",
    [
        "f",
        "new/folders/f",
        "/app/absolute",
        "/opt/elsewhere/f",
        "/tmp/f",
        "with space",
        "-rf",
        "--",
        "quote'\"$(touch pwned)`x`",
        "new\nline",
        "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n.\N{SNOWMAN}",
        "x" * 240,
        "*",
        "a\\b",
    ],
)
def test_what_is_uploaded_is_downloaded(client: httpx.Client, episode: str, path: str) -> None:
    content = bytes(range(256)) * 500
    assert _put(client, episode, path, content).status_code == 204
    response = _get(client, episode, path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.content == content
    assert _exec(client, episode, "ls -d pwned").endswith("No such file or directory\n")
    assert not _leftovers(client, episode)


def _leftovers(client: httpx.Client, episode: str) -> str:
    """Half-written files of uploads, which are named after their target with six random characters."""
    return _exec(client, episode, "find /app /opt /tmp -regex '.*\\.......$' -newer /etc/hostname -type f -size +0")


def test_a_small_and_an_empty_file(client: httpx.Client, episode: str) -> None:
    for content in (b"", b"\0", b"\n"):
        assert _put(client, episode, "f", content).status_code == 204
        assert _get(client, episode, "f").content == content
        assert _exec(client, episode, "stat -c '%s %a' f") == f"{len(content)} 644\n"


def test_what_the_agent_sees(client: httpx.Client, episode: str) -> None:
    _put(client, episode, "script.sh", b"echo from the script\n")
    assert _exec(client, episode, "bash script.sh; whoami; stat -c %U script.sh") == "from the script\nroot\nroot\n"
    _exec(client, episode, "echo of the agent > g")
    assert _get(client, episode, "g").content == b"of the agent\n"
    assert _get(client, episode, "/app/g").content == b"of the agent\n"


def test_files_can_be_moved_while_a_command_runs(client: httpx.Client, episode: str) -> None:
    url = client.post(f"{episode}/exec?wait=0", json={"command": "until [ -e go ]; do sleep 0.1; done; cat go"}).json()
    assert _put(client, episode, "go", b"now\n").status_code == 204
    assert _get(client, episode, "go").content == b"now\n"
    eventually(lambda: bool(client.get(url["url"]).json()["done"]), 5)
    assert client.get(url["url"]).json()["answer"]["output"] == "now\n"


# ---------------------------------------------------------------- confinement
def test_paths_stay_in_the_episode(client: httpx.Client, episode: str) -> None:
    passwd = Path("/etc/passwd").read_bytes()
    mine = b"root:x:0:0:of this episode:/root:/bin/bash\n"
    up = "../../../../../../../../etc/passwd"
    _exec(client, episode, "echo 'of this episode' >> /etc/passwd")
    assert b"of this episode" in _get(client, episode, up).content
    assert _put(client, episode, up, mine).status_code == 204
    assert _exec(client, episode, "cat /etc/passwd").encode() == mine
    assert Path("/etc/passwd").read_bytes() == passwd
    other = f"/episodes/{begin(client)}"
    assert b"of this episode" not in _get(client, other, "/etc/passwd").content
    client.delete(other)


def test_symbolic_links_stay_in_the_episode(server: Server, client: httpx.Client, episode: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    for number, target in enumerate((secret, server.log, server.tasks / "ok/tests/test.sh", server.runs, "/tests")):
        _exec(client, episode, f"ln -s {target} link{number}")
        problem(_get(client, episode, f"link{number}"), 422, "VALIDATION_ERROR")
        problem(_get(client, episode, str(target)), 422, "VALIDATION_ERROR")
    _exec(client, episode, f"ln -s {tmp_path} folder; ln -s /proc/1/root{tmp_path} through")
    for folder in ("folder", "through"):
        problem(_get(client, episode, f"{folder}/secret"), 422, "VALIDATION_ERROR")
        _put(client, episode, f"{folder}/planted", b"x")
    _put(client, episode, "link0", b"overwritten")
    assert secret.read_text() == "of the host"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_the_servers_environment_is_not_to_be_had(server: Server, client: httpx.Client, episode: str) -> None:
    for path in ("/proc/self/environ", "/proc/1/environ", f"/proc/{server.pid}/environ", "/proc/thread-self/environ"):
        assert server.SECRET.encode() not in _get(client, episode, path).content


# ---------------------------------------------------------------- wrong targets
def test_what_is_no_file_cannot_be_read(client: httpx.Client, episode: str) -> None:
    _exec(client, episode, "mkdir d; mkfifo p; ln -s nowhere broken; echo x > f; ln -s loop loop")
    for path in ("d", "p", "broken", "loop", "nope", "f/x", "/dev/zero", "/dev/null", "x" * 300, "/"):
        begun = time.monotonic()
        detail = problem(_get(client, episode, path), 422, "VALIDATION_ERROR")["detail"]
        assert time.monotonic() - begun < 2
        assert "path" in detail


def test_what_cannot_be_a_file_cannot_be_written(client: httpx.Client, episode: str) -> None:
    _exec(client, episode, "mkdir d; echo old > f")
    for path in ("d", "/app", "f/x", "/proc/version", "/sys/kernel/x", "x" * 300, "/dev/null/x", "d/", "", "/"):
        detail = problem(_put(client, episode, path, b"new"), 422, "VALIDATION_ERROR")["detail"]
        assert "path" in detail
    assert _exec(client, episode, "cat f; ls") == "old\nd\nf\n"


def test_a_pipe_in_the_way_is_replaced(client: httpx.Client, episode: str) -> None:
    """Nothing waits for a reader."""
    _exec(client, episode, "mkfifo p; (sleep 99 < p) & ")
    assert _put(client, episode, "p", b"x" * 200_000).status_code == 204
    assert _get(client, episode, "p").content == b"x" * 200_000


def test_bad_paths(client: httpx.Client, episode: str) -> None:
    for method in ("GET", "PUT"):
        for query in ("", "?path=", "?path=a%00b", "?path=d/", "?path=" + "x" * 4097):
            problem(client.request(method, f"{episode}/files{query}"), 422, "VALIDATION_ERROR")


# ---------------------------------------------------------------- broken transfers
def _half_an_upload(server: Server, episode: str, *, chunked: bool) -> bytes:
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 3000000"
    head = f"PUT {episode}/files?path=f HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode()
    half = b"x" * 1_500_000
    return head + (f"{len(half):x}\r\n".encode() + half + b"\r\n" if chunked else half)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_broken_upload_leaves_the_old_file(
    server: Server, client: httpx.Client, episode: str, chunked: bool
) -> None:
    for number in range(15):
        _put(client, episode, "f", b"old")
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(_half_an_upload(server, episode, chunked=chunked))
        await writer.drain()
        await soon(lambda: running(server, "cat"), 5)
        if number % 2:
            await asyncio.sleep(0.02)
        writer.transport.abort()
        await soon(lambda: not running(server, "cat") and not running(server, "mktemp"), 5)
        assert _exec(client, episode, "cat f") == "old", f"round {number}"
        await soon(lambda: _exec(client, episode, "ls -A") == "f\n", 2, lambda: _exec(client, episode, "ls -A"))
        assert _exec(client, episode, "cat f") == "old", f"round {number}"


async def test_a_broken_download_leaves_nothing(server: Server, client: httpx.Client, episode: str) -> None:
    _exec(client, episode, "head -c 100M /dev/zero > big")
    before = server.descriptors()
    for _ in range(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {episode}/files?path=big HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert await reader.readexactly(100_000)
        assert running(server, "cat -- big")
        writer.transport.abort()
        await soon(lambda: not running(server, "cat"), 3)
    await soon(lambda: len(server.descendants()) == HELPERS + len(inits(server)), 3)
    await soon(lambda: server.descriptors() <= before + 2, 3, lambda: f"{before} -> {server.descriptors()}")
    assert _get(client, episode, "big").content == bytes(100 << 20)


async def test_an_episode_that_ends_in_mid_transfer(server: Server, client: httpx.Client) -> None:
    """Neither the upload nor the download looks complete."""
    over = asyncio.Event()

    async def until_over() -> AsyncIterator[bytes]:
        while not over.is_set():
            yield b"x" * 65536
            await asyncio.sleep(0.01)

    episode = f"/episodes/{begin(client)}"
    _exec(client, episode, "head -c 200M /dev/zero > big")
    async with async_http(server) as streams:
        upload = asyncio.create_task(streams.put(f"{episode}/files?path=f", content=until_over()))
        await soon(lambda: len(running(server, "cat")) == 1, 5)
        async with streams.stream("GET", f"{episode}/files?path=big") as download:
            received = download.aiter_raw()
            await anext(received)
            await asyncio.to_thread(client.delete, episode)
            with pytest.raises(httpx.TransportError):
                async for _ in received:
                    pass
        over.set()
        problem(await upload, 409, "EPISODE_ENDED")
    server.assert_idle()


# ---------------------------------------------------------------- size
def test_a_large_file_does_not_grow_the_server(server: Server, client: httpx.Client, episode: str) -> None:
    """Peak memory is what counts, as the kernel keeps it."""
    block = os.urandom(1 << 20)
    sent = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        for number in range(LARGE_MIB):
            data = number.to_bytes(4) + block[4:]
            sent.update(data)
            yield data

    before = server.rss_bytes()
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    assert client.put(f"{episode}/files?path=large", content=blocks()).status_code == 204
    received = hashlib.sha256()
    with client.stream("GET", f"{episode}/files?path=large") as response:
        for number, data in enumerate(response.iter_raw()):
            received.update(data)
            if number % 200 == 0:
                time.sleep(0.002)  # slower than the server
    assert received.digest() == sent.digest()
    assert _exec(client, episode, "sha256sum large").split()[0] == sent.hexdigest()
    assert _peak_bytes(server) - before < GROWTH_MAX_BYTES
    client.post(f"{episode}/exec", json={"command": "rm large"})


async def test_a_reader_that_stalls_does_not_grow_the_server(
    server: Server, client: httpx.Client, episode: str
) -> None:
    _exec(client, episode, "head -c 200M /dev/zero > big")
    before = server.rss_bytes()
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 16)
    writer.write(f"GET {episode}/files?path=big HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readexactly(1000)
    await asyncio.sleep(1)
    async with async_http(server) as other:
        begun = time.monotonic()
        assert (await other.get("/health")).status_code == 200
        assert time.monotonic() - begun < 0.5
    assert _peak_bytes(server) - before < GROWTH_MAX_BYTES
    assert running(server, "cat -- big")
    writer.transport.abort()
    await soon(lambda: not running(server, "cat"), 3)


def _peak_bytes(server: Server) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
