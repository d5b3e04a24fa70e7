"""TB2_ISOLATION=none: a real server on a node where no namespace can be made, whose root is thrown away afterwards."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.processes import running
from support.server import MakeServer, Server, eventually
from support.tasks import make_task
from support.throwaway import NOBODY, THROWAWAY
from tbench2_env import CapacityReached, ConnectionClosed, ExecutionFailed, Tbench2Action

NONE = {"TB2_ISOLATION": "none", "MAX_CONCURRENT_ENVS": "1"}
DOCKERFILE = "FROM debian\nWORKDIR /app/work\nCOPY data.txt .\nCOPY conf /etc/tbench2-conf\nCOPY data.txt /srv/a/b\n"
FILES = {"environment/data.txt": "data\n", "environment/conf": "conf\n"}
LAID = ("app", "etc/tbench2-conf", "srv/a")
STAGED = ("tests", "logs")
StartServer = Callable[..., Server]


@pytest.fixture
def on_node(tmp_path: Path) -> tuple[str, ...]:
    return (sys.executable, THROWAWAY, str(tmp_path))


@pytest.fixture
def start(make_server: MakeServer, tmp_path: Path, on_node: tuple[str, ...]) -> Iterator[StartServer]:
    """Start a server with one task, `ok`, on such a node: `start({"TB2_...": "..."}, nobody=True)`."""
    started: list[Server] = []

    def start(env: Mapping[str, str] = {}, *, nobody: bool = False, dockerfile: str = DOCKERFILE) -> Server:
        make_task(tmp_path / "tasks", "ok", dockerfile=dockerfile, files=FILES)
        if nobody:
            os.chown(tmp_path, NOBODY, NOBODY)
            env = {**env, "TB2_OUTPUT_DIR": str(tmp_path / "runs"), "TB2_SCRATCH_DIR": str(tmp_path / "scratch")}
        wrap = (*on_node, *(["--nobody"] if nobody else []), "--")
        started.append(make_server({**NONE, **env}, tasks=tmp_path / "tasks", wrap=wrap))
        return started[-1]

    yield start
    for server in started:
        assert server.stop() in (0, -signal.SIGKILL)
    assert not list(tmp_path.glob("scratch/*"))


def root(server: Server) -> Path:
    return Path(f"/proc/{server.pid}/root")


def there(node: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if os.path.lexists(node / name)]


async def test_episodes_one_after_the_other(start: StartServer) -> None:
    server = start()
    node = root(server)
    for solve, reward in (("echo ok > out.txt", 1.0), ("ls; rm data.txt", 0.0), ("echo ok > out.txt", 1.0)):
        async with server.client() as env:
            info = (await env.reset(task_id="ok")).observation.info
            assert info["isolation"]["rung"] == "none"
            assert info["isolation"]["network_mode"] == "host"
            assert any("server's rights" in lack for lack in info["isolation"]["lacks"])
            assert (await env.exec("pwd; ls; cat /etc/tbench2-conf /srv/a/b")).output == (
                "/app/work\ndata.txt\nconf\ndata\n"
            )
            assert not there(node, STAGED)
            await env.exec(solve)
            assert (await env.evaluate()).reward == reward
            assert not there(node, STAGED)
            assert there(node, LAID) == list(LAID)
        eventually(lambda: not there(node, LAID), 5, lambda: str(there(node, LAID)))
        assert (node / "srv").is_dir()
    eventually(lambda: len(server.descendants()) == 1, 5)
    assert not there(Path("/"), (*LAID, *STAGED)), "nothing of it was on the real node"


async def test_what_an_episode_started_ends_with_it(start: StartServer) -> None:
    server = start({"TB2_COMMAND_TIMEOUT_S": "2"})
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("setsid sleep 4242 & (setsid setsid sleep 4242 &) ; sleep 0.3")
        eventually(lambda: len(running(server, "sleep 4242")) == 2, 5)
        timed_out = await env.exec("echo begun; setsid sleep 4343")
        assert (timed_out.output.splitlines()[0], timed_out.info["timed_out"]) == ("begun", True)
        eventually(lambda: not running(server, "sleep 4343"), 5)
        assert len(running(server, "sleep 4242")) == 2
    eventually(lambda: not running(server, "sleep 4242"), 5)
    eventually(lambda: len(server.descendants()) == 1, 5)


async def test_a_terminal_works_as_ever(start: StartServer) -> None:
    server = start()
    async with server.client() as env:
        await env.reset(task_id="ok")
        command = "tty; setsid sleep 4848 & read line; echo got $line"
        seen = (await env.exec(command, session_id="t", block=False)).output
        for action in (
            Tbench2Action(action_type="write", session_id="t", command="this\n"),
            Tbench2Action(action_type="wait", session_id="t", wait_seconds=10.0),
        ):
            seen += (await env.step(action)).observation.output
        assert seen.startswith("/dev/pts/")
        assert seen.endswith("got this\r\n")
        assert running(server, "sleep 4848")
    eventually(lambda: not running(server, "sleep 4848"), 5)


async def test_a_killed_helper_is_replaced_and_what_it_laid_out_removed(start: StartServer) -> None:
    server = start()
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("echo ok > out.txt")
        (helper,) = server.descendants()
        os.kill(helper, signal.SIGKILL)
        answer = await env.exec("pwd")
        assert (answer.success, "the spawner process died" in str(answer.error)) == (False, True)
    async with server.client() as env:
        await env.reset(task_id="ok")
        assert (await env.exec("ls")).output == "data.txt\n"


async def test_what_a_verifier_leaves_ends_with_it(start: StartServer, tmp_path: Path) -> None:
    server = start()
    make_task(
        tmp_path / "tasks", "leaving", "setsid sleep 4545 & (setsid sleep 4545 &)\necho 1 >/logs/verifier/reward.txt\n"
    )
    async with server.client() as env:
        await env.reset(task_id="leaving")
        await env.exec("setsid sleep 4242 & true")
        assert (await env.evaluate()).reward == 1.0
        assert (len(running(server, "sleep 4545")), len(running(server, "sleep 4242"))) == (0, 1)
        assert not there(root(server), STAGED)


async def test_a_verifier_that_takes_too_long(start: StartServer, tmp_path: Path) -> None:
    server = start()
    toml = 'version = "1.0"\n[verifier]\ntimeout_sec = 1.0\n[environment]\nallow_internet = false\n'
    make_task(tmp_path / "tasks", "slow", "setsid sleep 4646 & sleep 4646\n", toml=toml)
    async with server.client() as env:
        unmet = (await env.reset(task_id="slow")).observation.info["unmet"]
        assert any(text.endswith("shares the host's network (TB2_ISOLATION=none)") for text in unmet), unmet
        verdict = await env.evaluate()
        assert verdict.reward is None
        assert "timed out" in str(verdict.observation.error)
        assert not running(server, "sleep 4646")
        assert not there(root(server), STAGED)


async def test_two_at_once_are_one_too_many(start: StartServer) -> None:
    server = start()
    async with server.client() as first, server.client() as second:
        await first.reset(task_id="ok")
        with pytest.raises(CapacityReached):
            await second.reset(task_id="ok")
        assert (await first.reset(task_id="ok")).observation.success, "the same client may begin again"


async def test_nothing_of_the_nodes_is_overwritten(start: StartServer) -> None:
    server = start()
    mine = root(server) / "etc/tbench2-conf"
    mine.write_text("mine\n")
    async with server.client() as env:
        with pytest.raises(ExecutionFailed, match=r"/etc/tbench2-conf: exists on this node already"):
            await env.reset(task_id="ok")
    assert mine.read_text() == "mine\n"
    assert there(root(server), LAID) == ["etc/tbench2-conf"]


@pytest.mark.parametrize("name", ["tests", "logs/verifier"])
async def test_no_verdict_where_the_verifiers_folders_are_taken(start: StartServer, name: str) -> None:
    server = start()
    mine = root(server) / name
    mine.mkdir(parents=True)
    (mine / "mine").touch()
    async with server.client() as env:
        lacks = (await env.reset(task_id="ok")).observation.info["isolation"]["lacks"]
        assert f"no verdict is possible: /{name} exists on this node already" in lacks
        await env.exec("echo ok > out.txt")
        verdict = await env.evaluate()
        assert verdict.reward is None
        assert f"/{name}: exists on this node already" in str(verdict.observation.error)
        assert os.listdir(mine) == ["mine"]  # noqa: PTH208
        shutil.rmtree(mine)
        assert (await env.evaluate()).reward == 1.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_servers_end_leaves_nothing(start: StartServer, number: signal.Signals) -> None:
    server = start()
    kept = os.open(root(server), os.O_PATH)
    node = Path(f"/proc/self/fd/{kept}")
    try:
        async with server.client() as env:
            await env.reset(task_id="ok")
            executing = asyncio.create_task(env.exec("setsid sleep 4747 & sleep 4747"))
            await asyncio.to_thread(eventually, lambda: len(running(server, "sleep 4747")) == 2, 5)
            pids = server.descendants()
            assert there(node, LAID) == list(LAID)
            status = await asyncio.to_thread(server.stop, number)
            assert status == (0 if number == signal.SIGTERM else -number)
            with pytest.raises(ConnectionClosed):
                await executing
        await asyncio.to_thread(eventually, lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 5)
        assert not there(node, (*LAID, *STAGED))
        assert not list(server.scratch.iterdir())
    finally:
        os.close(kept)


async def test_who_may_not_write_to_the_node_is_told(start: StartServer) -> None:
    server = start(nobody=True)
    async with server.client() as env:
        with pytest.raises(ExecutionFailed, match=r"/app: Permission denied: without isolation"):
            await env.reset(task_id="ok")


async def test_who_may_write_to_the_workdir_only_gets_no_verdict(start: StartServer) -> None:
    server = start({"TB2_TASK_WORKDIR": "/var/tmp/tbench2-work"}, nobody=True, dockerfile="FROM debian\n")
    async with server.client() as env:
        lacks = (await env.reset(task_id="ok")).observation.info["isolation"]["lacks"]
        assert "no verdict is possible: this user cannot make /tests on this node" in lacks
        assert (await env.exec("echo ok > out.txt; pwd")).output == "/var/tmp/tbench2-work\n"
        verdict = await env.evaluate()
        assert verdict.reward is None
        assert "/tests: Permission denied" in str(verdict.observation.error)
    eventually(lambda: not (root(server) / "var/tmp/tbench2-work").exists(), 5)


# ------------------------------------------------------------ only when said explicitly
def run(
    tmp_path: Path, on_node: tuple[str, ...], env: Mapping[str, str], *more: str
) -> "subprocess.CompletedProcess[str]":
    own = {
        "PATH": os.environ["PATH"],
        "TB2_OUTPUT_DIR": str(tmp_path / "runs"),
        "TB2_SCRATCH_DIR": str(tmp_path / "scratch"),
        "TB2_REGISTRY": "none",
    }
    argv = [*on_node, "--", sys.executable, "-m", "tbench2_env.server.app", *more]
    return subprocess.run(argv, env=own | dict(env), capture_output=True, text=True, timeout=60)


def test_it_is_never_chosen_by_itself(tmp_path: Path, on_node: tuple[str, ...]) -> None:
    done = run(tmp_path, on_node, {"MAX_CONCURRENT_ENVS": "1"})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "unshare" in line
    assert "Operation not permitted" in line
    assert line.endswith("can do all that the server can.")
    assert "TB2_ISOLATION=none with MAX_CONCURRENT_ENVS=1" in line


@pytest.mark.parametrize("slots", ["", "8"])
def test_it_wants_one_slot(tmp_path: Path, on_node: tuple[str, ...], slots: str) -> None:
    done = run(tmp_path, on_node, {"TB2_ISOLATION": "none", "MAX_CONCURRENT_ENVS": slots})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("tbench2_env: MAX_CONCURRENT_ENVS: 8 episodes need isolation: with TB2_ISOLATION=none, set")


def test_it_has_no_network_of_its_own(tmp_path: Path, on_node: tuple[str, ...]) -> None:
    done = run(tmp_path, on_node, NONE | {"TB2_NETWORK": "private"})
    assert done.returncode == 1
    assert "TB2_NETWORK" in done.stderr


def test_doctor_says_that_it_does_not_isolate(tmp_path: Path, on_node: tuple[str, ...]) -> None:
    done = run(tmp_path, on_node, NONE, "doctor", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["works"], report["rung"]) == (False, "none")
    assert report["rungs"]["1"] == "not tried: TB2_ISOLATION=none"
    assert report["rungs"]["none"] == "chosen: not isolated: one episode at a time on the node itself"
    assert any("server's rights" in lack for lack in report["lacks"])
    without = run(tmp_path, on_node, {}, "doctor", "--json")
    assert without.returncode == 1
    assert json.loads(without.stdout)["rungs"]["none"].startswith("not isolated; only with TB2_ISOLATION=none")
