"""A 0 of a harness that never ran is no verdict (TASKS.md, "A silent false zero"); every other 0 stays one."""

import time

import pytest

from support.server import Server
from support.tasks import OK_TEST, TOML
from tbench2_env import Tbench2Env
from tbench2_env.server.harness import Script
from tbench2_env.server.verifier import HARNESS

from .conftest import AddTask

#: The shape of 82 of the 89 real ones, with hosts that no resolver knows.
REAL = """#!/bin/bash

apt-get -o APT::Sandbox::User=root install -y --no-download no-such-package-curl

curl -LsSf https://uv.invalid/uv/0.9.5/install.sh | sh

source $HOME/.local/bin/env

if [ "$PWD" = "/" ]; then
    echo "Error: No working directory set."
    exit 1
fi

uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
#: In the place of uv: says what pytest says, and writes the report that it was asked for.
RUNNER = """#!/bin/bash
echo '=========== test session starts ==========='
echo '{"results": {"summary": {"tests": 1}, "tests": []}}' > /logs/verifier/ctrf.json
[ "$(cat out.txt)" = ok ]
"""
INSTALL = f"cat > /usr/local/bin/uvx <<'X'\n{RUNNER}X\nchmod +x /usr/local/bin/uvx\n"
ASKS = "# pytest --ctrf /logs/verifier/ctrf.json\n: --ctrf /logs/verifier/ctrf.json\n"
ZERO = "echo 0 > /logs/verifier/reward.txt\n"


async def reward_of(env: Tbench2Env, task: str, *commands: str) -> float | str | None:
    """The reward of a verdict, or the reason why there is none."""
    await env.reset(task_id=task)
    for command in commands:
        assert (await env.exec(command)).success
    result = await env.evaluate()
    observation = result.observation
    if result.reward is not None:
        assert (observation.error, observation.info["harness"], result.done) == ("", HARNESS, True)
        return result.reward
    assert (observation.success, result.done, "harness" in observation.info) == (False, False, False)
    assert observation.error.startswith("no verdict: ")
    return str(observation.info["no_verdict"])


# ---------------------------------------------------------------- the real shape
async def test_a_toolchain_that_cannot_be_fetched_is_no_verdict(server: Server, add_task: AddTask) -> None:
    task = add_task(REAL)
    async with server.client() as env:
        begun = time.monotonic()
        assert await reward_of(env, task) == "harness_broken"
        assert time.monotonic() - begun < 20
        result = await env.evaluate()
        assert "/logs/verifier/ctrf.json" in result.observation.error
        assert "exit code 0" in result.observation.error
        assert "uvx: command not found" in result.observation.output
        assert await reward_of(env, task, "echo ok > out.txt") == "harness_broken", "solved, but nobody looked"


async def test_with_its_toolchain_the_same_harness_gives_verdicts(server: Server, add_task: AddTask) -> None:
    task = add_task(REAL)
    async with server.client() as env:
        assert await reward_of(env, task, INSTALL) == 0.0
        assert await reward_of(env, task, INSTALL, "echo ok > out.txt") == 1.0


async def test_a_harness_may_break_between_two_evaluations(server: Server, add_task: AddTask) -> None:
    task = add_task(REAL)
    async with server.client() as env:
        assert await reward_of(env, task, INSTALL) == 0.0
        await env.exec("mv /usr/local/bin/uvx ~/uvx; echo ok > out.txt")
        broken = await env.evaluate()
        assert (broken.reward, broken.observation.info["no_verdict"]) == (None, "harness_broken")
        await env.exec("mv ~/uvx /usr/local/bin/uvx")
        assert (await env.evaluate()).reward == 1.0


# ---------------------------------------------------------------- which zero is one
@pytest.mark.parametrize(
    ("test", "reward"),
    [
        (ASKS + ZERO, "harness_broken"),
        (ASKS + "echo '{\"reward\": 0}' > /logs/verifier/reward.json", "harness_broken"),
        (ASKS + "echo -0.0 > /logs/verifier/reward.txt", "harness_broken"),
        (ASKS + "echo 1 > /logs/verifier/reward.txt", "harness_broken"),
        (ASKS + "echo 0.25 > /logs/verifier/reward.txt", "harness_broken"),
        (ASKS + "echo '===== test session starts ====='\necho 1 > /logs/verifier/reward.txt", "harness_broken"),
        (ASKS + "echo '{}' > /logs/verifier/ctrf.json\necho 1 > /logs/verifier/reward.txt", 1.0),
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        (ASKS + "echo '{}' > /logs/verifier/ctrf.json\n" + ZERO, 0.0),
        (ASKS + ": > /logs/verifier/ctrf.json\n" + ZERO, 0.0),
        (ASKS + "echo '===== test session starts ====='\n" + ZERO + "kill -9 $$", 0.0),
        (ASKS + "echo '1 failed, 2 passed in 0.31s'\n" + ZERO, 0.0),
        ("# uvx pytest --ctrf /logs/verifier/ctrf.json\n" + ZERO, 0.0),
        ("uvx check\n" + ZERO, "harness_broken"),
        ("/opt/none/bin/pytest /tests\n" + ZERO, "harness_broken"),
        ("uvx check\nseq 20\n" + ZERO, 0.0),
        ("frobnicate --version\n" + ZERO, 0.0),
        ("cat out.txt\n" + ZERO, 0.0),
        ("curl -sS http://service.invalid\n" + ZERO, 0.0),
        ("curl -sS http://tools.invalid | sh # then pytest\n" + ZERO, 0.0),
        ("curl -sS http://tools.invalid | sh\ntrue pytest\n" + ZERO, "harness_broken"),
        ("python3 -m pytest_that_is_not_there\n" + ZERO, 0.0),
    ],
)
async def test_which_zero_is_a_verdict(server: Server, add_task: AddTask, test: str, reward: float | str) -> None:
    # The program under test speaks like a broken harness.
    said = "echo 'test.sh: line 1: uvx: command not found' > out.txt"
    async with server.client() as env:
        assert await reward_of(env, add_task(test), said) == reward


@pytest.mark.parametrize("test", [ASKS + ZERO, "uvx check\n" + ZERO])
async def test_a_task_can_declare_that_its_zero_counts(server: Server, add_task: AddTask, test: str) -> None:
    task = add_task(test, toml=TOML + "ctrf_required = false\n")
    async with server.client() as env:
        assert await reward_of(env, task) == 0.0


async def test_an_agent_cannot_write_the_report_nor_make_a_broken_harness_a_success(
    server: Server, add_task: AddTask
) -> None:
    task = add_task(ASKS + OK_TEST)
    plant = "mkdir -p /logs/verifier; echo '{\"results\": {}}' > /logs/verifier/ctrf.json; true"
    async with server.client() as env:
        assert await reward_of(env, task, plant) == "harness_broken"
        assert await reward_of(env, task, plant, "echo 1 > out.txt") == "harness_broken"


async def test_code_of_the_agents_that_ends_pytest_does_not_end_the_verdict(server: Server, add_task: AddTask) -> None:
    """pytest has begun, imports the solution, and is gone before it writes its report: an honest 0."""
    task = add_task(
        "echo '==== test session starts ===='\n"
        "python3 solution.py --ctrf /logs/verifier/ctrf.json && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    )
    async with server.client() as env:
        assert await reward_of(env, task, "echo 'import os; os._exit(3)' > solution.py") == 0.0


# ---------------------------------------------------------------- what a test.sh asks for
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA", ("ctrf.json",)),
        ("pytest --ctrf=/logs/verifier/ctrf.json", ("ctrf.json",)),
        ("uvx \\\n  -w x \\\n  pytest --ctrf \\\n    /logs/verifier/ctrf.json \\\n  -rA", ("ctrf.json",)),
        ("pytest --ctrf '/logs/verifier/a.json'", ("a.json",)),
        ('pytest --ctrf "/logs/verifier/a.json" -q', ("a.json",)),
        ('D=/logs/verifier\npytest --ctrf $D/a.json', ("a.json",)),
        ('export D="/logs/verifier"; F="$D/a.json"\npytest --ctrf "$F"', ("a.json",)),
        ('D=/logs/verifier; pytest --ctrf "$D"/a.json', ("a.json",)),
        ("pytest --ctrf ${LOGS:-/logs/verifier}/a.json", ("a.json",)),
        ("pytest --ctrf /logs//verifier/./a.json", ("a.json",)),
        ("args=(-q --ctrf /logs/verifier/a.json)\npytest ${args[@]}", ("a.json",)),
        ('PYTEST_ADDOPTS="--ctrf /logs/verifier/a.json -q"', ("a.json",)),
        ("if x; then pytest --ctrf /logs/verifier/a.json; else pytest --ctrf /logs/verifier/b.json; fi",
         ("a.json", "b.json")),
        ("pytest /tests", ()),
        ("# pytest --ctrf /logs/verifier/ctrf.json", ()),
        ("pytest # --ctrf /logs/verifier/ctrf.json", ()),
        ("pytest --ctrf /tmp/ctrf.json", ()),
        ("pytest --ctrf /logs/verifier/deep/ctrf.json", ()),
        ("pytest --ctrf /logs/verifier/../ctrf.json", ()),
        ("pytest --ctrf /logs/verifier/..", ()),
        ("pytest --ctrf $UNSET/ctrf.json", ()),
        ("pytest --ctrf $(mktemp)", ()),
        ("A=$B; B=$A; pytest --ctrf $A", ()),
        ("A=$A$A$A$A$A$A$A$A; pytest --ctrf $A", ()),
        ("pytest --ctrf", ()),
        ("", ()),
    ],
)  # fmt: skip
def test_the_report_that_is_asked_for(text: str, names: tuple[str, ...]) -> None:
    assert Script(text).ctrf_names == names


@pytest.mark.parametrize(
    "line",
    [
        "/tests/test.sh: line 2: uvx: command not found",
        "/tests/test.sh: line 2: /root/.local/bin/uvx: No such file or directory",
        "curl: (6) Could not resolve host: astral.sh",
        "E: Unable to locate package curl",
        "error: Failed to fetch: `https://pypi.invalid/simple/pytest/`",
        "  \u00d7 Failed to download `pytest==8.4.1`",
        "  \u00d7 No solution found when resolving tool dependencies:",
        "error: No interpreter found for Python 3.13 in managed installations or search path",
        "ERROR: No matching distribution found for pytest==8.4.1",
        "/usr/bin/python3: No module named pytest",
    ],
)
def test_what_a_missing_toolchain_says(line: str) -> None:
    script = Script("#!/bin/bash\nuvx pytest /tests\n")
    assert line.strip() in (script.why_not_run(0.0, f"x\n{line}\n\n", ()) or "")
    assert script.why_not_run(0.0, f"== test session starts ==\n{line}\n", ()) is not None, (
        "that is not how pytest says it"
    )
    assert script.why_not_run(0.0, f"=== test session starts ===\n{line}\n", ()) is None
    assert script.why_not_run(0.0, line + "\nmore" * 20, ()) is None, "it went on"


@pytest.mark.parametrize(
    "line",
    [
        "curl: (7) Failed to connect to localhost port 8080",
        "/tests/test.sh: line 2: nginx: command not found",
        "/tests/test.sh: line 1: uvx: command not found",
        "/tests/test.sh: line 0: uvx: command not found",
        "/tests/test.sh: line 99999999999999999999: uvx: command not found",
        "bash: line 2: uvx: command not found",
        "W: Failed to fetch http://deb.invalid/debian",
        "ModuleNotFoundError: No module named 'numpy'",
    ],
)
def test_what_says_nothing_about_the_toolchain(line: str) -> None:
    assert Script("#!/bin/bash\nuvx pytest /tests\n# the end").why_not_run(0.0, f"{line}\n", ()) is None


def test_a_hostile_output_takes_no_time() -> None:
    begun = time.monotonic()
    for piece in ("1 passed ", "1", "=== test session start", "curl: (6", "test.sh: line 1: ", "\n", "\x85"):
        Script("pytest\n" * 1000).why_not_run(0.0, piece * (1_048_576 // len(piece)), ())
    assert time.monotonic() - begun < 5
