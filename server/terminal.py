"""Named terminals: programs that keep running between actions, each on a pty of its own."""

import asyncio
import os
from collections.abc import Sequence

from tbench2_env.isolation.process import Process
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import CommandSpec
from tbench2_env.server.output import Capture, Reader

#: Seconds of silence after which what was printed so far is the answer, and the longest wait for that silence.
_QUIET_S, _LONGEST_S = 0.25, 5.0
TERMINALS_MAX = 32
#: Seconds that writing to a terminal may take; a program that does not read fills its input (4,096 bytes).
_WRITE_TIMEOUT_S = 5.0


class TerminalError(Exception):
    """The client asked for something that its terminals cannot do; the text says what to do instead."""


class Terminal:
    """One program on one pty."""

    def __init__(self, name: str, process: Process, master: int, limit_bytes: int) -> None:
        self.name, self._process, self._master = name, process, os.dup(master)
        self._capture = Capture(limit_bytes)
        self._news = asyncio.Event()
        self._reader = Reader(master, self._feed)
        os.set_blocking(self._master, False)

    @classmethod
    async def open(
        cls, name: str, sandbox: Sandbox, command: CommandSpec, fds: Sequence[int], limit_bytes: int
    ) -> "Terminal":
        """Raises: SandboxError."""
        process, master = await sandbox.open_terminal(command, fds)
        return cls(name, process, master, limit_bytes)

    def _feed(self, data: bytes) -> None:
        self._capture.feed(data)
        self._news.set()

    @property
    def running(self) -> bool:
        return not self._process.exited.done()

    def view(self) -> str:
        """What was printed since the last view."""
        return self._capture.take()

    async def settle(self, longest_s: float = _LONGEST_S) -> str:
        """What is printed until nothing more comes for a moment."""
        deadline = asyncio.get_running_loop().time() + longest_s
        while (left := deadline - asyncio.get_running_loop().time()) > 0 and not self._reader.closed:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), min(_QUIET_S, left))
            except TimeoutError:
                break
        return self.view()

    async def wait(self, seconds: float) -> str:
        """What is printed until the program ends, at most `seconds`."""
        await asyncio.wait([self._process.exited], timeout=seconds)
        if not self.running:
            return await self.settle()
        return self.view()

    async def write(self, text: str) -> str:
        """Type `text`; answers with what that brings about. Raises: TerminalError."""
        if not self.running:
            raise TerminalError(
                f"the program in terminal {self.name!r} has ended; start another with exec, block=false"
            )
        data = memoryview(text.encode())
        deadline = asyncio.get_running_loop().time() + _WRITE_TIMEOUT_S
        while data:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise TerminalError(f"the program in terminal {self.name!r} does not read its input") from None
                await asyncio.sleep(0.02)
        return await self.settle()

    def close(self) -> None:
        """Kill the program and all it started."""
        self._process.kill()
        self._reader.close()
        if self._master >= 0:
            os.close(self._master)
            self._master = -1


class Terminals:
    """The terminals of one episode, by name."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._terminals: dict[str, Terminal] = {}

    def get(self, name: str) -> Terminal:
        """Raises: TerminalError naming the terminals there are."""
        if name not in self._terminals:
            there_are = ", ".join(map(repr, self._terminals)) or "none"
            raise TerminalError(f"there is no terminal {name!r} (open: {there_are}); start it with exec, block=false")
        return self._terminals[name]

    async def start(self, name: str, sandbox: Sandbox, command: CommandSpec, fds: Sequence[int]) -> str:
        """Start a program in a new terminal; answers what it prints first. Raises: TerminalError, SandboxError."""
        old = self._terminals.get(name)
        if old is not None and old.running:
            raise TerminalError(f"terminal {name!r} is busy; kill it first, or use another session_id")
        if old is None and len(self._terminals) >= TERMINALS_MAX:
            raise TerminalError(f"an episode may have {TERMINALS_MAX} terminals; kill one first")
        terminal = await Terminal.open(name, sandbox, command, fds, self._limit_bytes)
        if old is not None:
            old.close()
        self._terminals[name] = terminal
        return await terminal.settle(1.0)

    def kill(self, name: str) -> None:
        """Raises: TerminalError."""
        self.get(name).close()
        del self._terminals[name]

    def close(self) -> None:
        for terminal in self._terminals.values():
            terminal.close()
        self._terminals.clear()
