"""One episode: a sandbox with a task in it, the actions it is asked for, and what is recorded of them."""

import asyncio
import datetime
import time
import uuid
from typing import Any

import structlog

from tbench2_env.isolation.sandbox import Sandbox, SandboxError
from tbench2_env.isolation.spec import SandboxSpec
from tbench2_env.models import Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.server import actions, shell, verifier
from tbench2_env.server.actions import BadAction
from tbench2_env.server.runs import Run
from tbench2_env.server.services import PROCESSES_MAX, Services
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.tasks import Task
from tbench2_env.server.terminal import TerminalError, Terminals
from tbench2_env.server.verifier import NoVerdict, Reason

log = structlog.get_logger()


class Episode:
    """One attempt at a task, from reset to its end. Actions are carried out one at a time."""

    def __init__(
        self, services: Services, task: Task, snapshot: Snapshot, run: Run, sandbox: Sandbox, name: str
    ) -> None:
        self._services, self._task, self._snapshot, self._run, self._sandbox = services, task, snapshot, run, sandbox
        self._env = shell.environment(snapshot.env)
        self._runner = shell.Runner(services.settings.output_limit_bytes)
        self._terminals = Terminals(services.settings.output_limit_bytes)
        self._turn = asyncio.Lock()
        self._begun = time.time()
        self._outcome: dict[str, Any] = {}
        self.state = Tbench2State(episode_id=name, task_id=task.task_id, task_path=str(task.path), terminal_ready=True)

    @classmethod
    async def begin(cls, services: Services, task: Task, episode_id: str | None) -> "Episode":
        """Set the task up in a sandbox of its own. Raises: TaskError, SandboxError, OSError."""
        snapshot = await services.snapshots.get(task)
        name = episode_id or uuid.uuid4().hex
        run = services.runs.begin(task.task_id, name)
        try:
            # The sandbox has a name of its own: episode ids are the client's choice and may come twice.
            spec = SandboxSpec(uuid.uuid4().hex, (snapshot.name,), processes_max=PROCESSES_MAX)
            sandbox = await services.spawner.create(spec)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(services.runs.end, run))
            raise
        log.info("episode began", episode_id=name, task_id=task.task_id)
        return cls(services, task, snapshot, run, sandbox, name)

    def first_observation(self) -> Tbench2Observation:
        """What reset answers."""
        return self._observe(action_type="reset", info=self._describe(), reward=0.0)

    def _describe(self) -> dict[str, Any]:
        config = self._snapshot.config
        return {
            "isolation": self._services.describe_isolation(),
            "workdir": self._snapshot.workdir,
            "task_commit": self._snapshot.commit,
            "task_digest": self._snapshot.digest,
            "verifier_timeout_sec": config.verifier.timeout_sec,
            "agent_timeout_sec": config.agent.timeout_sec,
            "command_timeout_s": self._services.settings.command_timeout_s,
            "unmet": list(self._snapshot.unmet),
        }

    async def step(self, action: Tbench2Action) -> Tbench2Observation:
        """Carry out one action. Never raises for what the action does; `success` false says that it was not done."""
        async with self._turn:
            begun = time.time()
            observation = await self._answer(action)
            self._record(action, observation, begun)
            return observation

    async def _answer(self, action: Tbench2Action) -> Tbench2Observation:
        self.state.step_count += 1
        self.state.last_action_type, self.state.last_command = action.action_type, action.command
        self.state.session_id = action.session_id or ""
        try:
            observation = await self._dispatch(actions.parse(action))
        except (BadAction, TerminalError) as error:
            observation = self._observe(success=False, error=str(error))
        except SandboxError as error:
            dead = self._sandbox.died.done()
            info = {"no_verdict": Reason.SANDBOX_DEAD} if action.action_type == "evaluate" else {}
            observation = self._observe(success=False, error=str(error), done=dead, info=info)
        observation.session_id, observation.action_type = action.session_id, action.action_type
        self.state.last_output = observation.output
        return observation

    async def _dispatch(self, action: actions.Action) -> Tbench2Observation:
        match action:
            case actions.Exec(command):
                return await self._exec(command)
            case actions.Start(name, command):
                return self._observe(output=await self._start(name, command))
            case actions.Write(name, text):
                return self._observe(output=await self._terminals.get(name).write(text))
            case actions.View(name):
                return self._observe(output=self._terminals.get(name).view())
            case actions.Wait(name, seconds):
                return self._observe(output=await self._terminals.get(name).wait(seconds))
            case actions.Kill(name):
                self._terminals.kill(name)
                return self._observe(output=f"Killed session {name}")
            case actions.WriteFile(path, content):
                return await self._write_file(path, content)
            case actions.Evaluate():
                return await self._evaluate()
            case actions.Close():
                await self.discard()
                return self._observe(output="Closed TB2 environment.", done=True)

    async def _exec(self, command: str) -> Tbench2Observation:
        timeout_s = self._services.settings.command_timeout_s
        spec = shell.script_command(self._snapshot.workdir, self._env)
        with shell.in_memory(_script(command), "command") as script:
            result = await self._runner.run(lambda fds: self._sandbox.start(spec, fds), timeout_s, script)
        self._check_alive()
        info = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "seconds": round(result.seconds, 6),
            "output_bytes": result.output_bytes,
        }
        if not result.timed_out:
            return self._observe(output=result.output, info=info)
        error = f"the command timed out after {timeout_s:g} s and was killed with all it had started"
        return self._observe(output=f"{result.output}\n[{error}]\n", success=False, error=error, info=info)

    async def _start(self, name: str, command: str) -> str:
        if not command:
            spec = shell.interactive_command(self._snapshot.workdir, self._env)
            return await self._terminals.start(name, self._sandbox, spec, ())
        spec = shell.script_command(self._snapshot.workdir, self._env, tty=True)
        with shell.in_memory(_script(command), "command") as script:
            return await self._terminals.start(name, self._sandbox, spec, (script,))

    async def _write_file(self, path: str, content: str) -> Tbench2Observation:
        spec = shell.write_command(path, self._snapshot.workdir, self._env)
        with shell.in_memory(content.encode("utf-8", errors="surrogatepass"), "content") as data:
            result = await self._runner.run(
                lambda fds: self._sandbox.start(spec, fds), self._services.settings.command_timeout_s, data
            )
        self._check_alive()
        if result.timed_out or result.exit_code != 0:
            why = "timed out" if result.timed_out else result.output.strip() or f"exit code {result.exit_code}"
            return self._observe(success=False, error=f"file_path {path}: cannot be written: {why}")
        return self._observe(output=f"Wrote content to {path}")

    async def _evaluate(self) -> Tbench2Observation:
        try:
            verdict = await verifier.verify(self._sandbox, self._snapshot, self._runner, self._run.verifier_folder)
            self._check_alive()
        except NoVerdict as none:
            if self._sandbox.died.done():
                raise SandboxError(self._sandbox.died.result()) from none
            self._outcome = {"reward": None, "no_verdict": none.reason, "error": str(none)}
            return self._observe(output=none.output, success=False, error=str(none), info={"no_verdict": none.reason})
        info: dict[str, Any] = {
            "tests_passed": verdict.reward == 1.0,
            "exit_code": verdict.exit_code,
            "seconds": round(verdict.seconds, 6),
        }
        if verdict.harness is not None:
            info["harness"] = verdict.harness
        if verdict.rewards:
            info["rewards"] = verdict.rewards
        self._outcome = {"reward": verdict.reward, "evaluation": info}
        return self._observe(output=verdict.output, reward=verdict.reward, done=True, info=info)

    def _check_alive(self) -> None:
        """A command that ended because its whole sandbox did is not the command's own doing. Raises: SandboxError."""
        if self._sandbox.died.done():
            raise SandboxError(self._sandbox.died.result())

    def _observe(self, **fields: Any) -> Tbench2Observation:
        return Tbench2Observation(
            instruction=self._snapshot.instruction,
            task_id=self.state.task_id,
            task_path=self.state.task_path,
            metadata={"episode_id": self.state.episode_id},
            **fields,
        )

    def _record(self, action: Tbench2Action, observation: Tbench2Observation, begun: float) -> None:
        self._run.record(
            {
                "action_type": action.action_type,
                "command": action.command or action.file_path,
                "session_id": action.session_id,
                "begun": _iso(begun),
                "seconds": round(time.time() - begun, 6),
                "success": observation.success,
                "error": observation.error,
                "exit_code": observation.info.get("exit_code"),
                "reward": observation.reward,
                "output_head": observation.output,
            }
        )

    async def discard(self) -> None:
        """End the episode: kill all that runs in it, free its files. Doing it twice is fine."""
        if not self.state.terminal_ready:
            return
        self.state.terminal_ready = False
        self._terminals.close()
        self._runner.close()
        await self._sandbox.destroy()
        self._run.write_result(
            {
                "task_id": self.state.task_id,
                "episode_id": self.state.episode_id,
                "task_commit": self._snapshot.commit,
                "begun": _iso(self._begun),
                "seconds": round(time.time() - self._begun, 3),
                "steps": self.state.step_count,
                **(self._outcome or {"reward": None}),
            }
        )
        await asyncio.to_thread(self._services.runs.end, self._run)
        log.info(
            "episode ended",
            episode_id=self.state.episode_id,
            task_id=self.state.task_id,
            reward=self._outcome.get("reward"),
        )


def _script(command: str) -> bytes:
    """bash drops NUL bytes from scripts it reads; `read` would stop at the first instead."""
    return command.replace("\0", "").encode("utf-8", errors="surrogatepass")


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
