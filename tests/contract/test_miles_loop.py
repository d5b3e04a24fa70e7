"""What a Miles trainer does: many episodes at once on a server with fewer slots, each in the same few moves."""

import asyncio
import json
import random
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openenv.core.generic_client import GenericEnvClient

from support.server import MakeServer, Server, eventually
from support.tasks import solution
from tbench2_env import StepResult, Tbench2Action, Tbench2Env, Tbench2Observation

_EPISODES, _SLOTS = 32, 16
_OUTPUT_CHARS = 4000
_MESSAGE_TIMEOUT_S = 1200.0
#: The trainer waits 1 to 5 seconds; a test need not.
_BACKOFF_S = (0.05, 0.25)
_DEFAULT_RUNS = "/tmp/tbench2_env_runs"
_PURGE = f"find {_DEFAULT_RUNS} -mindepth 1 -maxdepth 1 ! -name repo_cache -exec rm -rf {{}} + 2>/dev/null || true"
_CLOSED = {"ConnectionClosedOK", "ConnectionClosedError", "ConnectionClosed"}


def is_retryable(error: Exception) -> bool:
    """The trainer's rule: by text, or by the exception's class name."""
    return "CAPACITY_REACHED" in str(error) or type(error).__name__ in _CLOSED


@dataclass
class Trainer:
    """One rollout's view of the server, and how often it was full."""

    url: str
    runs: Path
    refusals: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)

    async def with_env(self, body: Callable[[Tbench2Env], Awaitable["Sample"]]) -> "Sample":
        while True:
            try:
                async with Tbench2Env(base_url=self.url, message_timeout_s=_MESSAGE_TIMEOUT_S) as env:
                    return await body(env)
            except Exception as error:
                if not is_retryable(error):
                    raise
                self.refusals += 1
                self.full.set()
                await asyncio.sleep(random.uniform(*_BACKOFF_S))

    async def episode(self, task_id: str, commands: list[str]) -> "Sample":
        async def body(env: Tbench2Env) -> Sample:
            instruction = (await env.reset(task_id=task_id)).observation.instruction
            # The policy "thinks" until the server has refused somebody: so all slots are held at the same time.
            await self.full.wait()
            seen = []
            for command in commands:
                step = await env.step(Tbench2Action(action_type="exec", command=command))
                seen.append(step.observation.output[:_OUTPUT_CHARS] or "(no output)")
            verdict = await env.step(Tbench2Action(action_type="evaluate"))
            # In the recipe the server has the default folder, and this command names it.
            purge = _PURGE.replace(_DEFAULT_RUNS, str(self.runs))
            await env.step(Tbench2Action(action_type="exec", command=purge))
            return Sample(task_id, instruction, seen, verdict)

        return await self.with_env(body)


@dataclass(frozen=True)
class Sample:
    task_id: str
    instruction: str
    seen: list[str]
    verdict: StepResult[Tbench2Observation]

    @property
    def reward(self) -> float | None:
        """None: the trainer drops the sample, for there is no canonical verdict."""
        observation = self.verdict.observation
        canonical = self.verdict.reward is not None and not observation.error
        if not canonical or observation.info.get("harness") != "tests/test.sh":
            return None
        assert self.verdict.reward is not None
        return float(self.verdict.reward)


def playable(tasks: Path) -> list[str]:
    """The sample tasks whose commands this host has."""
    names = []
    for toml in sorted(tasks.glob("*/task.toml")):
        needs = tomllib.loads(toml.read_text()).get("metadata", {}).get("requires", [])
        if all(shutil.which(command) for command in needs):
            names.append(toml.parent.name)
    return names


async def test_32_episodes_on_16_slots_all_get_their_right_verdict(make_server: MakeServer, tmp_path: Path) -> None:
    runs = tmp_path / "tmp" / "tbench2_env_runs"
    (runs / "repo_cache" / "terminal-bench-2-main").mkdir(parents=True)
    server = make_server({"MAX_CONCURRENT_ENVS": str(_SLOTS), "TB2_OUTPUT_DIR": str(runs)})
    names = playable(server.tasks)
    assert len(names) >= 10
    trainer = Trainer(server.url, runs)

    # Every other episode is solved, and the halves swap with each round through the tasks.
    plan = [(names[number % len(names)], (number + number // len(names)) % 2 == 0) for number in range(_EPISODES)]
    samples = await asyncio.gather(
        *(
            trainer.episode(name, ["seq 3000", solution(server.tasks / name) if solved else "true", "ls -la"])
            for name, solved in plan
        )
    )

    assert [(sample.task_id, sample.reward) for sample in samples] == [
        (name, 1.0 if solved else 0.0) for name, solved in plan
    ], [sample.verdict.observation for sample in samples if sample.reward is None]
    assert trainer.refusals >= _EPISODES - _SLOTS
    for sample in samples:
        assert sample.instruction == (server.tasks / sample.task_id / "instruction.md").read_text()
        assert sample.seen[0] == "".join(f"{n}\n" for n in range(1, 3001))[:_OUTPUT_CHARS]
        assert sample.seen[2].startswith("total ")

    eventually(lambda: len(list(runs.glob("*/result.json"))) == _EPISODES, 5)
    results = [json.loads(path.read_text()) for path in runs.glob("*/result.json")]
    assert Counter((result["task_id"], result["reward"]) for result in results) == Counter(
        (name, float(solved)) for name, solved in plan
    )
    assert (runs / "repo_cache" / "terminal-bench-2-main").is_dir()


async def test_as_many_workers_as_slots_are_never_refused(make_server: MakeServer) -> None:
    """Each begins its next episode when its last is closed; the slot of a closed session counts as free."""
    workers = 3
    server = make_server({"MAX_CONCURRENT_ENVS": str(workers)})

    async def work() -> None:
        for _ in range(6):
            async with server.client() as env:
                await env.reset(task_id="ok")
                await env.exec("sleep 99 & echo ok > out.txt")

    await asyncio.gather(*(work() for _ in range(workers)))


async def test_the_purge_of_one_episode_harms_no_other(make_server: MakeServer, tmp_path: Path) -> None:
    runs = tmp_path / "tbench2_env_runs"
    server = make_server({"TB2_OUTPUT_DIR": str(runs)})
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok", episode_id="a")
        await b.reset(task_id="ok", episode_id="b")
        await b.exec("echo ok > out.txt; mkdir -p /tmp/tbench2_env_runs/mine")
        for folder in (_DEFAULT_RUNS, str(runs)):
            purged = await a.exec(_PURGE.replace(_DEFAULT_RUNS, folder))
            assert (purged.success, purged.output, purged.info["exit_code"]) == (True, "", 0)
        assert (await b.exec("ls /tmp/tbench2_env_runs")).output == "mine\n"
        assert (await b.evaluate()).reward == 1.0
    assert sorted(path.name for path in runs.iterdir()) == ["ok.a", "ok.b"]
    eventually(lambda: (runs / "ok.a" / "result.json").exists(), 3)


@pytest.mark.parametrize("client", ["ours", "openenv's"])
async def test_an_episode_cancelled_in_mid_step_frees_its_slot_at_once(make_server: MakeServer, client: str) -> None:
    server = make_server({"MAX_CONCURRENT_ENVS": "1", "TB2_COMMAND_TIMEOUT_S": "90"})

    async def episode() -> None:
        if client == "ours":
            async with Tbench2Env(base_url=server.url, message_timeout_s=_MESSAGE_TIMEOUT_S) as env:
                await env.reset(task_id="ok")
                await env.step(Tbench2Action(command="sleep 60 & sleep 60"))
        else:
            async with GenericEnvClient(base_url=server.url, message_timeout_s=_MESSAGE_TIMEOUT_S) as other:
                await other.reset(task_id="ok")
                await other.step({"command": "sleep 60 & sleep 60"})

    rollout = asyncio.create_task(episode())
    while sleepers(server) < 2:
        await asyncio.sleep(0.05)
        assert not rollout.done()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout

    cancelled_at = time.monotonic()
    eventually(lambda: sleepers(server) == 0, 1, lambda: f"still running: {server.descendants()}")
    await asyncio.to_thread(server.assert_idle, 1)
    await play_once_admitted(server)
    assert time.monotonic() - cancelled_at < 2  # of which creating the new episode is the most on a busy host


def sleepers(server: Server) -> int:
    return sum("sleep 60" in line for line in server.descendants().values())


async def play_once_admitted(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        assert (await env.exec("pgrep -c sleep")).output == "0\n"
