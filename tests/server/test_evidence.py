"""The evidence of an evaluation (its tests, its verifier, what was alive), and evaluating more than once."""

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.server import Server, eventually
from support.talk import execute, http, metric, soon, wire
from support.tasks import OK_TEST, solution
from tbench2_env import Tbench2Action
from tbench2_env.server.evidence import FILE_MAX_BYTES, MESSAGE_MAX, NAME_MAX, TESTS_MAX, read_report

from .conftest import AddTask

SOLVE = "echo ok > out.txt"
WITHIN = "ls -A /tests /logs/verifier; find / -xdev -name ctrf.json -not -path '/proc/*'"
NOTHING = "/logs/verifier:\n\n/tests:\n"


def write_report(tests: list[Any], **summary: Any) -> str:
    """Lines of a test.sh that write a CTRF report."""
    report = {"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": tests}}
    return f"cat > /logs/verifier/ctrf.json <<'X'\n{json.dumps(report)}\nX\n"


# ---------------------------------------------------------------- info
async def test_the_tests_of_a_real_pytest(server: Server, tasks: Path) -> None:
    async with server.client() as env:
        await env.reset(task_id="csv-ledger")
        unsolved = (await env.evaluate(keep=True)).observation.info["tests"]
        assert unsolved["failed"] >= 1
        assert unsolved["total"] == len(unsolved["tests"]) == unsolved["passed"] + unsolved["failed"]
        failed = [test for test in unsolved["tests"] if test["status"] == "failed"]
        assert len(failed) == unsolved["failed"]
        assert all(test["name"] and 0 < len(test["message"]) <= MESSAGE_MAX for test in failed)
        assert (await env.exec(solution(tasks / "csv-ledger"))).success
        solved = (await env.evaluate()).observation.info["tests"]
        assert (solved["passed"], solved["failed"], solved["total"]) == (unsolved["total"], 0, unsolved["total"])
        assert all(isinstance(test["duration"], int) for test in solved["tests"])
        assert solved["truncated"] is False


async def test_how_the_verifier_went_and_what_was_alive(server: Server, add_task: AddTask) -> None:
    task = add_task("sleep 0.2; sleep 600 & echo 1 > /logs/verifier/reward.txt; exit 4")
    async with server.client() as env:
        await env.reset(task_id=task, episode_id="alive-1")
        assert (await env.evaluate(keep=True)).observation.info["verifier"]["alive"] == []
        begun = "until grep -qxF 'my serv)r' /proc/[0-9]*/comm && pgrep -x sleep; do :; done"
        await env.exec(f"(setsid sleep 500 &); cp /bin/sleep ./'my serv)r'; ./'my serv)r' 501 & {begun}")
        result = await env.evaluate()
        verifier = result.observation.info["verifier"]
        assert sorted(verifier.pop("alive")) == ["my serv)r", "sleep"], "the verifier's own is none of the agent's"
        seconds = verifier.pop("seconds")
        assert 0.2 <= seconds < 10
        assert verifier == {"exit_code": 4, "log": "verifier/test-stdout.txt"}
        assert (result.observation.info["exit_code"], result.observation.info["seconds"]) == (4, seconds)
        assert (server.runs / f"{task}.alive-1" / "verifier/test-stdout.txt").is_file()


async def test_few_names_of_many_processes(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("for i in $(seq 100); do sleep 600 & done; until [ $(pgrep -xc sleep) = 100 ]; do :; done")
        begun = time.monotonic()
        result = await env.evaluate()
        assert time.monotonic() - begun < 5
        assert result.observation.info["verifier"]["alive"] == ["sleep"] * 64


async def test_evidence_of_no_verdict(server: Server, add_task: AddTask) -> None:
    report = write_report([{"name": "t", "status": "failed", "duration": 1}])
    task = add_task(f"{report}echo said; exit 9")
    late = add_task(f"{report}echo said; sleep 60", toml="[verifier]\ntimeout_sec = 0.5\n")
    async with server.client() as env:
        for name, reason, code in ((task, "reward_missing", 9), (late, "verifier_timeout", 137)):
            await env.reset(task_id=name)
            result = await env.evaluate()
            info = result.observation.info
            assert (result.reward, info["no_verdict"], info["verifier"]["exit_code"]) == (None, reason, code)
            assert (info["tests"]["failed"], result.observation.output) == (1, "said\n")
            assert "harness" not in info


async def test_a_report_under_another_name(server: Server, add_task: AddTask) -> None:
    text = write_report([{"name": "t", "status": "passed"}]).replace("ctrf.json", "report.json")
    task = add_task(f": --ctrf /logs/verifier/report.json\n{text}echo 0 > /logs/verifier/reward.txt")
    async with server.client() as env:
        await env.reset(task_id=task)
        result = await env.evaluate()
        assert (result.reward, result.observation.info["tests"]["passed"]) == (0.0, 1)


@pytest.mark.parametrize(
    "write",
    [
        "ln -s /etc/passwd /logs/verifier/ctrf.json",
        "mkfifo /logs/verifier/ctrf.json",
        "mkdir /logs/verifier/ctrf.json",
        f"truncate -s {FILE_MAX_BYTES + 1} /logs/verifier/ctrf.json",
        f"head -c {FILE_MAX_BYTES} /dev/zero | tr '\\0' '[' > /logs/verifier/ctrf.json",
        "echo nonsense > /logs/verifier/ctrf.json",
        ": > /logs/verifier/ctrf.json",
        "chmod 000 /logs/verifier; true",
        "mkdir /logs/verifier/test-stdout.txt /logs/verifier/reward.json.new",
    ],
)
async def test_a_hostile_report_costs_no_verdict(server: Server, add_task: AddTask, write: str) -> None:
    task = add_task(f"echo 1 > /logs/verifier/reward.txt; {write}")
    async with server.client() as env:
        await env.reset(task_id=task, episode_id="hostile")
        begun = time.monotonic()
        result = await env.evaluate(keep=True)
        assert time.monotonic() - begun < 10
        assert (result.reward, result.observation.error) == (1.0, "")
        assert "tests" not in result.observation.info
        kept = sorted(path.name for path in next(server.runs.glob(f"{task}.*")).glob("verifier/*"))
        assert set(kept) <= {"test-stdout.txt", "reward.txt", "ctrf.json"}
        assert (await env.exec("echo usable")).output == "usable\n"


async def test_strange_text_is_answered_on_both_protocols(server: Server, add_task: AddTask) -> None:
    report = r'{"results": {"tests": [{"name": "\ud800\u0000\u001b[2J", "status": "failed", "message": "\udfff"}]}}'
    reward = r'{"reward": 0, "\ud800": 2, "big": 1e308}'
    task = add_task(
        f"printf '\\x1b[31mred\\xff\\0\\n'\ncat > /logs/verifier/ctrf.json <<'X'\n{report}\nX\n"
        f"cat > /logs/verifier/reward.json <<'X'\n{reward}\nX\n"
    )
    async with server.client() as env:
        await env.reset(task_id=task, episode_id="strange")
        over_ws = (await env.evaluate()).observation
        with http(server) as client:
            response = client.post("/episodes/strange/evaluate")
            over_http = response.json()
        for info in (over_ws.info, over_http["info"]):
            assert info["tests"]["tests"][0]["message"] == "?"
            assert sorted(info["rewards"].values()) == [2, 1e308]
        assert over_ws.output == over_http["output"] == "red\ufffd\0\n"


# ---------------------------------------------------------------- more than once
async def test_keep_only_changes_done(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        for keep in (True, False, True):
            result = await env.evaluate(keep=keep)
            assert (result.reward, result.done, result.observation.success) == (0.0, not keep, True)
            assert (await env.exec(WITHIN)).output == NOTHING
        await env.exec(SOLVE)
        kept = await env.step(Tbench2Action(action_type="evaluate", metadata={"keep": True, "note": 1}))
        assert (kept.reward, kept.done) == (1.0, False)
        assert ((last := await env.evaluate()).reward, last.done) == (1.0, True)
        assert (await env.exec("cat out.txt")).output == "ok\n", "the episode goes on in any case"
        for wrong in ("true", 1, None, [True]):
            refused = await env.step(Tbench2Action(action_type="evaluate", metadata={"keep": wrong}))
            assert (refused.reward, refused.observation.success) == (None, False)
            assert "metadata.keep" in refused.observation.error
        other = await env.step(Tbench2Action(command="echo on", metadata={"keep": "mine"}))
        assert other.observation.output == "on\n", "metadata of other actions is the caller's"


def test_keep_over_http(server: Server) -> None:
    with http(server) as client:
        episode = f"/episodes/{client.post('/episodes', json={'task_id': 'ok'}).json()['episode_id']}"
        assert client.post(f"{episode}/evaluate?keep=1").json()["done"] is False
        execute(client, episode, SOLVE)
        kept = client.post(f"{episode}/evaluate?keep=1").json()
        assert (kept["reward"], kept["done"]) == (1.0, False)
        assert client.post(f"{episode}/evaluate?keep=0").json()["done"] is True
        assert client.post(f"{episode}/evaluate").json()["done"] is True
        assert client.post(f"{episode}/evaluate?keep=yes").status_code == 422
        client.delete(episode)


#: Ends of a first evaluation, each by what the agent left in `how`.
ENDS = {
    "unsolved": ("echo 0 > /logs/verifier/reward.txt; exit", 0.0),
    "no reward": ("exit 3", "reward_missing"),
    "a broken reward": ("echo nan > /logs/verifier/reward.txt; exit", "reward_invalid"),
    "out of time": ("echo 1 > /logs/verifier/reward.txt; sleep 60", "verifier_timeout"),
    "the harness broken": ("uvx pytest; echo 0 > /logs/verifier/reward.txt; exit # uvx", "harness_broken"),
    "killed": ("kill -9 $$", "reward_missing"),
    "a mess": (
        "rm -rf /tests/*; umount /tests; mount -t tmpfs x /tests; echo 0 > /logs/verifier/reward.txt; exit",
        0.0,
    ),
}


@pytest.mark.parametrize(("end", "expected"), ENDS.values(), ids=ENDS.keys())
async def test_whatever_ends_an_evaluation_the_next_one_is_pristine(
    server: Server, add_task: AddTask, end: str, expected: float | str
) -> None:
    test = f"""sha256sum < /tests/test.sh; ls -A /tests /logs/verifier
    if [ ! -e again ]; then touch /logs/verifier/left
    {end}
    fi
    """
    task = add_task(test + OK_TEST, toml="[verifier]\ntimeout_sec = 1.5\n")
    async with server.client() as env:
        await env.reset(task_id=task)
        outputs = []
        for again in (False, True):
            result = await env.evaluate(keep=True)
            outputs.append(result.observation.output.splitlines()[:6])
            if not again:
                assert (result.observation.info.get("no_verdict") or result.reward) == expected
            assert (await env.exec(WITHIN)).output == NOTHING
            await env.exec(f"{SOLVE}; touch again")
        assert (result.reward, result.done) == (1.0, False)
        assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- what is recorded of an evaluation that ended early
SLOW = "touch /app/begun; until [ -e /app/go ]; do sleep 0.02; done\n" + OK_TEST


async def begun(server: Server, episode_id: str) -> None:
    with http(server) as client:
        await soon(lambda: client.get(f"/episodes/{episode_id}/files?path=/app/begun").status_code == 200, 5)


def last_result(server: Server, task: str, episode_id: str) -> dict[str, Any]:
    folder = server.runs / f"{task}.{episode_id}"
    eventually((folder / "result.json").exists, 5)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


async def test_a_client_that_goes_away_cancels_its_evaluation(server: Server, add_task: AddTask) -> None:
    task = add_task(SLOW)
    before = metric(server, "tbench2_verdicts_total", outcome="cancelled")
    async with wire(server) as session:
        await session.reset(task, episode_id="gone-1")
        await session.step(command="touch go")
        assert (await session.step(action_type="evaluate"))["reward"] == 0.0
        await session.step(command="rm go begun")
        await session.tell("step", {"action_type": "evaluate"})
        await begun(server, "gone-1")
        session.drop()
    result = await asyncio.to_thread(last_result, server, task, "gone-1")
    assert (result["reward"], result["no_verdict"], result["end"]) == (None, "cancelled", "disconnected")
    assert result["error"].startswith("no verdict: ")
    assert metric(server, "tbench2_verdicts_total", outcome="cancelled") == before + 1
    assert not list((server.runs / f"{task}.gone-1" / "verifier").iterdir()), "the one before's evidence is gone, too"


async def test_an_http_client_that_hangs_up_leaves_the_episode_usable(server: Server, add_task: AddTask) -> None:
    task = add_task(SLOW)
    with http(server) as client:
        client.post("/episodes", json={"task_id": task, "episode_id": "gone-2"})
        evaluating = asyncio.create_task(_evaluate_and_hang_up(server, "gone-2"))
        await begun(server, "gone-2")
        evaluating.cancel()
        await soon(lambda: not client.get("/episodes/gone-2").json()["busy"], 5)
        verdict = client.get("/episodes/gone-2/verdict").json()
        assert (verdict["reward"], verdict["info"]) == (None, {"no_verdict": "cancelled", "tampered": []})
        assert execute(client, "/episodes/gone-2", WITHIN)["output"] == NOTHING
        execute(client, "/episodes/gone-2", f"touch go; {SOLVE}")
        assert client.post("/episodes/gone-2/evaluate").json()["reward"] == 1.0
        client.delete("/episodes/gone-2")
    assert (await asyncio.to_thread(last_result, server, task, "gone-2"))["reward"] == 1.0


async def _evaluate_and_hang_up(server: Server, episode_id: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(f"POST /episodes/{episode_id}/evaluate HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(("how", "reason"), [("delete", "cancelled"), ("die", "sandbox_dead")])
async def test_an_end_in_mid_evaluate(server: Server, add_task: AddTask, how: str, reason: str) -> None:
    task = add_task(SLOW)
    before = metric(server, "tbench2_verdicts_total", outcome=reason)
    async with wire(server) as session:
        await session.reset(task, episode_id=how)
        await session.tell("step", {"action_type": "evaluate"})
        await begun(server, how)
        with http(server) as client:
            if how == "delete":
                client.delete(f"/episodes/{how}")
            else:
                # The root of the episode's process tree, as its verifier sees it, takes everything along.
                pids = [pid for pid, line in server.descendants().items() if "until [" in line or "test.sh" in line]
                assert pids
                _kill_init_of(pids[0])
        answer = (await session.hear())["data"]["observation"]
        assert (answer["success"], answer["info"]) == (False, {"no_verdict": reason})
    result = await asyncio.to_thread(last_result, server, task, how)
    assert (result["reward"], result["no_verdict"]) == (None, reason)
    assert metric(server, "tbench2_verdicts_total", outcome=reason) == before + 1


def _kill_init_of(pid: int) -> None:
    """Kill PID 1 of the PID namespace that process `pid` lives in."""
    namespace = Path(f"/proc/{pid}/ns/pid").readlink()
    for other in Path("/proc").iterdir():
        if other.name.isdigit() and _is_init(other, namespace):
            os.kill(int(other.name), signal.SIGKILL)


def _is_init(process: Path, namespace: Path) -> bool:
    try:
        numbers = [line for line in (process / "status").read_text().splitlines() if line.startswith("NSpid:")]
        return (process / "ns/pid").readlink() == namespace and numbers[0].split()[-1] == "1"
    except OSError:
        return False


# ---------------------------------------------------------------- reports
def report_of(folder: Path, text: str | bytes) -> dict[str, Any] | None:
    path = folder / "ctrf.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_report(path)


def test_what_is_read_of_a_report(tmp_path: Path) -> None:
    tests = [
        {"name": "a", "status": "passed", "duration": 12, "more": 1},
        {"name": "b", "status": "failed", "duration": 0.5, "message": "m" * 600, "trace": "t"},
        {"name": "c" * 400, "status": "skipped", "trace": "because"},
    ]
    summary = {"tests": 3, "passed": 1, "failed": 1, "skipped": 1, "pending": 0, "other": 0, "start": 1, "stop": 2}
    assert report_of(tmp_path, json.dumps({"results": {"summary": summary, "tests": tests}})) == {
        "total": 3, "passed": 1, "failed": 1, "skipped": 1, "truncated": False,
        "tests": [
            {"name": "a", "status": "passed", "duration": 12, "message": ""},
            {"name": "b", "status": "failed", "duration": 0.5, "message": "m" * MESSAGE_MAX},
            {"name": "c" * NAME_MAX, "status": "skipped", "duration": None, "message": "because"},
        ],
    }  # fmt: skip


def test_counts_are_those_of_the_summary_or_else_counted(tmp_path: Path) -> None:
    tests = [{"status": status} for status in ("passed", "passed", "failed", "weird", None, ["passed"])]
    wrong = {"tests": "6", "passed": -1, "failed": True, "skipped": 1e3}
    summaries: tuple[Any, ...] = ({}, wrong, None, [], "x")
    for summary in summaries:
        found = report_of(tmp_path, json.dumps({"results": {"summary": summary, "tests": tests}}))
        assert found is not None
        assert [found[key] for key in ("total", "passed", "failed", "skipped")] == [6, 2, 1, 0]
        assert [test["status"] for test in found["tests"]] == ["passed", "passed", "failed", "other", "other", "other"]
    found = report_of(tmp_path, '{"results": {"summary": {"tests": 7, "passed": 5}}}')
    assert found is not None
    assert (found["total"], found["passed"], found["failed"], found["tests"]) == (7, 5, 0, [])


def test_many_tests_are_cut(tmp_path: Path) -> None:
    tests = [{"name": str(number), "status": "passed"} for number in range(5000)]
    found = report_of(tmp_path, json.dumps({"results": {"tests": tests}}))
    assert found is not None
    assert (found["total"], found["passed"], found["truncated"]) == (5000, 5000, True)
    assert [test["name"] for test in found["tests"]] == [str(number) for number in range(TESTS_MAX)]


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "7", '"x"', "{", "{}", '{"results": null}', '{"results": []}', '{"results": {}}',
        '{"results": {"tests": {}, "summary": []}}', '{"results": {"tests": [1, null, "x", []]}}',
        "[" * 100_000, '{"a":' * 100_000, "1" * 100_000, b"\xff\xfe\xff", '{"results": {"tests": [{"name":',
    ],
    ids=range(17),
)  # fmt: skip
def test_what_is_no_report(tmp_path: Path, text: str | bytes) -> None:
    assert report_of(tmp_path, text) is None


def test_there_is_no_report(tmp_path: Path) -> None:
    assert read_report(tmp_path / "ctrf.json") is None
    assert read_report(tmp_path) is None


def test_numbers_that_json_cannot_say_back(tmp_path: Path) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "-5", "1" * 4000, "true", '"1"', "[]"):
        found = report_of(tmp_path, f'{{"results": {{"tests": [{{"duration": {value}}}]}}}}')
        assert found is not None
        assert found["tests"][0]["duration"] is None, value


@pytest.mark.parametrize("piece", ["[],", "{},", "1.5,", '"ab",', "[", '{"":'])
def test_a_report_takes_little_memory_and_time(tmp_path: Path, piece: str) -> None:
    path = tmp_path / "ctrf.json"
    path.write_text(f'{{"results": {{"tests": [{piece * (FILE_MAX_BYTES // len(piece))}1]}}}}')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun_at = time.monotonic()
    assert read_report(path) is None
    assert time.monotonic() - begun_at < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["name", "status", "message"]) | st.text(), inner),
    max_leaves=10,
)
_REPORTS = st.fixed_dictionaries(
    {"results": st.fixed_dictionaries({}, optional={"tests": st.lists(_JSON) | _JSON, "summary": _JSON}) | _JSON}
)


@given(_REPORTS | _JSON)
def test_any_json_is_read_or_left(tmp_path_factory: pytest.TempPathFactory, report: Any) -> None:
    found = report_of(tmp_path_factory.getbasetemp(), json.dumps(report))
    json.dumps(found, allow_nan=False).encode()
    assert found is None or sys.getsizeof(found["tests"]) < 1 << 20


async def test_the_agent_never_sees_the_evidence(server: Server, add_task: AddTask) -> None:
    report = write_report([{"name": "EXPECTEDKEY", "status": "failed", "message": "EXPECTEDKEY"}])
    task = add_task(f"echo EXPECTEDKEY\n{report}echo 0 > /logs/verifier/reward.txt")
    look = "grep -rlsI 'EXPECTED''KEY' /app /tests /logs /tmp /root /run /home /srv /mnt /var/log /etc /dev/shm"
    async with server.client() as env:
        await env.reset(task_id=task)
        result = await env.evaluate(keep=True)
        assert result.observation.info["tests"]["tests"][0]["name"] == "EXPECTEDKEY"
        assert (await env.exec(look)).output == ""
        assert (await env.exec(WITHIN)).output == NOTHING
