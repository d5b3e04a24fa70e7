"""CASES.md 25: what task.toml bounds is bounded, whoever enforces it here; only the offender notices, and is told."""

import asyncio
import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from support.processes import Stopped, inits, spawner
from support.server import MakeServer, Server, idle_again
from support.talk import soon
from support.tasks import make_task
from tbench2_env import Tbench2Env
from tbench2_env.server.limits import PROCESSES_MAX

from .conftest import AddTask

#: In a mount namespace in which no hierarchy of cgroups is to be seen, as where the node delegates none.
NO_CGROUPS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs x /sys/fs/cgroup && exec "$@"', "sh")
#: Within how many seconds a neighbour's calls are answered, half of them, and each.
_SOON_S, _HELD_UP_S = 0.5, 3.0
TOML = "[environment]\ncpus = 1\nmemory = '2G'\nstorage = '{storage}'\n[verifier]\ntimeout_sec = 30.0\n"


@pytest.fixture(scope="module")
def bounded_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`large` may have 1 GiB of storage, `small` 256 MiB and hence 16,384 files; `ok` has no limits of its own."""
    folder = tmp_path_factory.mktemp("bounded-tasks")
    make_task(folder, "ok")
    make_task(folder, "large", toml=TOML.format(storage="1G"))
    make_task(folder, "small", toml=TOML.format(storage="256M"))
    make_task(folder, "nice", "nice > /logs/verifier/reward.txt")
    return folder


@pytest.fixture(scope="module", params=["cgroups as they are", "no cgroups"])
def shared_bounding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bounded_tasks: Path
) -> Iterator[Server]:
    wrap = () if request.param == "cgroups as they are" else NO_CGROUPS
    env = {"TB2_COMMAND_TIMEOUT_S": "60", "TB2_WARM": "0"}  # first processes are counted
    server = Server(tmp_path_factory.mktemp("bounding"), bounded_tasks, env, wrap).start()
    yield server
    assert server.stop() == 0
    assert not list(server.scratch.iterdir())


@pytest.fixture
def bounding(shared_bounding: Server) -> Iterator[Server]:
    """A server on this host as it is, and one on a host without cgroups."""
    with idle_again(shared_bounding):
        yield shared_bounding


class Neighbour:
    """Episode B, and how long it and /health took meanwhile, each time."""

    def __init__(self) -> None:
        self.exec_s: list[float] = []
        self.health_s: list[float] = []

    async def ask(self, server: Server, env: Tbench2Env, http: httpx.AsyncClient) -> None:
        begun = time.monotonic()
        assert (await env.exec("echo well >f; cat f")).output == "well\n"
        between = time.monotonic()
        assert (await http.get("/health")).status_code == 200
        self.exec_s.append(between - begun)
        self.health_s.append(time.monotonic() - between)


@contextlib.asynccontextmanager
async def unharmed_neighbour(server: Server) -> AsyncIterator[None]:
    """Meanwhile, ten times a second, B's commands and /health are answered soon.

    Not each of them as soon: the disk is everybody's, and what other tests write beside this one may hold up a call.
    """
    neighbour = Neighbour()

    async def live() -> None:
        async with server.client() as env, httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            await env.reset(task_id="ok")
            while True:
                await neighbour.ask(server, env, http)
                await asyncio.sleep(0.1)

    living = asyncio.create_task(live())
    try:
        await soon(lambda: neighbour.health_s or living.done(), 10)
        yield
        assert not living.done(), living.exception()
    finally:
        living.cancel()
        await asyncio.wait([living])
    for took_s in (neighbour.exec_s, neighbour.health_s):
        assert statistics.median(took_s) < _SOON_S, took_s
        assert max(took_s) < _HELD_UP_S, took_s


async def assert_dead(env: Tbench2Env, reason: str) -> None:
    """Later actions say why the episode is over, and an evaluation is none, never a reward of 0."""
    evaluated = await env.evaluate()
    for answer in (await env.exec("echo hello"), evaluated.observation):
        assert not answer.success
        assert reason in answer.error
    assert evaluated.done
    assert evaluated.reward is None
    assert evaluated.observation.info["no_verdict"] == "sandbox_dead"


# ---------------------------------------------------------------- each limit, with a neighbour
async def test_a_memory_hog(bounding: Server) -> None:
    """8 GiB asked of a 2 GiB task."""
    hog = 'python3 -c \'\nheld = []\nfor n in range(128): held.append(bytearray(b"x") * (64 << 20))\nprint("had it")\''
    async with bounding.client() as env, unharmed_neighbour(bounding):
        await env.reset(task_id="large")
        answer = await env.exec(hog)
        assert not answer.success
        assert "memory" in answer.error
        assert re.search(r"2\.0 GiB|2048 MiB", answer.error)
        assert "had it" not in answer.output
        if answer.done:
            await assert_dead(env, "2.0 GiB")
        else:  # the kernel killed the hog alone
            assert (await env.exec("echo alive")).output == "alive\n"


async def test_a_fork_bomb(bounding: Server) -> None:
    """What it starts cannot be more than the limit, and goes with the command."""
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 3"
    async with bounding.client() as env, unharmed_neighbour(bounding):
        await env.reset(task_id="large")
        answer = await env.exec(bomb)
        assert str(PROCESSES_MAX) in answer.error
        assert "processes" in answer.error


async def test_commands_and_verifiers_are_nice(bounding: Server) -> None:
    """By the weight of the episode's cgroup, or each by itself; its session, too, by which the kernel may group."""
    async with bounding.client() as env:
        await env.reset(task_id="nice")
        niceness, autogroup, *_ = (await env.exec("nice; cat /proc/self/autogroup; echo")).output.splitlines()
        cgroup = re.search(r":cpu[:,].*/(episode\..*)", (await env.exec("cat /proc/self/cgroup")).output)
        if cgroup is not None:
            # Not by glob, which fails where another's cgroup goes meanwhile.
            folders = [Path(folder) for folder, *_ in os.walk("/sys/fs/cgroup") if folder.endswith(f"/{cgroup[1]}")]
            [shares] = [folder / "cpu.shares" for folder in folders if (folder / "cpu.shares").exists()]
            assert shares.read_text() == "335\n"
        elif Path("/proc/self/autogroup").exists():
            assert autogroup.endswith(" nice 5")
        assert int(niceness) == os.nice(0) + (5 if cgroup is None else 0)
        assert (await env.evaluate()).reward == int(niceness)


async def test_a_file_without_end(bounding: Server) -> None:
    async with bounding.client() as env, unharmed_neighbour(bounding):
        await env.reset(task_id="large")
        answer = await env.exec("dd if=/dev/zero of=endless bs=1M")
        assert not answer.success
        assert "storage" in answer.error
        assert "1.0 GiB" in answer.error
        await assert_dead(env, "1.0 GiB")


async def test_files_without_end(make_server: MakeServer, bounded_tasks: Path) -> None:
    """Counted by the same process with and without cgroups."""
    server = make_server({"TB2_COMMAND_TIMEOUT_S": "60"}, tasks=bounded_tasks)
    async with server.client() as env, unharmed_neighbour(server):
        await env.reset(task_id="small")
        answer = await env.exec("i=0; while mkdir d$i; do touch d$i/{1..500}; i=$((i + 1)); done")
        assert not answer.success
        assert "16384" in answer.error
        assert "files" in answer.error
        await assert_dead(env, "16384")


async def test_the_helpers_hear_of_a_death_and_its_reason_at_once(bounding: Server) -> None:
    """As on a busy node: the reason that is read with the one must not be waited for with the other, for ever."""
    async with bounding.client() as env:
        await env.reset(task_id="small")
        [init] = inits(bounding)
        dying = asyncio.create_task(env.exec("head -c 400M /dev/zero >f; sleep 9"))
        await asyncio.sleep(0.05)
        with Stopped(spawner(bounding)):
            await soon(lambda: is_zombie(init), 10)
        assert "256.0 MiB" in (await dying).error
        await env.reset(task_id="small")
        assert (await env.exec("echo well")).output == "well\n"


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


# ---------------------------------------------------------------- usage
#: Holds 300 MiB, has ten children, burns a second of CPU time and writes 20 MiB in 5 files.
BALLAST = """python3 -c '
import subprocess, time
held = bytearray(b"x") * (300 << 20)
children = [subprocess.Popen(["sleep", "1"]) for _ in range(10)]
while time.process_time() < 1: pass
for n in range(5): open(f"f{n}", "wb").write(bytes(4 << 20))
for child in children: child.wait()
'"""


async def test_usage_is_what_was_used(bounding: Server) -> None:
    async with bounding.client() as env:
        episode = (await env.reset(task_id="large")).observation.metadata["episode_id"]
        assert (await env.exec(BALLAST)).info["exit_code"] == 0
        usage = (await env.evaluate()).observation.info["usage"]
    assert 300 << 20 <= usage["memory_peak_bytes"] < 500 << 20
    assert 1 <= usage["cpu_s"] < 3
    assert 12 <= usage["processes_peak"] < 40
    assert 20 << 20 <= usage["storage_bytes"] < 24 << 20
    assert 5 <= usage["files"] < 40
    path = bounding.runs / f"large.{episode}" / "result.json"
    await soon(path.exists, 5)
    result = json.loads(path.read_text())
    assert result["usage"].keys() == usage.keys()
    assert result["usage"]["cpu_s"] >= usage["cpu_s"]
    assert result["usage"]["memory_peak_bytes"] >= 300 << 20


# ---------------------------------------------------------------- what is said of them
async def limits_of(server: Server, task: str) -> dict[str, dict[str, object]]:
    async with server.client() as env:
        limits: dict[str, dict[str, object]] = (await env.reset(task_id=task)).observation.info["isolation"]["limits"]
        return limits


@pytest.mark.parametrize(
    ("lines", "memory_bytes", "storage_bytes"),
    [
        ("memory = '512M'\nstorage = '10G'", 512 << 20, 10 << 30),
        ("memory = '2Gi'\nstorage = '512MiB'", 2 << 30, 512 << 20),
        ("memory_mb = 4096\nstorage_mb = 10240", 4 << 30, 10 << 30),
        ("memory = '1.5g'\nstorage = '1048576K'", 3 << 29, 1 << 30),
        ("memory = '1M'\nstorage_mb = 1", 256 << 20, 256 << 20),  # the floors
    ],
)
async def test_sizes(server: Server, add_task: AddTask, lines: str, memory_bytes: int, storage_bytes: int) -> None:
    limits = await limits_of(server, add_task("exit 1", toml=f"[environment]\ncpus = 0.1\n{lines}\n"))
    assert limits["memory"]["bytes"] == memory_bytes
    assert limits["storage"]["bytes"] == storage_bytes
    assert limits["processes"]["max"] == PROCESSES_MAX
    assert limits["cpus"]["max"] == 0.5
    assert all(limit["enforced_by"] for limit in limits.values())


@pytest.mark.parametrize("size", ["'plenty'", "'2 giraffes'", "'-2G'", "'nan'", "''"])
def test_a_size_that_is_none(server: Server, add_task: AddTask, size: str) -> None:
    task = add_task("exit 1", toml=f"[environment]\nmemory = {size}\n")
    response = httpx.post(f"{server.url}/episodes", json={"task_id": task}, trust_env=False)
    assert response.status_code == 422
    assert response.json()["code"] == "TASK_UNUSABLE"
    assert "environment.memory" in response.json()["detail"]
    assert "512M or 2G" in response.json()["detail"]


@pytest.mark.parametrize("key", ["memory_mb", "storage_mb", "cpus"])
@pytest.mark.parametrize("value", ["-1", "0", "nan"])
def test_a_number_that_is_none(server: Server, add_task: AddTask, key: str, value: str) -> None:
    task = add_task("exit 1", toml=f"[environment]\n{key} = {value}\n")
    response = httpx.post(f"{server.url}/episodes", json={"task_id": task}, trust_env=False)
    assert response.status_code == 422, response.text
    assert f"environment.{key}" in response.json()["detail"]


async def test_a_task_without_limits_has_one_for_processes(server: Server) -> None:
    limits = await limits_of(server, "ok")
    assert limits.keys() == {"processes"}


async def test_limits_switched_off(make_server: MakeServer, bounded_tasks: Path) -> None:
    """More than the 256 MiB of the task, and nobody minds."""
    server = make_server({"TB2_LIMITS": "off"}, tasks=bounded_tasks)
    assert (await limits_of(server, "small")).keys() == {"processes"}
    async with server.client() as env:
        await env.reset(task_id="small")
        answer = await env.exec("head -c 300M /dev/zero >f; sleep 1; stat -c %s f")
        assert (answer.success, answer.output) == (True, f"{300 << 20}\n")


# ---------------------------------------------------------------- the host's last resort
async def test_the_host_kills_agents_before_all_others(bounding: Server) -> None:
    """Neither the server nor the trainer beside it, should the host run out of memory."""

    def scores() -> list[str]:
        pids = {*bounding.descendants(), bounding.pid}
        return sorted(Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in pids)

    own = Path("/proc/self/oom_score_adj").read_text().strip()
    async with bounding.client() as env:
        await env.reset(task_id="large")
        await env.exec("sleep 617 & sleep 618 &")
        await env.exec("exec sleep 619", session_id="t", block=False)
        assert (await env.exec("cat /proc/self/oom_score_adj")).output == "1000\n"
        assert scores().count("1000") >= 3 + len(inits(bounding))
        assert Path(f"/proc/{bounding.pid}/oom_score_adj").read_text().strip() == own


async def test_an_answer_of_a_killed_episode_is_never_a_success(bounding: Server) -> None:
    async with bounding.client() as env:
        await env.reset(task_id="small")
        answers = [await env.exec("head -c 400M /dev/zero >f; sleep 5"), await env.exec("true")]
        answers += [await env.exec("true", session_id="t", block=False), await env.write_file("f", "x")]
        evaluated = [await env.evaluate(), await env.evaluate()]
        answers += [each.observation for each in evaluated]
        assert all(not each.success and "256.0 MiB" in each.error for each in answers)
        assert [each.reward for each in evaluated] == [None, None]
        await env.reset(task_id="small")
        assert (await env.exec("echo well")).output == "well\n"
