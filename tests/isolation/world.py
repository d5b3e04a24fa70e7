"""A small world of network namespaces, so that nothing leaves this machine.

    internet (198.51.100.1, and the cloud's 169.254.169.254)  ---  host (198.51.100.2, 203.0.113.7)  ---  episodes

The host is the network namespace of the test's own process.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import userns
from tbench2_env.isolation.egress import Egress, inside
from tbench2_env.isolation.netlink import Netlink

from .rig import USER_NAMESPACES

INTERNET, METADATA = "198.51.100.1", "169.254.169.254"
HOST, HOST_TOO = "198.51.100.2", "203.0.113.7"
PORT = 8080
_PATIENCE_S = 0.5


def fetch(address: str, port: int = PORT) -> str:
    """What the server there says, or the error."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE_S) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return sock.recv(4096).decode().split("\r\n\r\n")[-1]
    except OSError as error:
        return f"error: {error.strerror or error}"


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 3
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def in_child(run: Callable[[], object]) -> int:
    """Fork a process for `run`, which dies with the test's."""
    pid = os.fork()
    if pid == 0:
        try:
            sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
            run()
        finally:
            os._exit(0)
    return pid


def serve(word: str) -> None:
    """Answer HTTP on every address of this network namespace with `word`, in a child."""
    listener = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    with listener:
        in_child(lambda: _answer(listener, word))


def _answer(listener: socket.socket, word: str) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.0 200 OK\r\n\r\n{word}".encode())


def enter_world() -> None:
    """Make this process's network namespace the host of a new world."""
    sc.unshare(sc.CLONE_NEWNET)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0")  # a new namespace starts with the machine's setting
    ours, theirs = socket.socketpair()
    internet = in_child(lambda: _be_internet(theirs))
    ours.recv(1)
    with Netlink() as link:
        link.set_up(1)
        link.add_address(1, HOST_TOO, 32)
        link.add_veth("up0", "eth0", internet)
        index = socket.if_nametoindex("up0")
        link.add_address(index, HOST, 24)
        link.add_address(index, "169.254.1.1", 16)
        link.set_up(index)
        ours.send(b"!")
        ours.recv(1)
        link.add_default_route(INTERNET)
        assert eventually(lambda: link.is_running(index))
    serve("host")
    assert [fetch(to) for to in (INTERNET, METADATA, HOST)] == ["internet", "internet", "host"]


def _be_internet(channel: socket.socket) -> None:
    sc.unshare(sc.CLONE_NEWNET)
    channel.send(b"!")
    channel.recv(1)
    with Netlink() as link:
        index = socket.if_nametoindex("eth0")
        link.set_up(1)
        link.add_address(index, INTERNET, 24)
        link.add_address(index, METADATA, 16)
        link.set_up(index)
    serve("internet")
    channel.send(b"!")
    signal.pause()


class Episode:
    """A process in network and user namespaces of its own (if there can be), connected as PID 1 of an episode is."""

    def __init__(self, egress: Egress, map_line: str = "0 100000 65536\n") -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid, self.pidfd = sc.clone(sc.CLONE_NEWNET | (sc.CLONE_NEWUSER if USER_NAMESPACES else 0))
        if self.pid == 0:
            _be_episode(theirs)
        theirs.close()
        if USER_NAMESPACES:
            userns.write_maps("/proc", self.pid, map_line)
        self.plug = egress.connect(self.pid)
        assert self.ask("configure", list(egress.unreachable)) is None

    def ask(self, operation: str, argument: Any) -> Any:
        self.channel.send(json.dumps([operation, argument]).encode())
        return json.loads(self.channel.recv(1 << 16))

    def fetch(self, *addresses: str) -> list[str]:
        return [self.ask("fetch", address) for address in addresses]

    def end(self) -> None:
        self.plug.unplug()
        if self.plug.pid is not None:
            os.waitpid(self.plug.pid, 0)
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.channel.close()


def _configure(unreachable: list[str]) -> None:
    with Netlink() as link:
        link.make(inside(unreachable))


def _be_episode(channel: socket.socket) -> None:
    operations: dict[str, Callable[[Any], Any]] = {"configure": _configure, "fetch": fetch, "serve": serve}
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        while message := channel.recv(1 << 16):
            operation, argument = json.loads(message)
            try:
                answer = operations[operation](argument)
            except OSError as error:
                answer = str(error)
            channel.send(json.dumps(answer).encode())
    finally:
        os._exit(0)


@contextmanager
def episodes(egress: Egress, count: int = 1, map_line: str = "0 100000 65536\n") -> Iterator[list[Episode]]:
    made: list[Episode] = []
    try:
        made.extend(Episode(egress, map_line) for _ in range(count))
        yield made
    finally:
        for episode in made:
            episode.end()
