"""One task, attempted by the oracle on a server: reset, its solution or nothing at all, evaluate."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import git

from tbench2_env import (
    CapacityReached,
    ConnectionClosed,
    EpisodeEnded,
    ServerGone,
    StepResult,
    Tbench2Error,
    Tbench2HttpEnv,
    Tbench2Observation,
    Unauthorized,
)
from tbench2_env.server.cli import solution
from tbench2_env.server.cli.results import Result
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task
from tbench2_env.server.verifier import Reason
from tbench2_env.server.wire import TIMEOUT_MAX_S

#: Seconds for the solution of a task that names no limit for its agent; most name 900 to 3,600.
_AGENT_TIMEOUT_S = 3600.0
#: Seconds beyond a limit that the server itself keeps.
_GRACE_S = 120.0
_FULL_PAUSE_S = 1.0
_TAIL_CHARACTERS = 4000
#: Of these, asking again may make something.
_NOT_FINAL = (Reason.SANDBOX_DEAD, Reason.CANCELLED)


@dataclass(frozen=True)
class Terms:
    """What all attempts of a run have in common. `token` None: the server wants none."""

    url: str
    token: str | None
    solved: bool
    reset_timeout_s: float


class _Failed(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def attempt(task: Task, terms: Terms, enter: Callable[[str], None]) -> Result:
    """Try one task. `enter` is called with each phase: reset, solve, evaluate.

    Raises: ServerGone if the server cannot be reached at all, Unauthorized.
    """
    trial = _Trial(task, terms, enter)
    try:
        await trial.run()
    except _Failed as failure:
        trial.result.reason, trial.result.error = failure.reason, str(failure)
    return trial.result


class _Trial:
    def __init__(self, task: Task, terms: Terms, enter: Callable[[str], None]) -> None:
        self._task, self._terms, self._enter = task, terms, enter
        self.result = Result(seconds={})

    async def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="tbench2-oracle-") as folder:
            reference = await self._load(Path(folder, "solution")) if self._terms.solved else None
            async with Tbench2HttpEnv(
                self._terms.url, token=self._terms.token or "", message_timeout_s=TIMEOUT_MAX_S + _GRACE_S
            ) as env:
                info = await self._reset(env)
                if reference is not None:
                    await self._solve(env, reference, info.get("agent_timeout_sec") or _AGENT_TIMEOUT_S)
                await self._evaluate(env, float(info["verifier_timeout_sec"]))

    async def _load(self, folder: Path) -> solution.Solution:
        try:
            return await asyncio.to_thread(solution.load, self._task, folder)
        except (TaskError, OSError, UnicodeDecodeError, git.GitError) as error:
            raise _Failed("no_solution", str(error)) from None

    async def _reset(self, env: Tbench2HttpEnv) -> dict[str, Any]:
        async with self._phase("reset", self._terms.reset_timeout_s):
            info = (await self._begin(env)).observation.info
        self.result.environment, self.result.unmet = info.get("environment"), info.get("unmet", [])
        return info

    async def _begin(self, env: Tbench2HttpEnv) -> StepResult[Tbench2Observation]:
        while True:
            try:
                return await env.reset(task_id=self._task.task_id)
            except CapacityReached as full:
                await asyncio.sleep(full.retry_after_s or _FULL_PAUSE_S)

    async def _solve(self, env: Tbench2HttpEnv, reference: solution.Solution, timeout_s: float) -> None:
        timeout_s = min(timeout_s, TIMEOUT_MAX_S)
        async with self._phase("solve", timeout_s + _GRACE_S):
            await solution.upload(env, reference)
            done = await env.exec(reference.command, timeout_s=timeout_s)
        self.result.solve_exit_code = done.info.get("exit_code")
        # As harbor does, the tests are run all the same: what was solved in time may be enough.
        self.result.solve_timed_out = bool(done.info.get("timed_out"))
        self.result.solve_output = done.output[-_TAIL_CHARACTERS:]
        if done.done:
            raise _Failed(Reason.SANDBOX_DEAD, done.error)

    async def _evaluate(self, env: Tbench2HttpEnv, timeout_s: float) -> None:
        async with self._phase("evaluate", timeout_s + _GRACE_S):
            verdict = await env.evaluate()
        result, shown = self.result, verdict.observation
        result.toolchain = shown.info.get("verifier", {}).get("toolchain")
        result.tests = _not_passed(shown.info.get("tests"))
        if verdict.reward is None:
            result.reason, result.error = shown.info.get("no_verdict", "evaluate_failed"), shown.error
            result.final = result.reason not in (*_NOT_FINAL, "evaluate_failed")
        else:
            result.reward, result.final = float(verdict.reward), True
            self._blame_solution()
        result.tests_output = "" if result.reward == 1.0 else shown.output[-_TAIL_CHARACTERS:]
        result.solve_output = "" if result.reward == 1.0 else result.solve_output

    def _blame_solution(self) -> None:
        """A reward that is not 1 has a reason where the solution itself failed, such as for want of a network."""
        result = self.result
        if result.reward != 1.0 and (result.solve_exit_code or result.solve_timed_out):
            result.reason = "solve_failed"
            result.error = next((line for line in reversed(result.solve_output.splitlines()) if line.strip()), "")

    @contextlib.asynccontextmanager
    async def _phase(self, name: str, limit_s: float) -> AsyncIterator[None]:
        """Take its time, keep its limit, and say of what goes wrong in it whose fault it was."""
        self._enter(name)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise _Failed(f"{name}_timeout", f"no answer to {name} within {limit_s:g} s") from None
        except EpisodeEnded as error:
            raise _Failed(Reason.SANDBOX_DEAD, str(error)) from None
        except ConnectionClosed as error:
            raise _Failed("server_lost", str(error)) from None
        except (ServerGone, Unauthorized):
            raise
        except (Tbench2Error, OSError) as error:
            raise _Failed(f"{name}_failed", str(error)) from None
        finally:
            self.result.seconds[name] = round(time.monotonic() - begun, 3)


def _not_passed(tests: dict[str, Any] | None) -> dict[str, Any] | None:
    if tests is None:
        return None
    return {**tests, "tests": [test for test in tests.get("tests", []) if test.get("status") != "passed"]}
