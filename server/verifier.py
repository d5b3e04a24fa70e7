"""The verifier: runs the task's harness out of the agent's reach and reads its verdict from the server's side."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import CommandSpec, Cover
from tbench2_env.server.evidence import Evidence, collect, open_regular
from tbench2_env.server.shell import BASH, Result, Runner
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.toolchain.offer import Offer

HARNESS = "tests/test.sh"
#: Characters of the harness's output that the client gets.
OUTPUT_TAIL = 20_000
REWARD_FILE_MAX_BYTES = 64 << 10
_PYTEST = ("/usr/bin/env", ("env", "python3", "-m", "pytest", "-q", "/tests", "-rA", "-p", "no:cacheprovider"))
_PYTEST_PASSED, _PYTEST_FAILED = 0, 1


class Reason(StrEnum):
    """Why there is no verdict: a closed set, used in answers, results and metrics alike."""

    TESTS_MISSING = "tests_missing"
    REWARD_MISSING = "reward_missing"
    REWARD_INVALID = "reward_invalid"
    VERIFIER_TIMEOUT = "verifier_timeout"
    SANDBOX_DEAD = "sandbox_dead"
    HARNESS_BROKEN = "harness_broken"
    TAMPERED = "tampered"
    CANCELLED = "cancelled"


class NoVerdict(Exception):
    """There is no reward, which is never the same as a reward of 0."""

    def __init__(self, reason: Reason, message: str, output: str = "", evidence: Evidence | None = None) -> None:
        super().__init__(message)
        self.reason, self.output, self.evidence = reason, output, evidence


@dataclass(frozen=True)
class Verdict:
    """A finite reward. `harness` is set when tests/test.sh gave it; `rewards` are reward.json's other numbers."""

    reward: float
    output: str
    evidence: Evidence
    harness: str | None
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """What is graded and how: `env` is the episode's environment with task.toml's [verifier.env], to which the offer's
    is added. `alive` are the names of the agent's processes."""

    sandbox: Sandbox
    snapshot: Snapshot
    env: Mapping[str, str]
    alive: list[str]
    covers: Sequence[Cover] = ()
    offer: Offer = field(default_factory=Offer)


async def run(grade: Grade, runner: Runner) -> Result:
    """Run the harness. Raises: NoVerdict, SandboxError."""
    sandbox, snapshot = grade.sandbox, grade.snapshot
    if not snapshot.has_tests:
        raise NoVerdict(Reason.TESTS_MISSING, "no verdict: the task has no tests/ folder")
    if grade.offer.refuse is not None:
        raise NoVerdict(Reason.HARNESS_BROKEN, f"no verdict: {grade.offer.refuse}")
    command = _command(snapshot, {**grade.env, **grade.offer.env})
    return await runner.run(
        lambda fds: sandbox.start_verifier(command, fds, snapshot.name, grade.covers, grade.offer.provided),
        snapshot.config.verifier.timeout_sec,
    )


def judge(grade: Grade, result: Result, results: Path) -> Verdict:
    """What its harness said of the episode; its files are kept in the folder `results`. Blocks: call it in a thread.

    Raises: NoVerdict.
    """
    sandbox, snapshot = grade.sandbox, grade.snapshot
    names = snapshot.test_script.ctrf_names if snapshot.test_script else ()
    evidence = collect(sandbox.verifier_folder, names, result, grade.alive, results)
    evidence = dataclasses.replace(evidence, toolchain=grade.offer.describe)
    tail = result.output[-OUTPUT_TAIL:]
    try:
        reward, rewards = _reward(sandbox, snapshot, result, evidence)
    except NoVerdict as none:
        missing = ", ".join(grade.offer.describe.get("missing", ())) if none.reason is Reason.HARNESS_BROKEN else ""
        message = f"{none}; the toolchain has not: {missing}" if missing else str(none)
        raise NoVerdict(none.reason, message, tail, evidence) from None
    return Verdict(reward, tail, evidence, HARNESS if snapshot.test_script else None, rewards)


def _command(snapshot: Snapshot, env: Mapping[str, str]) -> CommandSpec:
    path, argv = (BASH, ("bash", "/tests/test.sh")) if snapshot.test_script else _PYTEST
    return CommandSpec(path, argv, snapshot.workdir, dict(env))


def _reward(sandbox: Sandbox, snapshot: Snapshot, result: Result, evidence: Evidence) -> tuple[float, dict[str, float]]:
    """Raises: NoVerdict."""
    verifier, script = snapshot.config.verifier, snapshot.test_script
    if result.timed_out:
        message = f"no verdict: the verifier timed out after {verifier.timeout_sec:g} s"
        raise NoVerdict(Reason.VERIFIER_TIMEOUT, message)
    if script is None:
        return _pytest_reward(result), {}
    try:
        reward, rewards = read_reward(sandbox.verifier_folder)
        if verifier.ctrf_required and (why := script.why_not_run(reward, result.output, evidence.reports)):
            message = f"no verdict: the harness wrote {reward:g} but did not run: {why}"
            raise NoVerdict(Reason.HARNESS_BROKEN, message)
    except NoVerdict as none:
        raise NoVerdict(none.reason, f"{none} (test.sh ended with exit code {result.exit_code})") from None
    return reward, rewards


def _pytest_reward(result: Result) -> float:
    """pytest's exit code as a reward; it has codes of its own for not having run (docs.pytest.org, exit codes)."""
    ran = result.exit_code in (_PYTEST_PASSED, _PYTEST_FAILED) and "No module named pytest" not in result.output[-400:]
    if not ran:
        message = f"no verdict: pytest could not run the tests (exit code {result.exit_code})"
        raise NoVerdict(Reason.HARNESS_BROKEN, message)
    return 1.0 if result.exit_code == _PYTEST_PASSED else 0.0


# ---------------------------------------------------------------- reading the verdict
def read_reward(folder: Path) -> tuple[float, dict[str, float]]:
    """The reward in a verifier's folder, and reward.json's other numbers.

    reward.json (a number, or an object whose `reward` is the reward) comes before reward.txt (a float), as in
    harbor 0.25. Raises: NoVerdict.
    """
    text = _read_bounded(folder / "reward.json")
    if text is not None:
        return _parse_json(text)
    text = _read_bounded(folder / "reward.txt")
    if text is None:
        raise NoVerdict(Reason.REWARD_MISSING, "no verdict: test.sh wrote no reward file")
    return _finite(text, "reward.txt"), {}


def _read_bounded(path: Path) -> str | None:
    """The text of a regular file of bounded size; None when there is none. Raises: NoVerdict."""
    try:
        file = open_regular(path, REWARD_FILE_MAX_BYTES)
    except ValueError as error:
        raise NoVerdict(Reason.REWARD_INVALID, f"no verdict: {error}") from None
    if file is None:
        return None
    with file:
        return file.read(REWARD_FILE_MAX_BYTES).decode("utf-8", errors="replace")


def _parse_json(text: str) -> tuple[float, dict[str, float]]:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise NoVerdict(Reason.REWARD_INVALID, f"no verdict: reward.json is not JSON: {text[:80]!r}") from None
    if not isinstance(data, dict):
        return _finite(data, "reward.json"), {}
    if "reward" not in data:
        raise NoVerdict(Reason.REWARD_INVALID, "no verdict: reward.json has no key reward")
    # JSON can name a lone surrogate, which no answer can.
    named = ((key.encode(errors="replace").decode(), value) for key, value in data.items() if key != "reward")
    others = {key: float(value) for key, value in named if _is_finite_number(value)}
    return _finite(data["reward"], "reward.json"), others


def _finite(value: Any, name: str) -> float:
    """Raises: NoVerdict for anything but one finite number."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (isinstance(value, str) and "_" in value):  # float("1_0") is Python's, not a file's
        shown = repr(value)[:80]
        raise NoVerdict(Reason.REWARD_INVALID, f"no verdict: {name} holds {shown}, which is no finite number")
    return number


def _is_finite_number(value: Any) -> bool:
    # An integer may be finite and yet more than a float holds.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
