"""Results on disk."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from support.server import MakeServer, Server, eventually
from tbench2_env import BadRequest, Tbench2Action
from tbench2_env.server.runs import Runs


async def finished(folder: Path) -> None:
    await asyncio.to_thread(eventually, (folder / "result.json").exists, 5, lambda: str(list(folder.parent.iterdir())))


async def test_an_episode_leaves_its_commands_its_evidence_and_its_result(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok", episode_id="run-1")
        await env.exec("echo ok > out.txt; echo hi; exit 3")
        await env.write_file("a.txt", "text")
        await env.exec("x" * 5000)
        await env.evaluate()
    folder = server.runs / "ok.run-1"
    await finished(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "commands.jsonl", "result.json", "verdict.json", "verifier",
    ]  # fmt: skip
    first, second, third, fourth = map(json.loads, (folder / "commands.jsonl").read_text().splitlines())
    assert first["command"] == "echo ok > out.txt; echo hi; exit 3"
    assert (first["action_type"], first["exit_code"], first["output_head"], first["success"]) == (
        "exec",
        3,
        "hi\n",
        True,
    )
    assert (second["action_type"], second["command"]) == ("write_file", "a.txt")
    assert len(third["command"]) == len(third["output_head"]) == 2000
    assert (fourth["action_type"], fourth["reward"]) == ("evaluate", 1.0)
    assert first["begun"] <= second["begun"] <= fourth["begun"]
    result = json.loads((folder / "result.json").read_text())
    assert (result["task_id"], result["episode_id"], result["reward"], result["steps"]) == ("ok", "run-1", 1.0, 4)
    assert result["evaluation"]["harness"] == "tests/test.sh"


async def test_an_episode_without_a_verdict_says_so(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok", episode_id="run-2")
        await env.step(Tbench2Action(action_type="close"))
    folder = server.runs / "ok.run-2"
    await finished(folder)
    assert json.loads((folder / "result.json").read_text())["reward"] is None
    assert json.loads((folder / "commands.jsonl").read_text())["action_type"] == "close"


async def test_the_same_episode_id_twice_at_once_makes_two_episodes(server: Server) -> None:
    """They are told apart over HTTP, so the second one gets a number."""
    async with server.client() as a, server.client() as b:
        states = []
        for env, text, name in ((a, "one", "same"), (b, "two", "same.2")):
            reset = await env.reset(task_id="ok", episode_id="same")
            assert reset.observation.metadata["episode_id"] == name
            await env.exec(f"echo {text} > f")
            states.append((await env.state()).episode_id)
        assert (await a.exec("cat f")).output == "one\n"
        assert states == ["same", "same.2"]
    for name, text in (("ok.same", "one"), ("ok.same.2", "two")):
        await finished(server.runs / name)
        assert text in (server.runs / name / "commands.jsonl").read_text()


@pytest.mark.parametrize("episode_id", ["../x", "a/b", "", ".", "-x", "a\0", "x" * 129, "a b", "é"])
async def test_an_episode_id_is_part_of_a_folders_name(server: Server, episode_id: str) -> None:
    async with server.client() as env:
        with pytest.raises(BadRequest, match="episode_id"):
            await env.reset(task_id="ok", episode_id=episode_id)


async def test_old_runs_go_and_live_ones_stay(make_server: MakeServer) -> None:
    server = make_server({"TB2_KEEP_RUNS": "2"})
    (server.runs / "repo_cache").mkdir()
    (server.runs / "notes.txt").touch()
    async with server.client() as live:
        await live.reset(task_id="ok", episode_id="live")
        for number in range(5):
            async with server.client() as env:
                await env.reset(task_id="ok", episode_id=f"e{number}")
            await finished(server.runs / f"ok.e{number}")
        expected = {"ok.live", "ok.e3", "ok.e4", "repo_cache", "notes.txt"}
        await asyncio.to_thread(
            eventually, lambda: {path.name for path in server.runs.iterdir()} == expected, 3,
            lambda: str(sorted(server.runs.iterdir())),
        )  # fmt: skip
        assert (await live.exec("echo on")).output == "on\n"
        assert "echo on" in (server.runs / "ok.live" / "commands.jsonl").read_text()


async def test_miles_clean_up_hurts_nobody(server: Server) -> None:
    clean = "find /tmp/tbench2_env_runs -mindepth 1 -maxdepth 1 ! -name repo_cache -exec rm -rf {} +"
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok", episode_id="bystander")
        assert (await a.exec(clean)).success
        assert (server.runs / "ok.bystander").is_dir()


# ---------------------------------------------------------------- units
def test_the_oldest_go_first(tmp_path: Path) -> None:
    runs = Runs(tmp_path, keep=1)
    first, second, live = (runs.begin("t", name) for name in ("first", "second", "live"))
    for age, run in enumerate((live, second, first)):  # first is the oldest, live older than second
        os.utime(run.folder / "commands.jsonl", (1000 - age, 1000 - age))
    runs.end(second, None)
    runs.end(first, None)
    runs.close()
    assert {path.name for path in tmp_path.iterdir()} == {"t.second", "t.live"}


def test_keeping_none(tmp_path: Path) -> None:
    runs = Runs(tmp_path, keep=0)
    (tmp_path / "other").mkdir()
    run = runs.begin("t", "x")
    run.record({"command": "x"})
    runs.end(run, None)
    runs.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_folder_that_is_gone_costs_the_line_only(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "out", keep=1)
    run = runs.begin("t", "x")
    (run.folder / "commands.jsonl").unlink()
    run.folder.rmdir()
    run.record({"command": "x"})
    runs.end(run, {"reward": 1.0})
    runs.close()
    assert not run.folder.exists()


def test_a_damaged_result_is_nobodys(tmp_path: Path) -> None:
    runs = Runs(tmp_path, keep=1)
    run = runs.begin("t", "x")
    runs.end(run, {"episode_id": "x"})
    runs.close()
    assert runs.find("x") == run.folder
    (run.folder / "result.json").write_text("[]")
    assert runs.find("x") is None


def test_any_text_can_be_recorded(tmp_path: Path) -> None:
    run = Runs(tmp_path, keep=1).begin("t", "x")
    run.record({"command": "a\nb\ud800\0é", "n": 1})
    (line,) = (run.folder / "commands.jsonl").read_text().splitlines()
    assert json.loads(line) == {"command": "a\nb\ud800\0é", "n": 1}
