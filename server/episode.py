"""One episode: a sandbox with a task in it, the actions it is asked for, its end, and what is recorded of all that.

Here is its life; `commands` is what an agent does in it, `evaluation` what a verifier does, `timers` when it ends.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from tbench2_env.isolation.changes import Worktree
from tbench2_env.isolation.process import Process, SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import CommandSpec
from tbench2_env.models import Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.server import actions, runs, shell
from tbench2_env.server.actions import Answer, BadAction
from tbench2_env.server.allotment import Allotment
from tbench2_env.server.commands import Commands
from tbench2_env.server.ending import End, EpisodeBusy, EpisodeEnded
from tbench2_env.server.engine import Engine
from tbench2_env.server.evaluation import Evaluations, Subject
from tbench2_env.server.images.store import Lease
from tbench2_env.server.pool import Slot
from tbench2_env.server.registry import Ended
from tbench2_env.server.runs import Run
from tbench2_env.server.sandboxes import close_sandbox
from tbench2_env.server.services import Services
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.tasks import Task
from tbench2_env.server.terminal import TerminalError
from tbench2_env.server.timers import Timers
from tbench2_env.server.verifier import Reason
from tbench2_env.server.warm import Order

log = structlog.get_logger()

#: Seconds that the answer of whoever ended an episode is given a start before its results are written.
_ANSWER_S = 0.002
_BY_CLIENT = (End.CLOSED, End.REPLACED, End.DELETED, End.DISCONNECTED)


class Episode:
    """One attempt at a task, from reset to its end. Actions are carried out one at a time.

    Made by `begin`. Whatever ends it calls `end`, the only way out; the first reason counts.
    """

    def __init__(self, services: Services, task: Task, snapshot: Snapshot, engine: Engine, run: Run) -> None:
        self._services, self._task, self._snapshot, self._engine, self._run = services, task, snapshot, engine, run
        self._allotment = Allotment.of(snapshot, engine)
        account = snapshot.environment.account
        env = shell.environment({"HOME": account.home}, snapshot.env, self._allotment.env)
        #: As what its agent's commands run.
        self.caller = shell.Caller(snapshot.workdir, env, account.ids)
        self._turn = asyncio.Lock()
        self._begun = time.time()
        self._timers = Timers(services.loop, self._is_active, self.end)
        self._ended: EpisodeEnded | None = None
        self._ending: asyncio.Task[None] | None = None
        self._slot: Slot | None = None
        self._queued_s = 0.0
        self._transfers = 0
        self._sandbox: Sandbox
        self._lease: Lease
        self._commands: Commands
        self._evaluations: Evaluations
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
        settings, timeout_sec = services.settings, episode._snapshot.config.agent.timeout_sec
        episode._timers.arm(settings.idle_timeout_s(http=own_slot), settings.episode_timeout_s(timeout_sec))
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
        snapshot, lease = await engine.snapshots.take(task)
        try:
            episode = await cls._open(engine, services, task, snapshot, wanted_id)
        except BaseException:
            lease.close()
            raise
        episode._lease = lease
        return episode

    @classmethod
    async def _open(
        cls, engine: Engine, services: Services, task: Task, snapshot: Snapshot, wanted_id: str | None
    ) -> "Episode":
        episode_id = services.registry.new_id(wanted_id)
        run = services.runs.begin(task.task_id, episode_id)
        episode = cls(services, task, snapshot, engine, run)
        try:
            sandbox = episode._sandbox = await episode._open_sandbox()
        except BaseException:
            services.registry.forget(episode_id)
            services.runs.end(run, None)
            raise
        episode._commands = Commands(services, sandbox, episode.caller, episode._check_alive)
        subject = Subject(snapshot, episode._allotment, sandbox, run, engine.uv_cache, episode._check_alive)
        episode._evaluations = Evaluations(services, subject)
        services.registry.add(episode)
        episode.state.terminal_ready = True
        sandbox.died.add_done_callback(episode._sandbox_died)
        return episode

    async def _open_sandbox(self) -> Sandbox:
        order = Order(self._engine, self._snapshot, self._allotment.network, self._allotment.limits)
        sandbox, temperature = await self._services.warm.open(self._task.path, order)
        self._services.metrics.sandboxes.labels(temperature).inc()
        return sandbox

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
        return self._evaluations.reward

    def first_observation(self) -> Tbench2Observation:
        """What reset answers."""
        return self._observe(action_type="reset", info=self.describe(), reward=0.0)

    def describe(self) -> dict[str, Any]:
        """`info` of reset: isolation, limits, and what the task needs and does not get."""
        config, settings = self._snapshot.config, self._services.settings
        return {
            "environment": self._snapshot.environment.describe(),
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
            self._run.record(runs.entry(action, observation, begun))
            return observation

    def check_live(self) -> None:
        """Raises: EpisodeEnded."""
        if self._ended is not None:
            raise self._ended

    def touch(self) -> None:
        """Something was done with the episode: it is not idle."""
        self._timers.touch()

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
            answer = await self._dispatch(actions.parse(action), timeout_s)
        except (BadAction, TerminalError) as error:
            answer = Answer(success=False, error=str(error))
        except SandboxError as error:
            answer = self._failed(action, error)
        observation = self._observe(**vars(answer), session_id=action.session_id, action_type=action.action_type)
        self.state.last_output = observation.output
        return observation

    def _failed(self, action: Tbench2Action, error: SandboxError) -> Answer:
        """Our fault, or the episode's end: never a verdict."""
        dead = self._ended is not None or self._sandbox.died.done()
        info = {"no_verdict": self._evaluations.outcome["no_verdict"]} if action.action_type == "evaluate" else {}
        return Answer(success=False, error=str(self._ended or error), done=dead, info=info)

    async def _dispatch(self, action: actions.Action, timeout_s: float | None) -> Answer:
        """Raises: BadAction, TerminalError, SandboxError."""
        commands, terminals = self._commands, self._commands.terminals
        match action:
            case actions.Exec(command):
                return await commands.run(command, timeout_s or self._services.settings.command_timeout_s)
            case actions.Start(name, command):
                return await commands.start(name, command)
            case actions.Write(name, text):
                return Answer(await terminals.get(name).write(text))
            case actions.View(name):
                return Answer(terminals.get(name).view())
            case actions.Wait(name, seconds):
                return Answer(await terminals.get(name).wait(seconds))
            case actions.Kill(name):
                terminals.kill(name)
                return Answer(f"Killed session {name}")
            case actions.WriteFile(path, content):
                return await commands.write_file(path, content)
            case actions.Evaluate(keep):
                return await self._evaluations.evaluate(keep=keep)
            case actions.Close():
                await self.discard(End.CLOSED)
                return Answer("Closed TB2 environment.", done=True)

    async def _check_alive(self, exit_code: int = -1) -> None:
        """See `ending.CheckAlive`."""
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

    def worktree(self) -> Worktree:
        """Its changes so far. Blocks. Raises: EpisodeEnded."""
        try:
            return self._sandbox.worktree()
        except FileNotFoundError:
            self.check_live()
            raise SandboxError("the sandbox is dead: its worktree is gone") from None

    # ------------------------------------------------------------ ends
    def _is_active(self) -> bool:
        return self.busy or self._transfers > 0 or self.operations_running

    @property
    def operations_running(self) -> bool:
        return any(not operation.done() for operation in self.operations.values())

    def _sandbox_died(self, died: "asyncio.Future[str]") -> None:
        self.end(End.DIED, died.result())

    async def discard(self, end: End, message: str = "") -> None:
        """`end` it, and return when that is done. Not stopped by cancellation of the caller."""
        await asyncio.shield(self.end(end, message))

    def end(self, end: End, message: str = "") -> "asyncio.Task[None]":
        """Begin to end the episode, which is over for whoever asks from now on. The first reason counts.

        When the task is done, nothing of it runs any more, and its slot is free; its results are then written, and its
        files deleted, in the background.
        """
        if self._ending is None:
            if self._slot is not None:
                self._slot.leave()
            self.state.terminal_ready = False
            self._ended = EpisodeEnded(end, message or f"the episode is over ({end})")
            self._evaluations.give_up(Reason.CANCELLED if end in _BY_CLIENT else Reason.SANDBOX_DEAD, str(self._ended))
            self._ending = self._services.see_to(self._discard(self._ended))
        return self._ending

    async def _discard(self, ended: EpisodeEnded) -> None:
        self._timers.cancel()
        for operation in self.operations.values():
            operation.cancel()
        self._commands.close()
        self._evaluations.close()
        if (usage := await close_sandbox(self._sandbox, self._services.proxy)) is not None:
            self._evaluations.usage = dataclasses.asdict(usage)
        self._lease.close()
        if self._slot is not None:
            self._slot.release()
        self._services.metrics.ends.labels(ended.end).inc()
        summary = Ended(
            self.episode_id, self.task_id, ended.end, str(ended), self.reward, self.begun, self.run_folder
        )  # fmt: skip
        self._services.registry.remove(self, summary)
        self._services.see_to(self._write_result(ended))
        self._log.info("episode ended", end=ended.end, reward=self.reward)

    async def _write_result(self, ended: EpisodeEnded) -> None:
        """By a thread, which the answer to whoever ended the episode would have to share the interpreter with."""
        result = self._result(ended)
        await asyncio.sleep(_ANSWER_S)
        self._services.runs.end(self._run, result)

    def _result(self, ended: EpisodeEnded) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "episode_id": self.episode_id,
            "task_commit": self._snapshot.commit,
            "begun": runs.iso(self._begun),
            "seconds": round(time.time() - self._begun, 3),
            "steps": self.state.step_count,
            "end": ended.end,
            "end_message": str(ended),
            "usage": self._evaluations.usage,
            **(self._evaluations.outcome or {"reward": None}),
        }
