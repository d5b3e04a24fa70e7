"""Messages with descriptors between server, spawner and launcher: JSON objects over a SOCK_SEQPACKET pair."""

import array
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from tbench2_env.isolation.spec import decode, encode

#: Bytes of one message; the environment of a command is the largest thing that travels, its text goes by memfd.
MESSAGE_MAX = 1 << 18
DESCRIPTORS_MAX = 16

#: What is received: an object and descriptors.
Message = tuple[dict[str, Any], list[int]]


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end. Sending blocks unless the socket was set non-blocking; received descriptors are close-on-exec."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._muted = False
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 * MESSAGE_MAX)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Raises: ValueError for a message that is too large, ChannelClosed, BlockingIOError."""
        data = encode_checked(message, fds)
        if self._muted:
            return
        try:
            socket.send_fds(self.sock, [data], list(fds))
        except ConnectionError as error:
            raise ChannelClosed from error

    def mute(self) -> None:
        """Send nothing from now on."""
        self._muted = True

    def waiting(self) -> Iterator[Message]:
        """The messages that are there already. Raises: ChannelClosed."""
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self.receive(socket.MSG_DONTWAIT)

    def receive(self, flags: int = 0) -> Message:
        """One whole message; `flags` are recvmsg's. Raises: ChannelClosed, BlockingIOError."""
        try:
            data, fds = receive_descriptors(self.sock, MESSAGE_MAX, flags)
        except ConnectionError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        return decode(data), fds


def encode_checked(message: dict[str, Any], fds: Sequence[int]) -> bytes:
    """The message as it is sent. Raises: ValueError naming the bound that it or its descriptors break."""
    data = encode(message)
    if len(data) > MESSAGE_MAX:
        raise ValueError(f"message of {len(data)} bytes to the spawner, {MESSAGE_MAX} at most: shorten env or argv")
    if len(fds) > DESCRIPTORS_MAX:
        raise ValueError(f"{len(fds)} descriptors with one message, {DESCRIPTORS_MAX} at most")
    return data


def receive_descriptors(sock: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """One message of at most `size` bytes and its descriptors, close-on-exec.

    `socket.recv_fds` leaves them open in whatever is executed next, and ignores the flag that would not: a verifier
    then had a handle on every live episode's /proc.
    """
    ancillary_size = socket.CMSG_LEN(DESCRIPTORS_MAX * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, ancillary_size, socket.MSG_CMSG_CLOEXEC | flags)
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
