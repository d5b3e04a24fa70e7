"""What a command prints: read as it comes, kept within a bound, turned into text."""

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Callable

_READ_SIZE = 1 << 18
#: A program that prints a line at a time (a build, a test run) would have the loop turn for each. After so many reads,
#: one that brings less than this is followed by a pause, in which more gathers in the pipe.
_EAGER_READS, _SMALL_READ, _GATHER_S = 16, 4096, 0.001
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
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._half :]
            # Not at each portion: what is cut off moves the rest.
            if len(self._tail) > 2 * self._half:
                del self._tail[: -self._half]

    def text(self) -> str:
        """As UTF-8, with wrong bytes replaced, terminal escapes removed and a line in place of what was cut."""
        kept_tail = bytes(self._tail[-self._half :])
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
        self._reads, self._finished = 0, False
        self.ended = asyncio.Event()
        os.set_blocking(fd, False)
        self._watch()

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
        self._feed, self._finished = _discard, True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self.ended.set()

    def _watch(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._fd, self._turn)

    def _turn(self) -> None:
        size = self._read()
        self._reads += 1
        if self._finished:
            self._pause(_IDLE_READ_PERIOD_S)
        elif size < _SMALL_READ and self._reads > _EAGER_READS:
            self._pause(_GATHER_S)

    def _pause(self, seconds: float) -> None:
        if not self.closed:
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(seconds, self._watch)

    def _read(self) -> int:
        """How many bytes there were."""
        try:
            data = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose last user is gone is EIO
            data = b""
        if data:
            self._feed(data)
        else:
            self.close()
            self._feed(b"")  # whoever waits for more need not
        return len(data)


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
