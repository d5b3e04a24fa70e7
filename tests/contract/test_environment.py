"""`Tbench2Environment`, openenv's interface in process: one more session of a server, or on its own."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.processes import matching
from support.server import eventually
from tbench2_env.server.app import running
from tbench2_env.server.environment import Tbench2Action, Tbench2Environment, Tbench2Observation, Tbench2State
from tbench2_env.server.pool import CapacityReached
from tbench2_env.server.services import Services
from tbench2_env.server.session import NoEpisode
from tbench2_env.server.settings import Settings
from tbench2_env.server.tasks import UnknownTask

_SLOTS = 4
_SOLVE = Tbench2Action(command="echo ok > out.txt")
_EVALUATE = Tbench2Action(action_type="evaluate")


@pytest.fixture
async def services(tmp_path: Path, tasks: Path) -> AsyncIterator[Services]:
    """What a server of four slots has; no slot is taken after the test, and no worktree left."""
    settings = Settings(
        tasks_dir=tasks,
        output_dir=tmp_path / "runs",
        scratch_dir=tmp_path / "scratch",
        max_concurrent_envs=_SLOTS,
        registry="none",
    )
    async with running(settings) as services:
        engine = await services.engines.get()
        yield services
        await until(lambda: services.pool.active == 0)
        await until(lambda: not list((engine.spawner.folder / "episodes").iterdir()))
    assert not list((tmp_path / "scratch").iterdir())


async def until(true: Callable[[], bool], within_s: float = 3) -> None:
    """`eventually`, in a thread: what is waited for happens on this loop."""
    await asyncio.to_thread(eventually, true, within_s)


async def test_an_asynchronous_episode(services: Services) -> None:
    env = Tbench2Environment(services)
    assert env.state == Tbench2State()
    reset = await env.reset_async(task_id="ok", episode_id="e-1", seed=1)
    assert isinstance(reset, Tbench2Observation)
    assert (reset.task_id, reset.done, reset.metadata["episode_id"]) == ("ok", False, "e-1")
    await env.step_async(_SOLVE)
    verdict = await env.step_async(_EVALUATE)
    assert (verdict.reward, verdict.done, verdict.info["harness"]) == (1.0, True, "tests/test.sh")
    assert isinstance(env.state, Tbench2State)
    assert (env.state.episode_id, env.state.step_count) == ("e-1", 2)
    env.close()


async def test_a_blocking_episode_in_another_thread(services: Services) -> None:
    def play() -> float | None:
        env = Tbench2Environment(services)
        assert env.reset(task_id="ok").instruction
        assert env.step(Tbench2Action(command="pwd")).output == "/app\n"
        env.step(_SOLVE)
        verdict = env.step(_EVALUATE)
        env.close()
        assert env.state == Tbench2State()
        return verdict.reward

    assert await asyncio.to_thread(play) == 1.0
    assert services.pool.active == 0, "off the loop, close waits"


async def test_concurrent_environments_on_one_services(services: Services) -> None:
    assert Tbench2Environment.SUPPORTS_CONCURRENT_SESSIONS
    environments = [Tbench2Environment(services) for _ in range(_SLOTS)]

    async def play(number: int, env: Tbench2Environment) -> float | None:
        await env.reset_async(task_id="ok")
        await env.step_async(Tbench2Action(command=f"echo {number} > mine"))
        if number % 2:
            await env.step_async(_SOLVE)
        assert (await env.step_async(Tbench2Action(command="cat mine"))).output == f"{number}\n"
        return (await env.step_async(_EVALUATE)).reward

    rewards = await asyncio.gather(*(play(number, env) for number, env in enumerate(environments)))
    assert rewards == [0.0, 1.0, 0.0, 1.0]
    assert services.pool.active == _SLOTS
    for env in environments:
        env.close()


async def test_capacity_is_shared_with_all_sessions(services: Services) -> None:
    slots = [services.pool.take() for _ in range(_SLOTS - 1)]
    first, second = Tbench2Environment(services), Tbench2Environment(services)
    await first.reset_async(task_id="ok")
    with pytest.raises(CapacityReached, match="CAPACITY_REACHED"):
        await second.reset_async(task_id="ok")
    await first.reset_async(task_id="ok")  # again: it needs no second slot
    first.close()
    await until(lambda: services.pool.active == _SLOTS - 1)
    assert (await second.reset_async(task_id="ok")).success
    second.close()
    for slot in slots:
        slot.release()


async def test_close_is_idempotent_and_not_the_end(services: Services) -> None:
    env = Tbench2Environment(services)
    await asyncio.to_thread(env.close)
    await env.reset_async(task_id="ok")
    await asyncio.to_thread(env.close)
    await asyncio.to_thread(env.close)
    with pytest.raises(NoEpisode, match="reset"):
        await env.step_async(_SOLVE)
    assert (await env.reset_async(task_id="ok")).success
    await asyncio.to_thread(env.close)


async def test_an_unknown_task_is_the_callers_fault(services: Services) -> None:
    env = Tbench2Environment(services)
    with pytest.raises(UnknownTask, match="nowhere"):
        await env.reset_async(task_id="nowhere")
    assert (await env.reset_async(task_id="ok")).success
    env.close()


def test_metadata() -> None:
    metadata = Tbench2Environment().get_metadata()
    assert (metadata.name, metadata.version) == ("tbench2_env", "0.1.0")


# ------------------------------------------------------------ standing alone
_STANDALONE = """
import asyncio, json, os, threading
from tbench2_env.server.environment import Tbench2Action, Tbench2Environment
from tbench2_env.server.settings import SettingsError

def play(env):
    task_id = env.reset().task_id
    env.step(Tbench2Action(command="echo ok > out.txt"))
    return [task_id, env.step(Tbench2Action(action_type="evaluate")).reward]

async def play_asynchronously():
    env = Tbench2Environment()
    await env.reset_async(task_id="ok")
    verdict = await env.step_async(Tbench2Action(action_type="evaluate"))
    env.close()
    return ["ok", verdict.reward]

os.environ["MAX_CONCURRENT_ENVS"] = "none"
try:
    refused = Tbench2Environment().reset()
except SettingsError as error:
    refused = str(error)
del os.environ["MAX_CONCURRENT_ENVS"]

env, other = Tbench2Environment(), Tbench2Environment()
played = [play(env), play(other)]
env.close()
env.close()
played.append(play(env))
env.close()
other.close()
played.append(asyncio.run(play_asynchronously()))
threads = [thread.name for thread in threading.enumerate() if thread.name == "tbench2-env"]

forgotten = Tbench2Environment()
forgotten.reset()
forgotten.step(Tbench2Action(command=f"setsid sleep {os.getpid()}.998 >/dev/null 2>&1 &"))
print(json.dumps({"refused": refused, "played": played, "threads": threads, "pid": os.getpid()}))
"""


@dataclass(frozen=True)
class Alone:
    """What became of the program."""

    folder: Path
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return report


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Alone:
    """The program in an interpreter of its own, because it is configured by the environment and starts threads."""
    folder = tmp_path_factory.mktemp("alone")
    env = {
        "PATH": os.environ["PATH"],
        "TB2_TASKS_DIR": str(tasks),
        "TB2_DEFAULT_TASK_ID": "ok",
        "TB2_REGISTRY": "none",
        "TB2_OUTPUT_DIR": str(folder / "runs"),
        "TB2_SCRATCH_DIR": str(folder / "scratch"),
    }
    # Only these warnings are ours to cause; what openenv's imports may warn of is not.
    argv = [sys.executable, "-W", "error::RuntimeWarning", "-W", "error::ResourceWarning", "-c", _STANDALONE]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return Alone(folder, done.stdout, done.stderr)


def test_alone_it_takes_its_configuration_from_the_environment(alone: Alone) -> None:
    assert alone.report["played"] == [["ok", 1.0], ["ok", 1.0], ["ok", 1.0], ["ok", 0.0]]


def test_alone_and_configured_wrongly_it_says_so_and_leaves_nothing(alone: Alone) -> None:
    assert "MAX_CONCURRENT_ENVS" in alone.report["refused"]
    assert "Warning" not in alone.stderr
    assert alone.report["threads"] == []


def test_alone_and_never_closed_it_still_leaves_nothing(alone: Alone) -> None:
    eventually(lambda: not list((alone.folder / "scratch").iterdir()), 5)
    assert not matching(f"sleep {alone.report['pid']}.998")


def test_alone_it_leaves_standard_output_to_the_program(alone: Alone) -> None:
    assert len(alone.stdout.splitlines()) == 1
    assert "episode began" in alone.stderr
