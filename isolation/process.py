"""What runs in a sandbox, as the server sees it: started by a helper, awaited and killed through its channel."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from tbench2_env.isolation.aiochannel import AsyncChannel
from tbench2_env.isolation.conversation import Conversation, Refused
from tbench2_env.isolation.tally import Tally


class SandboxError(Exception):
    """The isolation itself failed; never the fault of a command that ran in it."""


class Process:
    """A command or verifier that was started in a sandbox."""

    def __init__(self, conversation: Conversation, channel: AsyncChannel, tally: Tally | None) -> None:
        self._conversation, self._channel, self._tally = conversation, channel, tally
        self._request = 0
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @classmethod
    def start(
        cls,
        conversation: Conversation,
        channel: AsyncChannel,
        message: dict[str, Any],
        fds: Sequence[int],
        tally: Tally | None = None,
    ) -> Self:
        """Ask the helper at the end of `channel` for it. Raises: SandboxError: it is gone, or that is too large."""
        process = cls(conversation, channel, tally)
        try:
            process._request = conversation.start(channel, message, fds, process)
        except Refused as refused:
            raise SandboxError(str(refused)) from refused.__cause__
        return process

    async def wait(self) -> int:
        """The exit status, negative for a signal. Raises: SandboxError when it could not be started."""
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        """Kill it and everything it started; `wait` then answers."""
        if not self.exited.done():
            self._conversation.kill(self._channel, self._request)

    def ended(self, end: dict[str, Any]) -> None:
        """See `conversation.Running`."""
        if self._tally is not None:
            self._tally.command_ended(end)
        if not self.exited.done():
            self.exited.set_result(end["status"])

    def failed(self, reason: str) -> None:
        """See `conversation.Running`."""
        if not self.exited.done():
            self.exited.set_exception(SandboxError(reason))
            self.exited.exception()  # nobody need be waiting for it
