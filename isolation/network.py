"""The inside of an episode's own network: its loopback, and the socket that a proxy outside accepts from."""

import fcntl
import socket
import struct
from typing import Any

from tbench2_env.isolation.spec import PROXY_PORT, Network

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h
_BACKLOG = 128


def set_up(network: Network, settings: dict[str, Any]) -> int | None:
    """Called in a new network namespace. Answers with a listening socket, if `network` wants one for a proxy.

    A socket belongs to the namespace that it was made in, whoever accepts from it: so the proxy needs no process here.
    """
    bring_up("lo")
    if network is not Network.PROXY:
        return None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(("127.0.0.1", PROXY_PORT))
    listener.listen(_BACKLOG)
    return listener.detach()


def bring_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        # struct ifreq: name, then the flags
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", interface.encode(), _IFF_UP))
