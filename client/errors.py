"""Everything the client raises, and the codes a server sends in an error frame or an HTTP problem.

    Tbench2Error (RuntimeError)                 also itself: an unknown code, a reply that makes no sense
    ├── BadRequest                              the request was wrong: asking again will not help
    │   └── UnknownTask                         the server has no such task
    ├── Unauthorized                            the server wants another token
    ├── CapacityReached                         no slot is free: try again later
    ├── EpisodeBusy                             the episode is carrying out another action
    ├── EpisodeEnded                            the episode this session had is gone
    ├── UnknownEpisode                          there is no such episode, or none was begun
    ├── ExecutionFailed                         the server could not carry it out: its fault, not the task's
    ├── ServerGone (ConnectionError)            cannot connect
    │   └── ConnectionClosed                    connected once, and lost while in use
    └── ReplyTimeout (TimeoutError)             connected, but no reply in time

A command that fails is no exception: it is an observation with its exit code in `info`.

Trainers match on text and class names, so both are fixed: `str()` of a server's error is
`Server error: <message> (code: <CODE>)` as in OpenEnv's client, and Miles retries an episode when it reads
`CAPACITY_REACHED` there or when the class is called `ConnectionClosed`. All of them survive pickling (Ray).
"""

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any

_EXCERPT_CHARS = 200
_TOKEN_ADVICE = "token= or the variable TB2_AUTH_TOKEN must hold the server's token"


class WireCode(StrEnum):
    """`data.code` of an error frame, `code` of an HTTP problem. The first seven are OpenEnv's `WSErrorCode`."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"
    EPISODE_ENDED = "EPISODE_ENDED"
    EPISODE_BUSY = "EPISODE_BUSY"
    UNKNOWN_EPISODE = "UNKNOWN_EPISODE"
    UNKNOWN_TASK = "UNKNOWN_TASK"
    UNAUTHORIZED = "UNAUTHORIZED"


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


class UnknownTask(BadRequest):
    """The server's catalogue has no task of that name or path."""

    code = WireCode.UNKNOWN_TASK


class Unauthorized(Tbench2Error):
    """The server was given no token, or not the one it wants. The text has the advice, never the token."""

    code = WireCode.UNAUTHORIZED


class CapacityReached(Tbench2Error):
    """Every slot of the server holds an episode.

    `active_sessions`, `max_sessions` and `retry_after_s` (seconds to wait before asking again) are None if the server
    did not say.
    """

    code = WireCode.CAPACITY_REACHED

    def __init__(
        self,
        message: str,
        *,
        active_sessions: int | None = None,
        max_sessions: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.active_sessions = active_sessions
        self.max_sessions = max_sessions
        self.retry_after_s = retry_after_s


class EpisodeBusy(Tbench2Error):
    """The episode is carrying out another action, so this one was not begun."""

    code = WireCode.EPISODE_BUSY


class EpisodeEnded(Tbench2Error):
    """The session's episode is over or was reaped; `reset` starts another."""

    code = WireCode.EPISODE_ENDED


class UnknownEpisode(Tbench2Error):
    """The server knows no such episode, or `reset` has not begun one yet."""

    code = WireCode.UNKNOWN_EPISODE


class ExecutionFailed(Tbench2Error):
    """The server failed at a valid request: EXECUTION_ERROR, FACTORY_ERROR or SESSION_ERROR."""

    code = WireCode.EXECUTION_ERROR


class ServerGone(Tbench2Error, ConnectionError):
    """No connection to the server could be made."""

    code = "CONNECTION_LOST"


class ConnectionClosed(ServerGone):
    """The connection is lost, and a WebSocket's episode with it. The text has the reason."""


class ReplyTimeout(Tbench2Error, TimeoutError):
    """No reply within the client's message timeout. The connection is given up with it."""

    code = "REPLY_TIMEOUT"


_CLASS_OF_CODE: dict[str, type[Tbench2Error]] = {
    WireCode.INVALID_JSON: BadRequest,
    WireCode.UNKNOWN_TYPE: BadRequest,
    WireCode.VALIDATION_ERROR: BadRequest,
    WireCode.UNKNOWN_TASK: UnknownTask,
    WireCode.UNAUTHORIZED: Unauthorized,
    WireCode.EPISODE_BUSY: EpisodeBusy,
    WireCode.EPISODE_ENDED: EpisodeEnded,
    WireCode.UNKNOWN_EPISODE: UnknownEpisode,
    WireCode.EXECUTION_ERROR: ExecutionFailed,
    WireCode.FACTORY_ERROR: ExecutionFailed,
    WireCode.SESSION_ERROR: ExecutionFailed,
    ServerGone.code: ServerGone,
}

# For replies without a code, which are not our server's own: its web framework's, or a proxy's in front of it.
_CODE_OF_STATUS: dict[int, str] = {
    400: WireCode.VALIDATION_ERROR,
    401: WireCode.UNAUTHORIZED,
    403: WireCode.UNAUTHORIZED,
    413: WireCode.VALIDATION_ERROR,
    414: WireCode.VALIDATION_ERROR,
    422: WireCode.VALIDATION_ERROR,
    429: WireCode.CAPACITY_REACHED,
    500: WireCode.EXECUTION_ERROR,
    502: ServerGone.code,
    503: ServerGone.code,
    504: ServerGone.code,
}


def error_from_frame(data: Mapping[str, Any], *, unknown_as: type[Tbench2Error] = Tbench2Error) -> Tbench2Error:
    """The exception for `data` of an error frame.

    Args:
        data: `{message, code, active_sessions?, max_sessions?, retry_after_s?}`.
        unknown_as: the class for a code that is not a `WireCode`.
    """
    code = str(data.get("code", Tbench2Error.code))
    message = data.get("message", "Unknown error")
    if code == WireCode.UNAUTHORIZED:
        message = f"{message}; {_TOKEN_ADVICE}"
    text = f"Server error: {message} (code: {code})"
    if code == WireCode.CAPACITY_REACHED:
        return CapacityReached(
            text,
            active_sessions=_count(data, "active_sessions"),
            max_sessions=_count(data, "max_sessions"),
            retry_after_s=_seconds(data.get("retry_after_s")),
        )
    return _CLASS_OF_CODE.get(code, unknown_as)(text, code=code)


def error_from_reply(status: int, headers: Mapping[str, str], body: bytes) -> Tbench2Error:
    """The exception for an HTTP reply that is no success.

    Args:
        status: of the reply. It decides only where the body does not.
        headers: of the reply, with names in any case; a Retry-After in seconds is kept, one with a date is not.
        body: `application/problem+json` (RFC 9457) with a `code`, or anything.
    """
    problem = _problem(body)
    code_of_status = _CODE_OF_STATUS.get(status, Tbench2Error.code)
    data = {
        **problem,
        "code": problem.get("code") or code_of_status,
        "message": problem.get("detail") or problem.get("title") or _excerpt(status, body),
        "retry_after_s": {name.lower(): value for name, value in headers.items()}.get("retry-after"),
    }
    return error_from_frame(data, unknown_as=_class_of_status(status, code_of_status))


def _class_of_status(status: int, code: str) -> type[Tbench2Error]:
    # A code of a newer server: whoever sent it was reached, so even a 503 is the server's failure, not its absence.
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ExecutionFailed
    return _CLASS_OF_CODE.get(code, Tbench2Error)


def _problem(body: bytes) -> dict[str, Any]:
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return problem if isinstance(problem, dict) else {}


def _excerpt(status: int, body: bytes) -> str:
    excerpt = " ".join(body.decode(errors="replace").split())[:_EXCERPT_CHARS]
    return f"HTTP {status}: {excerpt}" if excerpt else f"HTTP {status}"


def _count(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if isinstance(value, int) else None


def _seconds(value: object) -> float | None:
    try:
        seconds = float(value) if isinstance(value, int | float | str) else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
