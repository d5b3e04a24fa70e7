"""Downloads of ADD: whole and right, or an error that names the line."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.fetching import fetch
from tbench2_env.server.images.steps import Download
from tbench2_env.server.threads import Stop, Stopped

CONTENT = b"content\n"
SHA256 = "434728a410a78f56fc1b5899c3593436e61ab0c731e9072d95e96db290205e53"
Say = Callable[[bytes], str]


@pytest.fixture
def say() -> Iterator[Say]:
    """A server on the loopback that answers anything with these bytes, whatever they are, and hangs up."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket, answer: bytes) -> None:
        try:
            connection = listener.accept()[0]
        except OSError:
            return
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    def start(answer: bytes) -> str:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threads.append(threading.Thread(target=serve, args=(listeners[-1], answer)))
        threads[-1].start()
        return f"http://127.0.0.1:{listeners[-1].getsockname()[1]}/a/file.txt"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def ok(content: bytes, length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (length, content)


def download(url: str, checksum: str | None = None) -> Download:
    return Download(url, "/x", checksum, None, None, "/", 7)


@pytest.mark.parametrize("checksum", [None, f"sha256:{SHA256}", f"sha256:{SHA256.upper()}"])
def test_a_whole_file(tmp_path: Path, say: Say, checksum: str | None) -> None:
    fetch(download(say(ok(CONTENT, len(CONTENT))), checksum), tmp_path, 5, Stop())
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
    assert (tmp_path / "file.txt").read_bytes() == CONTENT
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("answer", "checksum", "said"),
    [
        (ok(CONTENT, 100), None, "the connection was lost 92 bytes before its end"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", None, "HTTP Error 404: Not Found"),
        (b"", None, "Remote end closed connection"),
        (b"nonsense\r\n\r\n", None, "nonsense"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ncont", None, "cannot be downloaded: "),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", None, "HTTP Error 302: .*not allowed"),
        (ok(CONTENT, len(CONTENT)), f"sha256:{'0' * 64}", f"has the checksum sha256:{SHA256}, not sha256:000"),
        (ok(CONTENT, len(CONTENT)), f"sha512:{'0' * 128}", "only sha256 is known"),
    ],
)
def test_no_file(tmp_path: Path, say: Say, answer: bytes, checksum: str | None, said: str) -> None:
    with pytest.raises(DockerfileError, match=f"line 7: ADD: .*{said}"):
        fetch(download(say(answer), checksum), tmp_path, 5, Stop())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://127.0.0.1:99999/x", "http://a b/x"])
def test_no_server(tmp_path: Path, url: str) -> None:
    with pytest.raises(DockerfileError, match=r"line 7: ADD: .*cannot be downloaded: "):
        fetch(download(url), tmp_path, 5, Stop())


def test_a_server_that_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        with pytest.raises(DockerfileError, match="timed out"):
            fetch(download(f"http://127.0.0.1:{listener.getsockname()[1]}/x"), tmp_path, 0.2, Stop())
        assert time.monotonic() - begun < 2


def test_nobody_waits_any_more(tmp_path: Path, say: Say) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        fetch(download(say(ok(CONTENT, len(CONTENT)))), tmp_path, 5, stop)
