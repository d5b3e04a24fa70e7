"""The server's end of channels to helpers and their children, on its event loop: never blocks."""

import asyncio
import collections
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all, encode_checked, receive_descriptors


class AsyncChannel:
    """Calls `on_message` with each message and its descriptors, and `on_lost` once the other side is gone."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[dict[str, Any], list[int]], None],
        on_lost: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._channel, self._on_message, self._on_lost = Channel(sock), on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[tuple[dict[str, Any], list[int]]] = collections.deque()
        self._loop.add_reader(sock.fileno(), self._receive)

    def post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send now, or as soon as the other side has read enough; the caller keeps its descriptors either way.

        Raises: ValueError for what is too large, ChannelClosed.
        """
        try:
            if not self._unsent:
                self._channel.send(message, fds)
                return
            encode_checked(message, fds)  # refused now, not when its turn comes
        except BlockingIOError:
            self._loop.add_writer(self._channel.fileno(), self._send_more)
        except OSError as error:
            raise ChannelClosed from error
        self._unsent.append((message, [os.dup(fd) for fd in fds]))

    def _send_more(self) -> None:
        try:
            while self._unsent:
                self._channel.send(*self._unsent[0])
                close_all(self._unsent.popleft()[1])
            self._loop.remove_writer(self._channel.fileno())
        except BlockingIOError:
            pass
        except (OSError, ChannelClosed):
            self._on_lost()

    def _receive(self) -> None:
        try:
            while True:
                self._on_message(*self._channel.receive())
        except BlockingIOError:
            pass
        except ChannelClosed:
            self._on_lost()

    def close(self) -> None:
        if self._channel.fileno() < 0:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self._channel.sock.close()


async def receive_one(sock: socket.socket) -> list[int]:
    """The descriptors of the next message on `sock`; none if the other side closed it."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
        return receive_descriptors(sock, 16)[1]
    finally:
        loop.remove_reader(sock.fileno())
