"""An unedited test.sh that fetches uv and runs its tests with uvx, in episodes without a network."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server, idle_again
from support.tasks import make_task
from tbench2_env.server.toolchain.prepare import Prepared

from .conftest import SCRIPTS, VERSION

AT_ONCE = 16


@pytest.fixture(scope="module")
def private_server(tmp_path_factory: pytest.TempPathFactory, cache: Path, prepared: Prepared) -> Iterator[Server]:
    """Without a way out, and with the kit."""
    folder = tmp_path_factory.mktemp("private")
    for name, script in SCRIPTS.items():
        make_task(folder / "tasks", name, script)
    env = {"TB2_NETWORK": "private", "TB2_CACHE_DIR": str(cache)}
    server = Server(folder, folder / "tasks", env).start()
    with idle_again(server):
        yield server
    assert server.stop() == 0


async def test_all_from_the_kit(private_server: Server, prepared: Prepared) -> None:
    async with private_server.client() as env:
        await env.reset(task_id="common")
        verdict = await env.evaluate(keep=True)
        assert verdict.reward == 1, verdict.observation.output
        told = verdict.observation.info["verifier"]["toolchain"]
        assert (told["kit"], told["used"], told["missing"]) == (prepared.kit.digest, "offline", [])
        assert (
            f"python {prepared.kit.manifest.pythons[VERSION].release} /logs/toolchain/python/"
            in verdict.observation.output
        )
        left = await env.exec(
            "ls -A /logs/toolchain /logs/verifier; find / -xdev -name 'uv*' -newer /etc/hostname; which uvx"
        )
        assert left.output.split() == ["/logs/toolchain:", "/logs/verifier:"], "the agent sees nothing of it"
        assert (await env.evaluate()).reward == 1


async def test_apt_does_not_try_again_where_nothing_is_within_reach(private_server: Server) -> None:
    """Three attempts are 7 s and more."""
    async with private_server.client() as env:
        await env.reset(task_id="after-apt")
        verdict = await env.evaluate()
        assert verdict.reward == 1
        assert "Err:1" in verdict.observation.output
        assert "Ign:" not in verdict.observation.output


async def test_cold_evaluations_at_once(private_server: Server) -> None:
    async def evaluate() -> float | None:
        async with private_server.client() as env:
            await env.reset(task_id="common")
            return (await env.evaluate()).reward

    assert await asyncio.gather(*(evaluate() for _ in range(AT_ONCE))) == [1.0] * AT_ONCE


@pytest.mark.parametrize(("task", "names"), [("no-python", "Python 3.99"), ("no-wheel", "answer==43")])
async def test_what_is_nowhere_to_be_had_is_no_verdict(private_server: Server, task: str, names: str) -> None:
    async with private_server.client() as env:
        await env.reset(task_id=task)
        verdict = await env.evaluate()
        assert (verdict.reward, verdict.observation.info["no_verdict"]) == (None, "harness_broken")
        assert f"test.sh needs {names}" in (verdict.observation.error or "")


async def test_without_a_kit(server: Server, tasks: Path) -> None:
    make_task(tasks, "no-kit", "uvx --help > /dev/null\necho 0.5 > /logs/verifier/reward.txt")
    async with server.client() as env:
        await env.reset(task_id="no-kit")
        told = (await env.evaluate()).observation.info["verifier"]["toolchain"]
        assert told["used"] == "nothing"
        assert "tbench2 toolchain prepare" in told["why"]
