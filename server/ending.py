"""Why episodes end: a closed set, used in errors, results and metrics alike."""

from enum import StrEnum
from typing import Protocol


class End(StrEnum):
    """Every episode ends once, for one of these."""

    CLOSED = "closed"
    REPLACED = "replaced"
    DELETED = "deleted"
    DISCONNECTED = "disconnected"
    IDLE = "idle"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    DIED = "died"


class EpisodeEnded(Exception):
    """The client acts on an episode that is over; the text says why it ended."""

    def __init__(self, end: End, message: str) -> None:
        super().__init__(message)
        self.end = end


class EpisodeBusy(Exception):
    """The client acts on an episode that is carrying out another action."""


class CheckAlive(Protocol):
    """A command that ended because its whole sandbox did is not the command's own doing.

    A killed command may be heard of before its sandbox's death is, or what limit it met: the sandbox is asked, unless
    `exit_code` is 0.
    """

    async def __call__(self, exit_code: int = ...) -> None:
        """Raises: SandboxError saying what died, or why the episode ended."""
