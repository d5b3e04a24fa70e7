"""Network namespaces for tests: made by a thread, kept by a descriptor, gone when that is closed."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tbench2_env.isolation import syscalls as sc

CLONE_NEWNET = 0x4000_0000  # linux/sched.h
_OWN = "/proc/thread-self/ns/net"
_T = TypeVar("_T")


class NetworkNamespace:
    """A new network namespace, its loopback up."""

    def __init__(self) -> None:
        self.fd = _in_thread(self._make)
        self.ip("link set lo up")

    @staticmethod
    def _make() -> int:
        sc.unshare(CLONE_NEWNET)
        return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)

    def ip(self, command: str) -> None:
        subprocess.run([*self._enter, "ip", *command.split()], pass_fds=[self.fd], check=True)

    async def run(self, *argv: str, within_s: float = 20.0) -> tuple[int, str]:
        """Run a program in it: (exit status, output)."""
        process = await asyncio.create_subprocess_exec(
            *self._enter, *argv, pass_fds=[self.fd], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), within_s)
        assert process.returncode is not None
        return process.returncode, output.decode()

    def start(self, *argv: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start a program in it, as the leader of a session."""
        return subprocess.Popen([*self._enter, *argv], pass_fds=[self.fd], start_new_session=True, stdout=stdout)

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", f"--net=/proc/self/fd/{self.fd}"]

    def listen(self, address: str, port: int) -> socket.socket:
        """A listening TCP socket that belongs to it."""
        return self.call(lambda: socket.create_server((address, port), backlog=128))

    def connect(self, address: str, port: int) -> socket.socket:
        return self.call(lambda: socket.create_connection((address, port), 5))

    def call(self, function: Callable[[], _T]) -> _T:
        """What the function answers when a thread in the namespace calls it."""

        def enter_and_call() -> _T:
            sc.setns(self.fd, CLONE_NEWNET)
            return function()

        return _in_thread(enter_and_call)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and what it starts, is in the namespace."""
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        sc.setns(self.fd, CLONE_NEWNET)
        try:
            yield
        finally:
            sc.setns(before, CLONE_NEWNET)
            os.close(before)


def _in_thread(function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()
