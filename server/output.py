"""What a command prints: read as it comes, kept within a bound, turned into text."""

import asyncio
import collections
import contextlib
import fcntl
import os
import re
from collections.abc import Callable

_READ_SIZE = 1 << 18
#: Once a command has ended, what its background children still print is thrown away at most this often. Closing the
#: pipe instead would kill a service at its next log line (SIGPIPE).
_IDLE_READ_PERIOD_S = 0.05
#: ECMA-48 control sequences, OSC and other strings with their terminator, and two-character escapes.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


class Capture:
    """Bytes, of which the first and the last half of `limit_bytes` are kept."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(limit_bytes // 2, 1)
        self._head = bytearray()
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_size = 0
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data[-self._half :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    def text(self) -> str:
        """As UTF-8, with wrong bytes replaced, terminal escapes removed and a line in place of what was cut."""
        tail = b"".join(self._tail)
        kept_tail = tail[-self._half :]
        cut = self.total - len(self._head) - len(kept_tail)
        if cut == 0:
            return to_text(bytes(self._head) + kept_tail)
        return f"{to_text(bytes(self._head))}\n[... {cut} bytes of output cut ...]\n{to_text(kept_tail)}"

    def take(self) -> str:
        """The text so far; what comes later starts anew."""
        text = self.text()
        self.__init__(2 * self._half)  # type: ignore[misc]
        return text


def to_text(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace")
    return _ESCAPES.sub("", text) if "\x1b" in text else text


class Reader:
    """Feeds a capture from a pipe or terminal on the event loop, in portions that leave other episodes their turn."""

    def __init__(self, fd: int, feed: Callable[[bytes], None]) -> None:
        """Takes over `fd`."""
        self._fd, self._feed = fd, feed
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def finish(self) -> None:
        """Take what is in the pipe now, then go on reading only to keep writers alive."""
        if self.closed:
            return
        # At most once round the pipe: a background child may write faster than we read.
        for _ in range(pipe_size(self._fd) // _READ_SIZE + 1):
            if self.closed or not self._read():
                break
        self._feed = _discard
        if not self.closed:
            self._loop.remove_reader(self._fd)
            self._loop.add_reader(self._fd, self._read_idly)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self.ended.set()

    def _read(self) -> bool:
        """Whether there was something to read."""
        try:
            data = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose last user is gone is EIO
            data = b""
        if data:
            self._feed(data)
        else:
            self.close()
            self._feed(b"")  # whoever waits for more need not
        return bool(data)

    def _read_idly(self) -> None:
        self._read()
        if not self.closed:
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(_IDLE_READ_PERIOD_S, self._watch_again)

    def _watch_again(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._fd, self._read_idly)


def _discard(data: bytes) -> None:
    pass


def pipe_size(fd: int) -> int:
    with contextlib.suppress(OSError):
        return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    return 0


def open_pipe() -> tuple[int, int]:
    """A pipe, larger than the default where the host allows it."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _READ_SIZE)
    return read_end, write_end
