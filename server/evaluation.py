"""Evaluations of an episode: a verifier's run, what it answers, and what is kept of it for the end."""

import asyncio
import dataclasses
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Network
from tbench2_env.server import shell, threads, verifier
from tbench2_env.server.actions import Answer
from tbench2_env.server.allotment import Allotment
from tbench2_env.server.ending import CheckAlive
from tbench2_env.server.runs import Run, iso
from tbench2_env.server.services import Services
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.toolchain import offer, pins
from tbench2_env.server.toolchain.kit import Kit
from tbench2_env.server.toolchain.uv_cache import UvCache
from tbench2_env.server.verifier import NoVerdict, Reason, Verdict
from tbench2_env.server.watch import Watch


@dataclasses.dataclass(frozen=True)
class Subject:
    """The episode that is evaluated."""

    snapshot: Snapshot
    allotment: Allotment
    sandbox: Sandbox
    run: Run
    uv_cache: UvCache | None
    check_alive: CheckAlive


class Evaluations:
    """The evaluations of one episode, one at a time. The last one counts, also when it came to nothing."""

    def __init__(self, services: Services, subject: Subject) -> None:
        self._services, self._subject = services, subject
        self._snapshot, self._sandbox, self._run = subject.snapshot, subject.sandbox, subject.run
        #: Verifiers are root, whoever the agent is.
        self._env = {
            **shell.environment(subject.snapshot.env, subject.allotment.env),
            **subject.snapshot.config.verifier.env,
        }
        self._runner = shell.Runner(services.settings.output_limit_bytes)
        self._watch = Watch(subject.sandbox, self._env, subject.snapshot.workdir, services.settings.tamper)
        self._evaluating = False
        #: `reward` and `evaluation`, with `no_verdict` and `error` when there is none; empty before the first.
        self.outcome: dict[str, Any] = {}
        #: What the sandbox had used when it was last measured, see `isolation.spec.Usage`.
        self.usage: dict[str, Any] = {}

    @property
    def reward(self) -> float | None:
        return self.outcome.get("reward")

    async def evaluate(self, *, keep: bool) -> Answer:
        """Run the verifier; the answer is done unless `keep`, or there is no verdict. Raises: SandboxError."""
        self._evaluating = True
        try:
            with self._services.metrics.timed("evaluate"):
                return await self._verify(keep)
        except asyncio.CancelledError:
            self.give_up(Reason.CANCELLED, "it was cancelled before its end")
            raise
        except SandboxError as error:
            self.give_up(Reason.SANDBOX_DEAD, str(error))
            raise
        finally:
            self._evaluating = False

    def give_up(self, reason: Reason, message: str) -> None:
        """An evaluation under way comes to nothing, whatever it still answers. Without one, nothing happens."""
        if self._evaluating:
            self._evaluating = False
            self._run.forget_evidence()
            self._without_verdict(NoVerdict(reason, f"no verdict: {message}"))

    def close(self) -> None:
        self._runner.close()

    async def _verify(self, keep: bool) -> Answer:
        check_alive = self._subject.check_alive
        try:
            async with self._offered() as offered:
                covers, alive = await threads.both(self._watch.before(), self._sandbox.process_names())
                grade = verifier.Grade(self._sandbox, self._snapshot, self._env, alive, covers, offered)
                result = await verifier.run(grade, self._runner)
                await check_alive(0)
                judging = self._watch.after(lambda: verifier.judge(grade, result, self._run.verifier_folder))
                verdict, usage = await threads.both(judging, self._sandbox.usage(confirm=True))
            self.usage = dataclasses.asdict(usage)
            await check_alive(0)
        except NoVerdict as none:
            await check_alive()
            return self._without_verdict(none)
        except SandboxError:
            await check_alive()  # what failed because it died failed for that reason
            raise
        return self._with_verdict(verdict, done=not keep)

    def _offered(self) -> AbstractAsyncContextManager[offer.Offer]:
        """What a verifier gets of the kit or the uv cache that there is now."""
        script = self._snapshot.test_script
        if script is None or not pins.read(script.text).uses_any:
            return nullcontext(offer.Offer())
        kit = Kit.open(self._services.settings.cache_dir)
        network = self._subject.allotment.network.network is not Network.PRIVATE
        return offer.held(kit, self._subject.uv_cache, script.text, self._env, network=network)

    def _without_verdict(self, none: NoVerdict) -> Answer:
        self._services.metrics.verdicts.labels(none.reason).inc()
        info: dict[str, Any] = {"no_verdict": none.reason, **self._watch.info()}
        if none.evidence is not None:
            info |= none.evidence.describe()
        return self._conclude(Answer(none.output, success=False, error=str(none), info=info))

    def _with_verdict(self, verdict: Verdict, *, done: bool) -> Answer:
        outcome = {1.0: "reward_1", 0.0: "reward_0"}.get(verdict.reward, "reward_other")
        self._services.metrics.verdicts.labels(outcome).inc()
        info: dict[str, Any] = {
            "tests_passed": verdict.reward == 1.0,
            "exit_code": verdict.evidence.exit_code,
            "seconds": round(verdict.evidence.seconds, 6),
            "usage": self.usage,
            **self._watch.info(),
            **verdict.evidence.describe(),
        }
        if hits := self._sandbox.take_hits():
            info["limits_hit"] = hits
        if verdict.harness is not None:
            info["harness"] = verdict.harness
        if verdict.rewards:
            info["rewards"] = verdict.rewards
        return self._conclude(Answer(verdict.output, reward=verdict.reward, done=done, info=info))

    def _conclude(self, answer: Answer) -> Answer:
        """Record an evaluation's answer as the last one."""
        self.outcome = {"reward": answer.reward, "evaluation": answer.info}
        if answer.error:
            self.outcome |= {"no_verdict": answer.info["no_verdict"], "error": answer.error}
        shown = {key: getattr(answer, key) for key in ("reward", "done", "output", "error", "info")}
        whose = {"episode_id": self._run.episode_id, "task_id": self._run.task_id, "evaluated": iso(time.time())}
        self._run.write_verdict({**whose, **shown})
        return answer
