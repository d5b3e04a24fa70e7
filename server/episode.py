"""One episode: a sandbox with a task in it, the actions it is asked for, its end, and what is recorded of all that."""

import asyncio
import contextlib
import dataclasses
import datetime
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from tbench2_env.isolation.changes import Worktree
from tbench2_env.isolation.sandbox import Process, Sandbox, SandboxError
from tbench2_env.isolation.spec import CommandSpec
from tbench2_env.models import Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.server import actions, shell, verifier
from tbench2_env.server.actions import BadAction
from tbench2_env.server.allotment import Allotment, close_sandbox, open_sandbox
from tbench2_env.server.ending import End, EpisodeBusy, EpisodeEnded
from tbench2_env.server.engine import Engine
from tbench2_env.server.pool import Slot
from tbench2_env.server.registry import Ended
from tbench2_env.server.runs import Run
from tbench2_env.server.services import Services
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.tamper import Watch
from tbench2_env.server.tasks import Task
from tbench2_env.server.terminal import TerminalError, Terminals
from tbench2_env.server.verifier import NoVerdict, Reason, Verdict

log = structlog.get_logger()

_KILLED = 128 + signal.SIGKILL
_BY_CLIENT = (End.CLOSED, End.REPLACED, End.DELETED, End.DISCONNECTED)


class Episode:
    """One attempt at a task, from reset to its end. Actions are carried out one at a time.

    Made by `begin`. Whatever ends it calls `discard`, the only way out; the first reason counts.
    """

    def __init__(self, services: Services, task: Task, snapshot: Snapshot, engine: Engine, run: Run) -> None:
        self._services, self._task, self._snapshot, self._engine, self._run = services, task, snapshot, engine, run
        self._allotment = Allotment.of(snapshot, engine)
        self._env = shell.environment(snapshot.env, self._allotment.env)
        self._runner = shell.Runner(services.settings.output_limit_bytes)
        self._terminals = Terminals(services.settings.output_limit_bytes)
        self._turn = asyncio.Lock()
        self._begun = time.time()
        self._last_active = services.loop.time()
        self._timers: dict[End, asyncio.TimerHandle] = {}
        self._outcome: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._evaluating = False
        self._ended: EpisodeEnded | None = None
        self._discarded: asyncio.Task[None] | None = None
        self._slot: Slot | None = None
        self._queued_s = 0.0
        self._transfers = 0
        self._sandbox: Sandbox
        self._watch: Watch
        #: Actions that run on without a waiting client, by handle.
        self.operations: dict[str, asyncio.Task[Any]] = {}
        self.state = Tbench2State(episode_id=run.episode_id, task_id=task.task_id, task_path=str(task.path))
        self._log = log.bind(episode_id=run.episode_id, task_id=task.task_id)

    @classmethod
    async def begin(
        cls, services: Services, task: Task, wanted_id: str | None, slot: Slot, *, own_slot: bool
    ) -> "Episode":
        """Set the task up in a sandbox of its own. With `own_slot` the episode releases `slot` when it ends.

        Raises: TaskError, SandboxError, OSError; the slot is then the caller's, either way.
        """
        try:
            with services.metrics.timed("reset"):
                episode = await cls._set_up(services, task, wanted_id)
        except BaseException:
            services.metrics.resets.labels("failed").inc()
            raise
        services.metrics.resets.labels("ok").inc()
        episode._queued_s, slot.queued_s = slot.queued_s, 0.0
        if own_slot:
            episode._slot = slot
        episode._arm_timers(http=own_slot)
        episode._log.info("episode began")
        return episode

    @classmethod
    async def _set_up(cls, services: Services, task: Task, wanted_id: str | None) -> "Episode":
        engine = await services.engines.get()
        try:
            return await cls._set_up_on(engine, services, task, wanted_id)
        except SandboxError:
            if engine.spawner.alive:
                raise
        # The helper died under us: what is begun now gets the new one.
        return await cls._set_up_on(await services.engines.get(), services, task, wanted_id)

    @classmethod
    async def _set_up_on(cls, engine: Engine, services: Services, task: Task, wanted_id: str | None) -> "Episode":
        snapshot = await engine.snapshots.get(task)
        episode_id = services.registry.new_id(wanted_id)
        run = services.runs.begin(task.task_id, episode_id)
        episode = cls(services, task, snapshot, engine, run)
        try:
            episode._sandbox = await open_sandbox(engine, snapshot, episode._allotment, services.proxy)
        except BaseException:
            services.registry.forget(episode_id)
            await asyncio.shield(asyncio.to_thread(services.runs.end, run))
            raise
        episode._watch = Watch(episode._sandbox, episode._env, snapshot.workdir, services.settings.tamper)
        services.registry.add(episode)
        episode.state.terminal_ready = True
        episode._sandbox.died.add_done_callback(episode._sandbox_died)
        return episode

    # ------------------------------------------------------------ what it is
    @property
    def episode_id(self) -> str:
        return self._run.episode_id

    @property
    def task_id(self) -> str:
        return self._task.task_id

    @property
    def workdir(self) -> str:
        return self._snapshot.workdir

    @property
    def instruction(self) -> str:
        return self._snapshot.instruction

    @property
    def begun(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._begun, datetime.UTC)

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    @property
    def run_folder(self) -> Path:
        return self._run.folder

    @property
    def reward(self) -> float | None:
        """The reward of the last evaluation."""
        return self._outcome.get("reward")

    def first_observation(self) -> Tbench2Observation:
        """What reset answers."""
        return self._observe(action_type="reset", info=self.describe(), reward=0.0)

    def describe(self) -> dict[str, Any]:
        """`info` of reset: isolation, limits, and what the task needs and does not get."""
        config, settings = self._snapshot.config, self._services.settings
        return {
            "isolation": self._allotment.describe(self._engine),
            "workdir": self._snapshot.workdir,
            "task_commit": self._snapshot.commit,
            "task_digest": self._snapshot.digest,
            "verifier_timeout_sec": config.verifier.timeout_sec,
            "agent_timeout_sec": config.agent.timeout_sec,
            "command_timeout_s": settings.command_timeout_s,
            "episode_timeout_s": settings.episode_timeout_s(config.agent.timeout_sec),
            "queued_s": round(self._queued_s, 3),
            "unmet": [*self._snapshot.unmet, *self._allotment.unmet],
        }

    # ------------------------------------------------------------ actions
    async def step(
        self, action: Tbench2Action, timeout_s: float | None = None, *, queue: bool = True
    ) -> Tbench2Observation:
        """Carry out one action; `success` false says that it was not done. `timeout_s` replaces exec's own limit.

        Raises: EpisodeEnded; EpisodeBusy if another action is under way and `queue` is false.
        """
        self.check_live()
        if self.busy and not queue:
            raise EpisodeBusy(f"episode {self.episode_id} is carrying out another action: wait for its answer")
        async with self._turn:
            self.check_live()
            begun = time.time()
            try:
                observation = await self._answer(action, timeout_s)
            finally:
                self.touch()
            self._record(action, observation, begun)
            return observation

    def check_live(self) -> None:
        """Raises: EpisodeEnded."""
        if self._ended is not None:
            raise self._ended

    def touch(self) -> None:
        """Something was done with the episode: it is not idle."""
        self._last_active = self._services.loop.time()

    def ended_observation(self, action: Tbench2Action) -> Tbench2Observation:
        """The answer to an action on an episode that is over, for protocols that answer every action alike."""
        info = {}
        if action.action_type == "evaluate":
            self._services.metrics.verdicts.labels(Reason.SANDBOX_DEAD).inc()
            info["no_verdict"] = Reason.SANDBOX_DEAD
        return self._observe(
            success=False, error=str(self._ended), done=True, info=info,
            action_type=action.action_type, session_id=action.session_id,
        )  # fmt: skip

    async def _answer(self, action: Tbench2Action, timeout_s: float | None) -> Tbench2Observation:
        self.state.step_count += 1
        self.state.last_action_type, self.state.last_command = action.action_type, action.command
        self.state.session_id = action.session_id or ""
        try:
            observation = await self._dispatch(actions.parse(action), timeout_s)
        except (BadAction, TerminalError) as error:
            observation = self._observe(success=False, error=str(error))
        except SandboxError as error:
            observation = self._failed(action, error)
        observation.session_id, observation.action_type = action.session_id, action.action_type
        self.state.last_output = observation.output
        return observation

    def _failed(self, action: Tbench2Action, error: SandboxError) -> Tbench2Observation:
        """Our fault, or the episode's end: never a verdict."""
        dead = self._ended is not None or self._sandbox.died.done()
        info = {"no_verdict": self._outcome["no_verdict"]} if action.action_type == "evaluate" else {}
        return self._observe(success=False, error=str(self._ended or error), done=dead, info=info)

    async def _dispatch(self, action: actions.Action, timeout_s: float | None) -> Tbench2Observation:
        match action:
            case actions.Exec(command):
                return await self._exec(command, timeout_s or self._services.settings.command_timeout_s)
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
            case actions.Evaluate(keep):
                return await self._evaluate(keep)
            case actions.Close():
                await self.discard(End.CLOSED)
                return self._observe(output="Closed TB2 environment.", done=True)

    async def _exec(self, command: str, timeout_s: float) -> Tbench2Observation:
        spec = shell.script_command(self._snapshot.workdir, self._env)
        with shell.in_memory(_script(command), "command") as script, self._services.metrics.timed("exec"):
            result = await self._runner.run(lambda fds: self._sandbox.start(spec, fds), timeout_s, script)
        await self._check_alive(result.exit_code)
        hits = self._sandbox.take_hits()
        info: dict[str, Any] = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "seconds": round(result.seconds, 6),
            "output_bytes": result.output_bytes,
        }
        if hits:
            info["limits_hit"] = hits
        problems = list(hits.values())
        if result.timed_out:
            problems.insert(0, f"the command timed out after {timeout_s:g} s and was killed with all it had started")
        if not problems:
            return self._observe(output=result.output, info=info)
        error = "; ".join(problems)
        # A command that came to its own good end in spite of a limit was carried out.
        output, done = f"{result.output}\n[{error}]\n", result.exit_code == 0 and not result.timed_out
        return self._observe(output=output, success=done, error=error, info=info)

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
        await self._check_alive(result.exit_code)
        if result.timed_out or result.exit_code != 0:
            why = "timed out" if result.timed_out else result.output.strip() or f"exit code {result.exit_code}"
            return self._observe(success=False, error=f"file_path {path}: cannot be written: {why}")
        return self._observe(output=f"Wrote content to {path}")

    async def _evaluate(self, keep: bool) -> Tbench2Observation:
        self._evaluating = True
        try:
            with self._services.metrics.timed("evaluate"):
                return await self._verify(keep)
        except asyncio.CancelledError:
            self._give_up(Reason.CANCELLED, "it was cancelled before its end")
            raise
        except SandboxError as error:
            self._give_up(Reason.SANDBOX_DEAD, str(self._ended or error))
            raise
        finally:
            self._evaluating = False

    async def _verify(self, keep: bool) -> Tbench2Observation:
        try:
            async with self._watch.evaluation() as covers:
                grade = verifier.Grade(self._sandbox, self._snapshot, self._env, covers)
                verdict = await verifier.verify(grade, self._runner, self._run.verifier_folder)
            await self._check_alive()
            self._usage = dataclasses.asdict(await self._sandbox.usage())
            await self._check_alive(0)
        except NoVerdict as none:
            await self._check_alive()
            return self._without_verdict(none)
        return self._with_verdict(verdict, done=not keep)

    def _without_verdict(self, none: NoVerdict) -> Tbench2Observation:
        self._services.metrics.verdicts.labels(none.reason).inc()
        info: dict[str, Any] = {"no_verdict": none.reason, **self._watch.info()}
        if none.evidence is not None:
            info |= none.evidence.describe()
        return self._conclude(self._observe(output=none.output, success=False, error=str(none), info=info))

    def _with_verdict(self, verdict: Verdict, *, done: bool) -> Tbench2Observation:
        outcome = {1.0: "reward_1", 0.0: "reward_0"}.get(verdict.reward, "reward_other")
        self._services.metrics.verdicts.labels(outcome).inc()
        info: dict[str, Any] = {
            "tests_passed": verdict.reward == 1.0,
            "exit_code": verdict.evidence.exit_code,
            "seconds": round(verdict.evidence.seconds, 6),
            "usage": self._usage,
            **self._watch.info(),
            **verdict.evidence.describe(),
        }
        if hits := self._sandbox.take_hits():
            info["limits_hit"] = hits
        if verdict.harness is not None:
            info["harness"] = verdict.harness
        if verdict.rewards:
            info["rewards"] = verdict.rewards
        return self._conclude(self._observe(output=verdict.output, reward=verdict.reward, done=done, info=info))

    def _give_up(self, reason: Reason, message: str) -> None:
        """An evaluation under way comes to nothing, whatever it still answers."""
        if self._evaluating:
            self._evaluating = False
            self._run.forget_evidence()
            self._without_verdict(NoVerdict(reason, f"no verdict: {message}"))

    def _conclude(self, evaluation: Tbench2Observation) -> Tbench2Observation:
        """Record an evaluation's answer as the last one."""
        self._outcome = {"reward": evaluation.reward, "evaluation": evaluation.info}
        if evaluation.error:
            self._outcome |= {"no_verdict": evaluation.info["no_verdict"], "error": evaluation.error}
        shown = {key: getattr(evaluation, key) for key in ("reward", "done", "output", "error", "info")}
        whose = {"episode_id": self.episode_id, "task_id": self.task_id, "evaluated": _iso(time.time())}
        self._run.write_verdict({**whose, **shown})
        return evaluation

    async def _check_alive(self, exit_code: int = _KILLED) -> None:
        """A command that ended because its whole sandbox did is not the command's own doing.

        A killed command may be heard of before its sandbox's death is, or what limit it met, so the spawner is asked.
        Raises: SandboxError.
        """
        if self._ended is not None:
            raise SandboxError(str(self._ended))
        if exit_code != 0:
            await self._sandbox.confirm()

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

    # ------------------------------------------------------------ files
    def start_file_command(self, spec: CommandSpec, fds: Sequence[int]) -> Process:
        """Start a command that moves a file in or out. Raises: EpisodeEnded, SandboxError."""
        self.check_live()
        return self._sandbox.start(spec, fds)

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """A file is on its way: the episode is not idle."""
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1
            self.touch()

    @property
    def env(self) -> dict[str, str]:
        return self._env

    def worktree(self) -> Worktree:
        """Its changes so far. Blocks. Raises: EpisodeEnded."""
        try:
            return self._sandbox.worktree()
        except FileNotFoundError:
            self.check_live()
            raise SandboxError("the sandbox is dead: its worktree is gone") from None

    # ------------------------------------------------------------ ends
    def _arm_timers(self, *, http: bool) -> None:
        settings, loop = self._services.settings, self._services.loop
        idle_s = settings.idle_timeout_s(http=http)
        if idle_s is not None:
            self._timers[End.IDLE] = loop.call_later(idle_s, self._check_idle, idle_s)
        life_s = settings.episode_timeout_s(self._snapshot.config.agent.timeout_sec)
        if life_s is not None:
            message = f"the episode's time of {life_s:g} s is over (TB2_EPISODE_TIMEOUT_S)"
            self._timers[End.DEADLINE] = loop.call_later(life_s, self._end_soon, End.DEADLINE, message)

    def _check_idle(self, idle_s: float) -> None:
        """A running command is activity, however long it runs."""
        loop = self._services.loop
        left_s = (
            idle_s
            if self.busy or self._transfers or self.operations_running
            else self._last_active + idle_s - loop.time()
        )
        if left_s > 0:
            self._timers[End.IDLE] = loop.call_later(left_s, self._check_idle, idle_s)
        else:
            self._end_soon(End.IDLE, f"the episode was idle for {idle_s:g} s and was reaped (TB2_IDLE_TIMEOUT_S)")

    @property
    def operations_running(self) -> bool:
        return any(not operation.done() for operation in self.operations.values())

    def _sandbox_died(self, died: "asyncio.Future[str]") -> None:
        if self._ended is None:
            self._end_soon(End.DIED, died.result())

    def _end_soon(self, end: End, message: str) -> None:
        self._services.loop.create_task(self.discard(end, message))

    async def discard(self, end: End, message: str = "") -> None:
        """End the episode: kill all that runs in it, free its files and its slot. The first reason counts.

        Not stopped by cancellation of the caller: what has begun to end, ends.
        """
        if self._discarded is None:
            if self._slot is not None:
                self._slot.leave()
            self._ended = EpisodeEnded(end, message or f"the episode is over ({end})")
            self._give_up(Reason.CANCELLED if end in _BY_CLIENT else Reason.SANDBOX_DEAD, str(self._ended))
            self._discarded = self._services.loop.create_task(self._discard(self._ended))
        await asyncio.shield(self._discarded)

    async def _discard(self, ended: EpisodeEnded) -> None:
        self.state.terminal_ready = False
        for timer in self._timers.values():
            timer.cancel()
        for operation in self.operations.values():
            operation.cancel()
        self._terminals.close()
        self._runner.close()
        with contextlib.suppress(SandboxError):
            self._usage = dataclasses.asdict(await self._sandbox.usage())
        await close_sandbox(self._sandbox, self._services.proxy)
        if self._slot is not None:
            self._slot.release()
        self._services.metrics.ends.labels(ended.end).inc()
        summary = Ended(self.episode_id, self.task_id, ended.end, str(ended), self.reward, self.begun)
        self._run.write_result(self._result(ended))
        self._services.registry.remove(self, summary)
        await asyncio.to_thread(self._services.runs.end, self._run)
        self._log.info("episode ended", end=ended.end, reward=self.reward)

    def _result(self, ended: EpisodeEnded) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "episode_id": self.episode_id,
            "task_commit": self._snapshot.commit,
            "begun": _iso(self._begun),
            "seconds": round(time.time() - self._begun, 3),
            "steps": self.state.step_count,
            "end": ended.end,
            "end_message": str(ended),
            "usage": self._usage,
            **(self._outcome or {"reward": None}),
        }


def _script(command: str) -> bytes:
    """bash drops NUL bytes from scripts it reads; `read` would stop at the first instead."""
    return command.replace("\0", "").encode("utf-8", errors="surrogatepass")


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
