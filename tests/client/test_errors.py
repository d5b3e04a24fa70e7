import pickle

import pytest

from tbench2_env import errors
from tbench2_env.errors import (
    BadRequest,
    CapacityReached,
    ConnectionClosed,
    EpisodeEnded,
    ExecutionFailed,
    ReplyTimeout,
    ServerGone,
    Tbench2Error,
    WireCode,
    error_from_frame,
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
    assert (error.active_sessions, error.max_sessions) == (8, 8)


def test_capacity_without_numbers_tells_none() -> None:
    error = error_from_frame({"code": "CAPACITY_REACHED", "max_sessions": "many"})
    assert isinstance(error, CapacityReached)
    assert (error.active_sessions, error.max_sessions) == (None, None)


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
    error = error_from_frame({"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 8})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.max_sessions) == ("Server error: full (code: CAPACITY_REACHED)", 8)
