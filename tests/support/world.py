"""A host network with an internet beyond it, so that what tests send never leaves this machine.

    internet (198.51.100.1 and .3)  ---  host (198.51.100.2, 203.0.113.7, fd00:198::2)  ---  episodes

A server started in `with world.host.entered()` has that network; the test's client is then in it, too.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from support.netns import NetworkNamespace
from support.server import eventually

INTERNET, INTERNET_TOO, PORT = "198.51.100.1", "198.51.100.3", 80
HOST_V4, HOST_V6 = ("198.51.100.2", "203.0.113.7"), ("fd00:198::2",)
#: What the internet's web server has at /word.
WORD = "hello from beyond\n"


class World:
    """The two network namespaces."""

    def __init__(self) -> None:
        self.host, self.internet = NetworkNamespace(), NetworkNamespace()
        beyond = f"/proc/{os.getpid()}/fd/{self.internet.fd}"
        self.host.ip(f"link add up0 type veth peer name eth0 netns {beyond}")
        for address in (f"{HOST_V4[0]}/24", f"{HOST_V6[0]}/64"):
            self.host.ip(f"address add {address} dev up0{' nodad' if ':' in address else ''}")
        self.host.ip(f"address add {HOST_V4[1]}/32 dev lo")
        for address in (INTERNET, INTERNET_TOO):
            self.internet.ip(f"address add {address}/24 dev eth0")
        self.internet.ip("link set eth0 up")
        self.host.ip("link set up0 up")
        self.host.ip(f"route add default via {INTERNET}")

    def interfaces(self) -> set[str]:
        """Names of the host's, but for its own."""
        with self.host.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
        return {line.split(":")[0].strip() for line in lines} - {"lo", "up0"}


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """One with a web server on the internet; it serves `folder`/www."""
    (www := folder / "www").mkdir()
    (www / "word").write_text(WORD)
    made = World()
    argv = [sys.executable, "-m", "http.server", str(PORT), "--directory", str(www)]
    server = made.internet.start(*argv, stdout=os.open(os.devnull, os.O_WRONLY))
    try:
        eventually(lambda: _answers(made), 10)
        yield made
    finally:
        server.kill()
        server.wait()
        made.host.close()
        made.internet.close()


def _answers(made: World) -> bool:
    try:
        made.host.connect(INTERNET, PORT).close()
    except OSError:
        return False
    return True
