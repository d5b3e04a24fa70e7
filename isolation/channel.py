"""Messages with descriptors between server, spawner and launcher: JSON objects over a SOCK_SEQPACKET pair."""

import array
import os
import socket
from typing import Any

from tbench2_env.isolation.spec import decode, encode

#: Bytes of one message; the environment of a command is the largest thing that travels, its text goes by memfd.
MESSAGE_MAX = 1 << 18
DESCRIPTORS_MAX = 16


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end. Sending blocks unless the socket was set non-blocking; received descriptors are close-on-exec."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 * MESSAGE_MAX)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] | list[int] = ()) -> None:
        """Raises: ValueError for a message over MESSAGE_MAX, OSError when the other side is gone."""
        data = encode(message)
        if len(data) > MESSAGE_MAX:
            raise ValueError(f"message of {len(data)} bytes to the spawner, {MESSAGE_MAX} at most: shorten env or argv")
        socket.send_fds(self.sock, [data], list(fds))

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """One whole message. Raises: ChannelClosed, BlockingIOError."""
        ancillary_size = socket.CMSG_LEN(DESCRIPTORS_MAX * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self.sock.recvmsg(MESSAGE_MAX, ancillary_size, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError as error:
            raise ChannelClosed from error
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if not data:
            raise ChannelClosed
        return decode(data), list(fds)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
