"""Everything the client raises, and the codes a server sends in an error frame.

    Tbench2Error (RuntimeError)                 also itself: an unknown code, a reply that makes no sense
    ├── BadRequest                              the request was wrong: asking again will not help
    ├── CapacityReached                         no slot is free: try again later
    ├── EpisodeEnded                            the episode this session had is gone
    ├── ExecutionFailed                         the server could not carry it out: its fault, not the task's
    ├── ServerGone (ConnectionError)            cannot connect
    │   └── ConnectionClosed                    connected once, and lost while in use
    └── ReplyTimeout (TimeoutError)             connected, but no reply in time

A command that fails is no exception: it is an observation with its exit code in `info`.

Trainers match on text and class names, so both are fixed: `str()` of a server's error is
`Server error: <message> (code: <CODE>)` as in OpenEnv's client, and Miles retries an episode when it reads
`CAPACITY_REACHED` there or when the class is called `ConnectionClosed`. All of them survive pickling (Ray).
"""

from enum import StrEnum
from typing import Any


class WireCode(StrEnum):
    """`data.code` of an error frame. All but EPISODE_ENDED are OpenEnv's `WSErrorCode`."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"
    EPISODE_ENDED = "EPISODE_ENDED"


class Tbench2Error(RuntimeError):
    """Base of all errors of this client.

    `code` is a `WireCode` when the server said so, else CONNECTION_LOST, REPLY_TIMEOUT, BAD_REPLY or UNKNOWN.
    """

    code: str = "UNKNOWN"

    # One positional argument, the final text: that is what unpickling calls it with.
    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class BadRequest(Tbench2Error):
    """The server refused the request itself: INVALID_JSON, UNKNOWN_TYPE or VALIDATION_ERROR."""

    code = WireCode.VALIDATION_ERROR


class CapacityReached(Tbench2Error):
    """Every slot of the server holds an episode. `active_sessions` and `max_sessions` are None if it did not say."""

    code = WireCode.CAPACITY_REACHED

    def __init__(self, message: str, *, active_sessions: int | None = None, max_sessions: int | None = None) -> None:
        super().__init__(message)
        self.active_sessions = active_sessions
        self.max_sessions = max_sessions


class EpisodeEnded(Tbench2Error):
    """The session's episode is over or was reaped; `reset` starts another."""

    code = WireCode.EPISODE_ENDED


class ExecutionFailed(Tbench2Error):
    """The server failed at a valid request: EXECUTION_ERROR, FACTORY_ERROR or SESSION_ERROR."""

    code = WireCode.EXECUTION_ERROR


class ServerGone(Tbench2Error, ConnectionError):
    """No connection to the server could be made."""

    code = "CONNECTION_LOST"


class ConnectionClosed(ServerGone):
    """The connection, and with it the episode, is lost. The text has the reason."""


class ReplyTimeout(Tbench2Error, TimeoutError):
    """No reply within the client's message timeout. The connection is given up with it."""

    code = "REPLY_TIMEOUT"


_CLASS_OF_CODE: dict[str, type[Tbench2Error]] = {
    WireCode.INVALID_JSON: BadRequest,
    WireCode.UNKNOWN_TYPE: BadRequest,
    WireCode.VALIDATION_ERROR: BadRequest,
    WireCode.EXECUTION_ERROR: ExecutionFailed,
    WireCode.FACTORY_ERROR: ExecutionFailed,
    WireCode.SESSION_ERROR: ExecutionFailed,
    WireCode.EPISODE_ENDED: EpisodeEnded,
}


def error_from_frame(data: dict[str, Any]) -> Tbench2Error:
    """The exception for `data` of an error frame: `{message, code, active_sessions?, max_sessions?}`."""
    code = str(data.get("code", Tbench2Error.code))
    text = f"Server error: {data.get('message', 'Unknown error')} (code: {code})"
    if code == WireCode.CAPACITY_REACHED:
        return CapacityReached(
            text, active_sessions=_count(data, "active_sessions"), max_sessions=_count(data, "max_sessions")
        )
    return _CLASS_OF_CODE.get(code, Tbench2Error)(text, code=code)


def _count(data: dict[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if isinstance(value, int) else None
