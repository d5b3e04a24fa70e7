"""The helpers' event loop: descriptors to watch and children to reap, in one thread that waits nowhere else."""

import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class End:
    """How a child ended, negative for a signal, and what it and the children that it waited for used."""

    status: int
    cpu_s: float
    max_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Reactor:
    """Calls a function for each readable descriptor, and `on_child(pid, end)` for each child that ended."""

    def __init__(self, on_child: Callable[[int, End], None]) -> None:
        self._on_child = on_child
        self._handlers: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.watch(self._wakeup, self._reap)
        self._stopping = False

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        del self._handlers[fd]
        self._poll.unregister(fd)

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        while not self._stopping:
            self.turn(None)

    def turn(self, timeout_ms: int | None) -> None:
        """Handle what is ready, waiting at most `timeout_ms` for something to be."""
        for fd, _ in self._poll.poll(timeout_ms):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()

    def _reap(self) -> None:
        os.read(self._wakeup, 4096)
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            kibibytes = used.ru_maxrss  # getrusage(2)
            self._on_child(pid, End(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, kibibytes * 1024))
