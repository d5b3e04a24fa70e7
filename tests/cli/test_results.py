"""The oracle's file."""

from pathlib import Path

import pytest

from tbench2_env.server.cli.results import Result, Results, ResultsError


def test_what_was_put_is_there_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = Result(reward=0.5, final=True, seconds={"reset": 1.5}, tests={"total": 1}, unmet=["x"])
    Results.open(path, solved=True).put("b", first)
    Results.open(path, solved=True).put("a", Result(reason="reset_failed", error="e"))
    again = Results.open(path, solved=True)
    assert again.get("b") == first
    assert again.get("a") == Result(reason="reset_failed", error="e")
    assert again.get("c") is None
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results.open(path, solved=True)
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        results.put("a", Result())
    assert list(tmp_path.rglob("*")) == [path]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}', '{"solved": true, "results": {"a": 1}}'])
def test_another_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match=r"r\.json: not written by tbench2 oracle; name another file"):
        Results.open(path, solved=True)
    assert path.read_text() == content


def test_runs_with_and_without_solutions_do_not_mix(tmp_path: Path) -> None:
    Results.open(tmp_path / "r.json", solved=True).put("a", Result())
    with pytest.raises(ResultsError, match="of a run with solutions"):
        Results.open(tmp_path / "r.json", solved=False)
