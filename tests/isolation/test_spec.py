"""What travels between server and spawner arrives as it was sent."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbench2_env.isolation.spec import (
    FIRST_SUBORDINATE_ID,
    ID_COUNT,
    PRIVATE_FOLDERS,
    RUNGS,
    SYSTEM_FOLDERS,
    CommandSpec,
    Limits,
    Network,
    Rung,
    SandboxSpec,
    SpawnerConfig,
    decode,
    encode,
)

#: Anything that can be a path, an argument or a variable: also bytes that are no UTF-8, as os.fsdecode gives them.
TEXT = st.one_of(st.text(), st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
TEXTS = st.lists(TEXT, max_size=4).map(tuple)

RUNG_DATA = st.builds(
    Rung,
    name=TEXT,
    title=TEXT,
    id_map=st.tuples(st.integers(), st.integers(), st.integers()),
    idmapped=st.booleans(),
    overlay_options=TEXTS,
    xattr_prefix=TEXT,
    protect_proc_sys=st.booleans(),
    by_folder=st.booleans(),
    lacks=TEXTS,
)
SANDBOXES = st.builds(
    SandboxSpec,
    name=TEXT,
    layers=TEXTS,
    network=st.sampled_from(Network),
    stored=TEXTS,
    over_node=st.booleans(),
    building=st.booleans(),
    limits=st.builds(Limits, memory_bytes=st.one_of(st.none(), st.integers()), cpus=st.one_of(st.none(), st.just(0.5))),
)
COMMANDS = st.builds(
    CommandSpec,
    path=TEXT,
    argv=TEXTS,
    cwd=TEXT,
    env=st.dictionaries(TEXT, TEXT, max_size=4),
    tty=st.booleans(),
    ids=st.lists(st.integers(), max_size=3).map(tuple),
)
CONFIGS = st.builds(SpawnerConfig, rung=TEXT, scratch=TEXTS, hide=TEXTS)


@given(st.one_of(RUNG_DATA, SANDBOXES, COMMANDS, CONFIGS))
def test_data_survives_the_journey(data: Rung | SandboxSpec | CommandSpec | SpawnerConfig) -> None:
    arrived = type(data).from_dict(decode(encode({"data": data.to_dict()}))["data"])
    assert arrived == data
    assert hash(getattr(arrived, "layers", ())) == hash(getattr(data, "layers", ()))


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none()), max_size=5))
def test_a_message_is_a_json_object(message: dict[str, object]) -> None:
    assert json.loads(encode(message)) == message
    assert decode(encode(message)) == message


@pytest.mark.parametrize("data", [b"[1]", b'"text"', b"no json", b"", b"\xff"])
def test_anything_else_is_no_message(data: bytes) -> None:
    with pytest.raises((AssertionError, ValueError)):
        decode(data)


def test_a_field_that_nobody_knows_is_refused() -> None:
    with pytest.raises(TypeError, match="surprise"):
        SandboxSpec.from_dict({"name": "x", "surprise": 1})


@pytest.mark.parametrize(
    ("name", "map_line", "inner_map_line", "shift", "caps"),
    [
        ("1", f"0 {FIRST_SUBORDINATE_ID} {ID_COUNT}\n", f"0 0 {ID_COUNT}\n", FIRST_SUBORDINATE_ID, True),
        ("2", f"0 0 {ID_COUNT}\n", f"0 0 {ID_COUNT}\n", 0, False),
        ("E", "0 0 1\n", "0 0 1\n", 0, True),
    ],
)
def test_ids_of_a_rung(name: str, map_line: str, inner_map_line: str, shift: int, caps: bool) -> None:
    rung = RUNGS[name]
    assert (rung.name, rung.map_line, rung.inner_map_line) == (name, map_line, inner_map_line)
    assert (rung.owner_shift, rung.caps_processes) == (shift, caps)


def test_only_a_rung_without_shifted_ids_must_guard_proc_sys() -> None:
    """Root inside is root outside there, and could write the host's sysctls; in enroot it is not real root."""
    assert {name: rung.protect_proc_sys for name, rung in RUNGS.items()} == {
        "1": False,
        "2": True,
        "3": True,
        "E": False,
        "4": False,
        "5": False,
        "none": False,
    }


def test_what_the_verifier_needs_is_private_to_each_episode() -> None:
    assert {"tests", "logs", "logs/verifier", "tmp", "root", "home", "run", "proc", "dev", "sys"} <= set(
        PRIVATE_FOLDERS
    )
    assert not SYSTEM_FOLDERS & {path.split("/")[0] for path in PRIVATE_FOLDERS if "/" not in path}
