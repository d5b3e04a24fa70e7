"""What the server asks of the helpers and what they answer: numbered requests on its two channels (see `spawner`)."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tbench2_env.isolation.aiochannel import AsyncChannel
from tbench2_env.isolation.channel import ChannelClosed, Message, close_all

#: Seconds that a helper may take for one request. Its work takes milliseconds; this only ends a wait on a host that has
#: stopped working.
REQUEST_TIMEOUT_S = 60.0
SPAWNER_DIED = "the sandbox is dead: the spawner process died"


class Refused(Exception):
    """A helper cannot do what was asked, did not answer in time, or is gone; the text says what."""


class Running(Protocol):
    """Who hears of what he had started."""

    def ended(self, end: dict[str, Any]) -> None:
        """`end` is a `reactor.End`."""

    def failed(self, reason: str) -> None:
        """It could not be started, or all helpers are gone, and what they started with them."""


class Conversation:
    """Requests to the spawner, by `control`, and to the launcher, by number, until the helpers are gone.

    `hello` is the spawner's first message. `on_event` hears of what happens to sandboxes, and `on_end`, once or more
    often, that the helpers are gone, after all that was under way has failed.
    """

    def __init__(
        self,
        control: socket.socket,
        launcher: socket.socket,
        on_event: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._requests = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._running: dict[int, Running] = {}
        self._on_event, self._on_end = on_event, on_end
        self.hello: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.over = False
        #: When something was asked or heard last, as time.monotonic() says.
        self.spoke_at = 0.0
        self.control = AsyncChannel(control, self._message, self.end)
        self.launcher = AsyncChannel(launcher, self._message, self.end)

    async def ask(self, message: dict[str, Any], timeout_s: float | None = REQUEST_TIMEOUT_S) -> Message:
        """Ask the spawner. Raises: Refused."""
        request = next(self._requests)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        self.spoke_at = time.monotonic()
        try:
            self.control.post({"id": request, **message})
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise Refused(f"the spawner did not {message['op']} within {timeout_s:g} s") from None
        except ChannelClosed:
            raise Refused(SPAWNER_DIED) from None
        finally:
            self._answers.pop(request, None)

    def start(self, channel: AsyncChannel, message: dict[str, Any], fds: Sequence[int], running: Running) -> int:
        """Ask one of the helpers to run something; answers with what `kill` takes. Raises: Refused."""
        request = next(self._requests)
        try:
            channel.post({"id": request, **message}, fds)
        except ChannelClosed:
            raise Refused(SPAWNER_DIED) from None
        except ValueError as error:
            raise Refused(str(error)) from error
        self._running[request] = running
        self.spoke_at = time.monotonic()
        return request

    def kill(self, channel: AsyncChannel, request: int) -> None:
        """Kill what was started by `request`, which then ends."""
        with contextlib.suppress(ChannelClosed):  # with the helpers, all that they started is gone
            channel.post({"id": 0, "op": "kill", "target": request})

    def close(self) -> None:
        """Ask nothing any more, at which the helpers end."""
        self.control.close()
        self.launcher.close()

    def end(self) -> None:
        """The spawner is gone, and with it everything it made."""
        self.over = True
        self.close()
        if not self.hello.done():
            self.hello.set_exception(Refused("the spawner process died at its start"))
        for answer in self._answers.values():
            _resolve(answer, Refused(SPAWNER_DIED))
        for request in list(self._running):
            self._failed(request, SPAWNER_DIED)
        self._on_end()

    def _message(self, message: dict[str, Any], fds: list[int]) -> None:
        self.spoke_at = time.monotonic()
        match message:
            case {"id": request, "ok": True}:
                _resolve(self._answers.get(request), (message, fds))
            case {"event": "exit", "id": request}:
                if (running := self._running.pop(request, None)) is not None:
                    running.ended(message)
            case {"event": "failed", "id": request, "error": error} | {"id": request, "error": error}:
                self._failed(request, error)
            case {"event": _}:
                self._on_event(message)
            case _:
                self.hello.set_result((message, fds))

    def _failed(self, request: int, reason: str) -> None:
        _resolve(self._answers.get(request), Refused(reason))
        if (running := self._running.pop(request, None)) is not None:
            running.failed(reason)


def _resolve(future: asyncio.Future[Message] | None, result: Message | Refused) -> None:
    if future is None or future.done():
        if isinstance(result, tuple):
            close_all(result[1])
    elif isinstance(result, tuple):
        future.set_result(result)
    else:
        future.set_exception(result)
