"""How a verifier's reward file is read: one finite number, or no verdict with the reason (CASES.md 11)."""

import contextlib
import json
import math
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbench2_env.server.verifier import REWARD_FILE_MAX_BYTES, NoVerdict, Reason, read_reward


def reward_of(folder: Path, **files: str | bytes) -> tuple[float, dict[str, float]]:
    for name, content in files.items():
        (folder / f"reward.{name}").write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_reward(folder)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1\n", 1.0), ("0", 0.0), (" 0.5 \n", 0.5), ("\t-1.5\r\n", -1.5), ("1e-3", 0.001), ("+1", 1.0), (".5\n\n", 0.5)],
)
def test_text_that_is_a_reward(tmp_path: Path, text: str, reward: float) -> None:
    assert reward_of(tmp_path, txt=text) == (reward, {})


@pytest.mark.parametrize(
    "text",
    ["", "\n", " ", "nan", "NaN", "inf", "-inf", "Infinity", "1e999", "1\n0\n", "1 0", "yes", "true", "0x1", "1_0"],
)  # fmt: skip
def test_text_that_is_no_reward(tmp_path: Path, text: str) -> None:
    with pytest.raises(NoVerdict, match=r"reward\.txt") as caught:
        reward_of(tmp_path, txt=text)
    assert caught.value.reason is Reason.REWARD_INVALID


@pytest.mark.parametrize(
    ("data", "reward", "others"),
    [
        (1, 1.0, {}),
        (0.25, 0.25, {}),
        ({"reward": 0}, 0.0, {}),
        ({"reward": 0.5, "style": 1, "speed": 0.1}, 0.5, {"style": 1.0, "speed": 0.1}),
        ({"reward": 1, "note": "text", "ok": True, "list": [1], "none": None, "nan": math.nan}, 1.0, {}),
    ],
)
def test_json_that_is_a_reward(tmp_path: Path, data: Any, reward: float, others: dict[str, float]) -> None:
    assert reward_of(tmp_path, json=json.dumps(data)) == (reward, others)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[1]", "{}", '{"Reward": 1}', "null", "true", '"yes"', "NaN", "-Infinity", "1e999",
        '{"reward": null}', '{"reward": true}', '{"reward": NaN}', '{"reward": "x"}', '{"reward": [1]}', "1 2",
        "[" * 60_000, '{"reward": 1' + "0" * 400 + "}",
    ],
)  # fmt: skip
def test_json_that_is_no_reward(tmp_path: Path, text: str) -> None:
    with pytest.raises(NoVerdict, match=r"reward\.json") as caught:
        reward_of(tmp_path, json=text, txt="1\n")
    assert caught.value.reason is Reason.REWARD_INVALID
    assert len(str(caught.value)) < 300


def test_a_huge_other_number_is_left_out(tmp_path: Path) -> None:
    assert reward_of(tmp_path, json='{"reward": 1, "huge": 1' + "0" * 400 + ', "n": 2}') == (1.0, {"n": 2.0})


def test_json_comes_before_text(tmp_path: Path) -> None:
    assert reward_of(tmp_path, json="0.5", txt="1") == (0.5, {})


def test_no_file_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(NoVerdict, match="no reward file") as caught:
        read_reward(tmp_path)
    assert caught.value.reason is Reason.REWARD_MISSING


@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
def test_only_a_regular_file_of_sane_size_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "target").write_text("1")
    path = tmp_path / name

    def check() -> None:
        with pytest.raises(NoVerdict, match=name):
            read_reward(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()

    path.symlink_to(tmp_path / "target")
    check()
    path.symlink_to("nowhere")
    check()
    path.mkdir()
    check()
    os.mkfifo(path)
    check()
    path.touch()
    os.truncate(path, 50 << 20)
    check()
    path.write_text("1" + " " * REWARD_FILE_MAX_BYTES)
    check()
    path.write_text("1" + " " * (REWARD_FILE_MAX_BYTES - 1))
    assert read_reward(tmp_path)[0] == 1.0


def test_a_fifo_with_a_writer_is_not_read_either(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reward.txt")
    holder = os.open(tmp_path / "reward.txt", os.O_RDWR)
    os.write(holder, b"1")
    done = threading.Event()

    def read() -> None:
        with pytest.raises(NoVerdict):
            read_reward(tmp_path)
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(5)
    os.close(holder)
    assert done.is_set()


NUMBERS = st.integers() | st.floats() | st.integers(min_value=10**300, max_value=10**320)
VALUES = st.recursive(NUMBERS | st.booleans() | st.none() | st.text(max_size=5), st.lists, max_leaves=3)
TEXTS = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(str.encode),
    NUMBERS.map(lambda number: str(number).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(["reward", "a", "b"]), VALUES).map(lambda value: json.dumps(value).encode()),
)


@given(json_text=st.none() | TEXTS, txt=st.none() | TEXTS)
def test_whatever_is_in_the_files_it_is_a_finite_number_or_no_verdict(
    json_text: bytes | None, txt: bytes | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("reward.json", json_text), ("reward.txt", txt)):
            if content is not None:
                Path(folder, name).write_bytes(content)
        with contextlib.suppress(NoVerdict):
            reward, others = read_reward(Path(folder))
            assert all(type(number) is float and math.isfinite(number) for number in (reward, *others.values()))
