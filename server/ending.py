"""Why episodes end: a closed set, used in errors, results and metrics alike."""

from enum import StrEnum


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
