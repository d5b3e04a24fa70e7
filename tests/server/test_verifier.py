"""Evaluation over the server: what the harness gets, what counts as a verdict, and what an agent cannot do about it."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from support.server import Server, eventually, free_port
from support.tasks import OK_TEST, solution
from tbench2_env import Tbench2Env
from tbench2_env.models import StepResult, Tbench2Observation
from tbench2_env.server.verifier import HARNESS, OUTPUT_TAIL

from .conftest import AddTask

SOLVE = "echo ok > out.txt"
#: A verifier that waits for something does so until its limit, 30 s.
HANG_S = 10


async def graded(env: Tbench2Env, task: str, *commands: str) -> StepResult[Tbench2Observation]:
    await env.reset(task_id=task)
    for command in commands:
        assert (await env.exec(command)).success
    return await env.evaluate()


def assert_verdict(result: StepResult[Tbench2Observation], reward: float) -> None:
    """What Miles takes a sample for."""
    assert (result.reward, result.observation.error) == (reward, "")
    assert result.observation.info["harness"] == HARNESS
    assert result.observation.info["tests_passed"] is (reward == 1.0)
    assert result.done
    assert result.observation.success


def assert_no_verdict(result: StepResult[Tbench2Observation], reason: str, *words: str) -> None:
    observation = result.observation
    assert result.reward is None
    assert (observation.success, result.done) == (False, False)
    assert observation.info["no_verdict"] == reason
    assert "harness" not in observation.info
    assert observation.error.startswith("no verdict: ")
    for word in words:
        assert word in observation.error


# ---------------------------------------------------------------- the harness
async def test_solved_and_unsolved(server: Server) -> None:
    async with server.client() as env:
        assert_verdict(await graded(env, "ok", SOLVE), 1.0)
        assert_verdict(await graded(env, "ok"), 0.0)
        assert_verdict(await graded(env, "ok", "echo no > out.txt"), 0.0)


async def test_the_harness_sees_its_tests_its_folder_and_its_environment(server: Server, add_task: AddTask) -> None:
    test = """pwd; echo "args=$#"; echo "$0"; ls -A /logs/verifier | wc -l; ls -A /tests; id -un
    stat -c %a /logs/verifier; cat; echo "[$MODEL|$GREETING|$HOME]"; ls /proc/self/fd | xargs
    grep SigIgn /proc/self/status | cut -f2; grep -c zzzSECRET /proc/self/environ
    echo 1 > /logs/verifier/reward.txt"""
    task = add_task(
        test,
        dockerfile="FROM debian\nENV GREETING=hello MODEL=no\nWORKDIR /srv/work\n",
        toml='[verifier]\ntimeout_sec = 30\n[verifier.env]\nMODEL = "m 1"\n',
        files={"tests/data/x.bin": b"\0\xff"},
    )
    async with server.client() as env:
        result = await graded(env, task)
        assert_verdict(result, 1.0)
        assert result.observation.output.splitlines() == [
            "/srv/work", "args=0", "/tests/test.sh", "0", "data", "test.sh", "test_outputs.py", "root",
            "755", "[m 1|hello|/root]", "0 1 2 3", "0" * 16, "0",  # 3 is ls's own
        ]  # fmt: skip


async def test_the_harness_has_no_handle_on_other_episodes(server: Server, add_task: AddTask) -> None:
    task = add_task(
        """ls /proc/self/fd | xargs; ls -d /proc/self/fd/*/[0-9]*
        cat /proc/[0-9]*/cmdline /proc/self/fd/*/[0-9]*/cmdline | tr '\\0' ' '; echo 1 > /logs/verifier/reward.txt"""
    )
    async with server.client() as a, server.client() as b, server.client() as c:
        for other in (a, b):
            await other.reset(task_id=task)
            await other.exec("sleep 777 & true")
        output = (await graded(c, task)).observation.output
        assert output.startswith("0 1 2 3\n")
        assert "777" not in output
        assert re.search(r"^/proc/self/fd", output, re.MULTILINE) is None


async def test_the_tests_are_pristine_and_the_logs_empty_every_time(server: Server, add_task: AddTask) -> None:
    test = """ls -A /logs/verifier | wc -l; sha256sum < /tests/test.sh
    rm -rf /tests/* 2>/dev/null; echo changed > /tests/test.sh; touch /logs/verifier/left; mkdir /logs/verifier/d
    mount -o remount,rw /tests; echo changed > /tests/test.sh; umount /tests; umount /logs/verifier
    echo 1 > /logs/verifier/reward.txt"""
    task = add_task(test)
    async with server.client() as a, server.client() as b:
        outputs = [(await graded(a, task)).observation.output.splitlines()[:2]]
        outputs += [(await a.evaluate()).observation.output.splitlines()[:2]]
        outputs += [(await graded(b, task)).observation.output.splitlines()[:2]]
        assert outputs[0] == outputs[1] == outputs[2]
        assert outputs[0][0] == "0"
        assert (await a.evaluate()).reward == 1.0


async def test_evaluating_twice_and_going_on(server: Server) -> None:
    async with server.client() as env:
        assert_verdict(await graded(env, "ok"), 0.0)
        assert (await env.exec("ls -A /tests /logs/verifier; echo on")).output == "/logs/verifier:\n\n/tests:\non\n"
        assert (await env.exec(SOLVE)).success
        assert_verdict(await env.evaluate(), 1.0)
        assert (await env.exec("cat out.txt")).output == "ok\n"


async def test_files_that_the_harness_makes_in_the_work_folder_stay(server: Server, add_task: AddTask) -> None:
    task = add_task("echo seen > mark; echo 1 > /logs/verifier/reward.txt")
    async with server.client() as env:
        await graded(env, task)
        assert (await env.exec("cat mark")).output == "seen\n"


async def test_the_output_is_the_tail(server: Server, add_task: AddTask) -> None:
    task = add_task("seq 1 20000; echo é漢 LAST; echo 1 > /logs/verifier/reward.txt")
    async with server.client() as env:
        result = await graded(env, task)
        assert_verdict(result, 1.0)
        assert len(result.observation.output) == OUTPUT_TAIL
        assert result.observation.output.endswith("\n20000\né漢 LAST\n")


async def test_a_harness_that_fails_after_its_reward_still_gave_it(server: Server, add_task: AddTask) -> None:
    task = add_task("echo 0.75 > /logs/verifier/reward.txt; exit 7")
    async with server.client() as env:
        result = await graded(env, task)
        assert_verdict(result, 0.75)
        assert result.observation.info["exit_code"] == 7


async def test_reward_json_gives_several_rewards(server: Server, add_task: AddTask) -> None:
    task = add_task(
        """echo '{"reward": 0.5, "style": 1, "note": "x"}' > /logs/verifier/reward.json
        echo 1 > /logs/verifier/reward.txt"""
    )
    async with server.client() as env:
        result = await graded(env, task)
        assert_verdict(result, 0.5)
        assert result.observation.info["rewards"] == {"style": 1.0}


async def test_without_test_sh_pytest_decides(server: Server, add_task: AddTask) -> None:
    kit = "import os\ndef test_it():\n    assert os.path.exists('out.txt')\n"
    # A pytest of the task's own, so that the node need not have one.
    fake = 'import subprocess, sys, os\nsys.exit(subprocess.run([sys.executable, "/tests/test_outputs.py"]).returncode)'
    task = add_task(
        None,
        files={
            "tests/test_outputs.py": kit + "import sys; sys.exit(0 if os.path.exists('out.txt') else 1)\n",
            "environment/pytest.py": fake,
        },
        dockerfile="FROM debian\nWORKDIR /app\nCOPY pytest.py /opt/kit/pytest.py\nENV PYTHONPATH=/opt/kit\n",
    )
    async with server.client() as env:
        for commands, reward, code in (((), 0.0, 1), (("touch out.txt",), 1.0, 0)):
            result = await graded(env, task, *commands)
            assert (result.reward, result.done, result.observation.error) == (reward, True, "")
            assert result.observation.info["exit_code"] == code
            assert "harness" not in result.observation.info
        broken = await graded(env, task, "echo 'import sys; sys.exit(5)' > /opt/kit/pytest.py")
        assert_no_verdict(broken, "harness_broken", "pytest")


# ---------------------------------------------------------------- 11, 12: no verdict is never zero
@pytest.mark.parametrize(
    ("test", "reason", "word"),
    [
        ("exit 0", "reward_missing", "reward"),
        ("exit 1", "reward_missing", "exit code 1"),
        ("kill -9 $$", "reward_missing", "exit code 137"),
        ("if", "reward_missing", "exit code"),
        (": > /logs/verifier/reward.txt", "reward_invalid", "reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "reward_invalid", "nan"),
        ("printf '1\\n0\\n' > /logs/verifier/reward.txt", "reward_invalid", "reward.txt"),
        ("echo pass > /logs/verifier/reward.txt", "reward_invalid", "pass"),
        ("head -c 52428800 /dev/zero > /logs/verifier/reward.txt", "reward_invalid", "52428800"),
        ("truncate -s 5G /logs/verifier/reward.txt", "reward_invalid", "bytes"),
        ("mkdir /logs/verifier/reward.txt", "reward_invalid", "regular"),
        ("mkfifo /logs/verifier/reward.txt", "reward_invalid", "regular"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "reward_invalid", "link"),
        ("echo '{' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "reward_invalid", "JSON"),
    ],
)
async def test_no_verdict(server: Server, add_task: AddTask, test: str, reason: str, word: str) -> None:
    async with server.client() as env:
        task = add_task("echo from the harness\n" + test)
        result = await graded(env, task, SOLVE)
        assert_no_verdict(result, reason, word)
        assert len(result.observation.error) < 400
        assert "from the harness" in result.observation.output or test == "if"
        assert (await env.exec("echo usable")).output == "usable\n"


async def test_a_task_without_tests_has_no_verdict(server: Server, add_task: AddTask) -> None:
    task = add_task(None)
    async with server.client() as env:
        assert_no_verdict(await graded(env, task, SOLVE, "mkdir tests"), "tests_missing", "tests/")


# ---------------------------------------------------------------- 13: the verifier's time
async def test_a_verifier_out_of_time_gives_no_verdict_and_leaves_nothing(server: Server, add_task: AddTask) -> None:
    task = add_task(
        "echo so far; (sleep 3; touch /app/late)& (setsid sleep 601 &); echo 1 > /logs/verifier/reward.txt; sleep 60",
        toml="[verifier]\ntimeout_sec = 2.0\n",
    )
    async with server.client() as env:
        reset = await env.reset(task_id=task)
        assert reset.observation.info["verifier_timeout_sec"] == 2
        await env.exec("sleep 602 & true")
        begun = time.monotonic()
        result = await env.evaluate()
        assert time.monotonic() - begun < 4
        assert_no_verdict(result, "verifier_timeout", "timed out after 2 s")
        assert result.observation.output == "so far\n"
        assert (await env.exec("pgrep -a -r S sleep | cut -d' ' -f2-")).output == "sleep 602\n", (
            "only the agent's own is left"
        )
        await asyncio.sleep(max(0, 3.3 - (time.monotonic() - begun)))
        assert (await env.exec("ls -A")).output == ""
        assert_verdict(await graded(env, "ok", SOLVE), 1.0)


async def test_what_a_verifier_leaves_running_is_killed_when_it_ends(server: Server, add_task: AddTask) -> None:
    task = add_task("setsid sleep 603 & (setsid nohup sleep 604 &) ; echo 1 > /logs/verifier/reward.txt")
    async with server.client() as env:
        begun = time.monotonic()
        assert_verdict(await graded(env, task, "sleep 605 & true"), 1.0)
        assert time.monotonic() - begun < HANG_S
        until_one = "for i in $(seq 100); do [ $(pgrep -c sleep) = 1 ] && break; sleep 0.02; done"
        assert (await env.exec(f"{until_one}; pgrep -a sleep | cut -d' ' -f2-")).output == "sleep 605\n"


# ---------------------------------------------------------------- 14: services
async def test_services_live_until_the_grade(server: Server, add_task: AddTask) -> None:
    ports = [free_port() for _ in range(2)]
    fetch = " && ".join(f"curl -sf --retry 20 --retry-connrefused --retry-delay 1 127.0.0.1:{port}" for port in ports)
    task = add_task(
        f"{fetch} && pgrep -f http.server && r=1 || r=0; echo $r > /logs/verifier/reward.txt",
    )
    async with server.client() as env:
        await env.reset(task_id=task)
        await env.exec(f"nohup python3 -m http.server {ports[0]} --bind 127.0.0.1 >/dev/null 2>&1 &")
        await env.exec(f"exec python3 -m http.server {ports[1]} --bind 127.0.0.1", session_id="web", block=False)
        assert_verdict(await env.evaluate(), 1.0)
        assert (await env.exec(f"curl -sf 127.0.0.1:{ports[0]} >/dev/null; echo rc=$?")).output == "rc=0\n", (
            "it lives on"
        )


# ---------------------------------------------------------------- 8, 10: forgery
#: Attaches to whatever comes (PTRACE_ATTACH is 16), which would stop a verifier until its time is out.
TRACER = """
import ctypes, os
while True:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) > os.getpid():
            ctypes.CDLL(None).ptrace(16, int(pid), 0, 0)
"""
CHEAT = "echo 'echo 1 > /logs/verifier/reward.txt; exit'"
PLANTS = {
    "reward files": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
    "logs replaced": "rm -rf /logs; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
    "logs moved": "mv /logs /l2; mkdir -p /logs/verifier; ln -s /etc /logs/verifier/x; umount -l /logs/verifier",
    "logs linked": "rmdir /logs/verifier; ln -s /etc /logs/verifier",
    "tests linked": f"mkdir fake; {CHEAT} > fake/test.sh; rm -rf /tests; ln -s $PWD/fake /tests",
    "tests mounted over": f"mkdir fake; {CHEAT} > fake/test.sh; mount --bind fake /tests; unshare -m true",
    "output is a link": "ln -s /proc/self/environ out.txt",
    "output is a folder": "mkdir out.txt",
    "a fifo in the way": "mkfifo /logs/verifier/reward.txt; mkfifo /logs/verifier/reward.json; mkfifo /tests/test.sh",
    "a racing writer": "(while :; do echo 1 | tee /logs/verifier/reward.{txt,json}; done) >/dev/null 2>&1 & true",
    "a killer": "(while :; do pkill -9 -f test.sh; kill -9 -1; sleep 0.01; done) 2>/dev/null & setsid sleep 600 & true",
    "a shell start file": f"{CHEAT} | tee ~/.bashrc ~/.profile ~/.bash_profile /etc/profile",
    "a tracer": f"python3 -c '{TRACER}' & true",
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
async def test_a_planted_verdict_is_not_read(server: Server, add_task: AddTask, plant: str) -> None:
    hostname = Path("/etc/hostname").read_bytes()
    task = add_task("sleep 0.3\n" + OK_TEST)
    async with server.client() as env:
        begun = time.monotonic()
        result = await graded(env, task, plant)
        assert time.monotonic() - begun < HANG_S
        assert_verdict(result, 0.0)
    assert Path("/etc/hostname").read_bytes() == hostname
    assert not list(Path("/etc").glob("reward.*"))
    async with server.client() as env:
        assert_verdict(await graded(env, task, SOLVE), 1.0)


async def test_a_solved_task_stays_solved_whatever_surrounds_it(server: Server) -> None:
    async with server.client() as env:
        for plant in ("reward files", "logs replaced", "tests linked", "a racing writer", "a killer"):
            # Solved first: the killer takes the agent's own commands, too, when it is quick.
            assert_verdict(await graded(env, "ok", SOLVE, PLANTS[plant]), 1.0)


async def test_an_output_that_never_ends_is_a_timeout_not_a_hang(server: Server, add_task: AddTask) -> None:
    task = add_task(OK_TEST, toml="[verifier]\ntimeout_sec = 1.0\n")
    async with server.client() as env:
        begun = time.monotonic()
        assert_no_verdict(await graded(env, task, "mkfifo out.txt"), "verifier_timeout")
        assert time.monotonic() - begun < 3


# ---------------------------------------------------------------- 9: what pytest would read
HOOK = (
    "import pytest\\n@pytest.hookimpl(tryfirst=True)\\n"
    "def pytest_runtest_makereport(item, call):\\n    call.excinfo = None"
)
PYTEST_PLANTS = {
    "conftest.py": f"printf '{HOOK}' | tee /app/conftest.py ~/conftest.py /conftest.py",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' | tee /app/pytest.ini ~/pytest.ini",
    "sitecustomize.py": "printf 'import os; os._exit(0)' | tee /app/sitecustomize.py ~/sitecustomize.py",
    "pytest.py": "printf 'import os; os._exit(0)' | tee /app/pytest.py /app/_pytest.py /app/pluggy.py /app/json.py",
    "ld.so.preload": "echo nonsense > /etc/ld.so.preload",
}


@pytest.mark.parametrize("plant", PYTEST_PLANTS.values(), ids=PYTEST_PLANTS.keys())
async def test_a_plant_for_pytest_changes_no_verdict(server: Server, tasks: Path, plant: str) -> None:
    async with server.client() as env:
        assert_verdict(await graded(env, "csv-ledger", plant), 0.0)
        assert_verdict(await graded(env, "csv-ledger", solution(tasks / "csv-ledger"), plant), 1.0)


# ---------------------------------------------------------------- secrets of the task
SPY = r"""
look() {
  grep -rlsE 'EXPECTEDKEY|ANSWERKEY' /tests /logs /dev/shm /proc/[0-9]*/{root/tests,cwd/,fd/,environ,cmdline}
  ls -A /tests /proc/[0-9]*/root/tests | grep -E '^test(_|[.])'
}
(until [ -e /tmp/stop ]; do look; done >/tmp/found 2>/dev/null; touch /tmp/stopped) &
(until [ -e /tmp/stop ]; do ps axo pid=,args= | grep -c 'test[.]sh'; done >/tmp/seen 2>/dev/null) &
echo spying
"""


async def test_an_agent_never_sees_the_tests_or_the_solution(server: Server, add_task: AddTask) -> None:
    task = add_task(
        "export KEY=EXPECTEDKEY\nexec 7</tests/test_outputs.py; cd /tests; bash -c 'sleep 1'\n"
        "cp /tests/* /logs/verifier; sleep 0.5; cd /app\n" + OK_TEST
    )
    async with server.client() as env:
        await env.reset(task_id=task)
        everywhere = (
            "grep -rlsE 'EXPECTED''KEY|ANSWER''KEY' /app /tests /logs /tmp /root /run /home /srv /mnt /opt/pytest /etc"
        )
        assert (await env.exec(everywhere)).output == ""
        assert (await env.exec(SPY)).output == "spying\n"
        assert_verdict(await env.evaluate(), 0.0)
        await env.exec("touch /tmp/stop; until [ -e /tmp/stopped ]; do sleep 0.02; done")
        assert (await env.exec("sort -u /tmp/seen | tail -1")).output != "0\n", "the spies saw no verifier at all"
        assert (await env.exec("cat /tmp/found")).output == ""
        await env.exec("rm -r /tmp/*")
        assert (await env.exec(everywhere + "; ls -A /tests /logs/verifier")).output == "/logs/verifier:\n\n/tests:\n"


async def test_names_of_the_hidden_folders_are_nowhere(server: Server, tasks: Path) -> None:
    """Nothing below / that the agent can list is the tests, the solution, or a folder of the server's."""
    async with server.client() as env:
        await env.reset(task_id="no-dockerfile")
        find = "find / -xdev -not -path '/usr/*' -not -path '/proc/*' -not -path '/opt/*' -not -path '/var/lib/*' "
        names = "-name test.sh -o -name solve.sh -o -name test_outputs.py -o -name 'tbench2-*' -o -name commands.jsonl"
        assert (await env.exec(f"{find} \\( {names} \\) 2>/dev/null")).output == ""
        assert (await env.exec(f"ls -A {tasks}/no-dockerfile")).output.split() == [
            "instruction.md",
            "notes",
            "task.toml",
        ]


# ---------------------------------------------------------------- the evidence
async def test_the_evidence_is_kept_on_the_servers_side(server: Server, add_task: AddTask) -> None:
    task = add_task(
        """echo out; echo err >&2
        echo '{"results": {}}' > /logs/verifier/ctrf.json; echo 0.5 > /logs/verifier/reward.txt
        ln -s /etc/passwd /logs/verifier/reward.json.link; echo x > /logs/verifier/other"""
    )
    async with server.client() as env:
        await env.reset(task_id=task, episode_id="evidence-1")
        await env.evaluate()
    folder = server.runs / f"{task}.evidence-1"
    await asyncio.to_thread(eventually, (folder / "result.json").exists, 5)
    kept = {path.name: path.read_text() for path in (folder / "verifier").iterdir()}
    assert kept == {"test-stdout.txt": "out\nerr\n", "ctrf.json": '{"results": {}}\n', "reward.txt": "0.5\n"}
    assert json.loads((folder / "result.json").read_text())["reward"] == 0.5
