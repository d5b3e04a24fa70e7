import json
import pickle

import pytest

from tbench2_env import errors
from tbench2_env.errors import (
    BadRequest,
    CapacityReached,
    ConnectionClosed,
    EpisodeBusy,
    EpisodeEnded,
    ExecutionFailed,
    ReplyTimeout,
    ServerGone,
    Tbench2Error,
    Unauthorized,
    UnknownEpisode,
    UnknownTask,
    WireCode,
    error_from_frame,
    error_from_reply,
)


def all_classes() -> list[type[Tbench2Error]]:
    return [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Tbench2Error)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("INVALID_JSON", BadRequest),
        ("UNKNOWN_TYPE", BadRequest),
        ("VALIDATION_ERROR", BadRequest),
        ("EXECUTION_ERROR", ExecutionFailed),
        ("FACTORY_ERROR", ExecutionFailed),
        ("SESSION_ERROR", ExecutionFailed),
        ("CAPACITY_REACHED", CapacityReached),
        ("EPISODE_ENDED", EpisodeEnded),
        ("EPISODE_BUSY", EpisodeBusy),
        ("UNKNOWN_EPISODE", UnknownEpisode),
        ("UNKNOWN_TASK", UnknownTask),
        ("BRAND_NEW", Tbench2Error),
    ],
)
def test_a_frame_becomes_its_class_with_upstreams_text(code: str, expected: type[Tbench2Error]) -> None:
    error = error_from_frame({"message": "no", "code": code})
    assert type(error) is expected
    assert str(error) == f"Server error: no (code: {code})"
    assert error.code == code


def test_every_wire_code_has_a_class_of_its_own_or_a_shared_one() -> None:
    assert all(type(error_from_frame({"code": code})) is not Tbench2Error for code in WireCode)


def test_an_empty_frame_reads_as_upstreams_client_had_it() -> None:
    assert str(error_from_frame({})) == "Server error: Unknown error (code: UNKNOWN)"


def test_capacity_tells_how_many() -> None:
    error = error_from_frame({"code": "CAPACITY_REACHED", "active_sessions": 8, "max_sessions": 8})
    assert isinstance(error, CapacityReached)
    assert (error.active_sessions, error.max_sessions, error.retry_after_s) == (8, 8, None)


def test_capacity_without_numbers_tells_none() -> None:
    error = error_from_frame({"code": "CAPACITY_REACHED", "max_sessions": "many"})
    assert isinstance(error, CapacityReached)
    assert (error.active_sessions, error.max_sessions) == (None, None)


def test_a_missing_token_comes_with_advice() -> None:
    error = error_from_frame({"message": "who are you", "code": "UNAUTHORIZED"})
    assert type(error) is Unauthorized
    assert str(error).startswith("Server error: who are you; ")
    assert str(error).endswith(" (code: UNAUTHORIZED)")
    assert "token=" in str(error)
    assert "TB2_AUTH_TOKEN" in str(error)


def test_an_unknown_task_is_a_bad_request() -> None:
    assert issubclass(UnknownTask, BadRequest)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (409, "EPISODE_ENDED", EpisodeEnded),
        (409, "EPISODE_BUSY", EpisodeBusy),
        (404, "UNKNOWN_EPISODE", UnknownEpisode),
        (404, "UNKNOWN_TASK", UnknownTask),
        (422, "VALIDATION_ERROR", BadRequest),
        (422, "BRAND_NEW", BadRequest),
        (503, "BRAND_NEW", ExecutionFailed),
        (418, "BRAND_NEW", Tbench2Error),
    ],
)
def test_a_problem_becomes_the_class_of_its_code_or_else_of_its_status(
    status: int, code: str, expected: type[Tbench2Error]
) -> None:
    body = json.dumps({"title": "No", "status": status, "detail": "too bad", "code": code}).encode()
    error = error_from_reply(status, {}, body)
    assert type(error) is expected
    assert (str(error), error.code) == (f"Server error: too bad (code: {code})", code)


def test_a_full_server_says_when_to_come_again() -> None:
    body = b'{"detail": "full", "code": "CAPACITY_REACHED", "active_sessions": 8, "max_sessions": 8}'
    error = error_from_reply(429, {"retry-after": "2"}, body)
    assert isinstance(error, CapacityReached)
    assert (error.active_sessions, error.max_sessions, error.retry_after_s) == (8, 8, 2.0)


@pytest.mark.parametrize("value", ["Fri, 31 Dec 1999 23:59:59 GMT", "-1", "nan", "inf", ""])
def test_a_retry_after_that_is_no_number_of_seconds_is_none(value: str) -> None:
    error = error_from_reply(429, {"Retry-After": value}, b"")
    assert isinstance(error, CapacityReached)
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("status", "body", "expected", "text"),
    [
        (400, b"", BadRequest, "HTTP 400"),
        (401, b"no", Unauthorized, "HTTP 401: no"),
        (403, b"[]", Unauthorized, "HTTP 403: []"),
        (404, b'{"detail":"Not Found"}', Tbench2Error, "Not Found"),
        (422, b'{"detail":[{"loc":["body"]}]}', BadRequest, "[{'loc': ['body']}]"),
        (429, b"slow\ndown", CapacityReached, "HTTP 429: slow down"),
        (500, b"Internal Server Error", ExecutionFailed, "HTTP 500: Internal Server Error"),
        (502, b"<html>" + 1000 * b"x", ServerGone, "HTTP 502: <html>" + 194 * "x"),
        (503, b"\xff", ServerGone, "HTTP 503: \ufffd"),
    ],
)
def test_what_is_not_the_servers_own_goes_by_its_status(
    status: int, body: bytes, expected: type[Tbench2Error], text: str
) -> None:
    error = error_from_reply(status, {}, body)
    assert type(error) is expected
    assert str(error).startswith(f"Server error: {text}")


def test_the_tree_is_the_one_drawn() -> None:
    assert errors.__doc__ is not None
    root, *below = [line for line in errors.__doc__.splitlines() if "(RuntimeError)" in line or "── " in line]
    drawn = [root.split()[0], *(line.split("── ")[1].split()[0] for line in below)]
    assert drawn == [cls.__name__ for cls in all_classes()]


def test_lost_and_late_are_builtin_kinds_too() -> None:
    assert issubclass(Tbench2Error, RuntimeError)
    assert issubclass(ServerGone, ConnectionError)
    assert issubclass(ConnectionClosed, ServerGone)
    assert issubclass(ReplyTimeout, TimeoutError)


@pytest.mark.parametrize("cls", all_classes())
def test_errors_survive_pickling(cls: type[Tbench2Error]) -> None:
    error = pickle.loads(pickle.dumps(cls("what happened")))
    assert (type(error), str(error), error.code) == (cls, "what happened", cls.code)


def test_a_servers_error_survives_pickling() -> None:
    error = error_from_reply(429, {"Retry-After": "2"}, b'{"detail":"full","code":"CAPACITY_REACHED","max_sessions":8}')
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.max_sessions) == ("Server error: full (code: CAPACITY_REACHED)", 8)
    assert again.retry_after_s == 2.0
