"""How the recipes start and stop the server, and what it says when it cannot serve."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support.server import HELPERS, MakeServer, Server, descendants, eventually
from support.tasks import make_task
from tbench2_env import BadRequest, CapacityReached, ConnectionClosed, ExecutionFailed, Tbench2Env

_PROGRAM = [sys.executable, "-m", "tbench2_env.server.app"]
_LISTEN = "0A"


class Recipe(Server):
    """Started by the recipes' own command line: --port and nothing else."""

    def __init__(self, folder: Path, tasks: Path, env: Mapping[str, str]) -> None:
        super().__init__(folder, tasks, env)
        self._argv = list(_PROGRAM)


@pytest.fixture
def recipe(tmp_path: Path, tasks: Path) -> Iterator[Recipe]:
    """A server with every variable of the contract set."""
    env = {
        "TB2_MODE": "local",
        "TB2_CACHE_DIR": str(tmp_path / "cache"),
        "TB2_REPO_URL": "https://tasks.invalid/terminal-bench-2.git",
        "TB2_DEFAULT_TASK_ID": "hello-note",
        "TB2_COMMAND_TIMEOUT_S": "17.5",
        "TB2_WITHHOLD_TESTS": "1",
        "TB2_TASK_WORKDIR": "/srv/override",
        "MAX_CONCURRENT_ENVS": "64",
        "ENABLE_WEB_INTERFACE": "false",
        "CAMEL_RUNTIME": "native",
    }
    server = Recipe(tmp_path, tasks, env).start()
    yield server
    server.assert_idle()
    assert server.stop() == 0


def run(tmp_path: Path, env: Mapping[str, str] = {}, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the server until it ends by itself; whatever it made is under `tmp_path`."""
    own = {
        "PATH": os.environ["PATH"],
        "TB2_OUTPUT_DIR": str(tmp_path / "runs"),
        "TB2_SCRATCH_DIR": str(tmp_path / "scratch"),
        "TB2_REGISTRY": "none",
    }
    return subprocess.run([*_PROGRAM, *arguments], env=own | dict(env), capture_output=True, text=True, timeout=60)


def assert_one_sentence(done: subprocess.CompletedProcess[str], name: str) -> None:
    """It failed with one line for the user, which names what to change."""
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("tbench2_env: ")
    assert name in line


def alive(pids: Sequence[int]) -> list[str]:
    """Those that still run. A zombie waits only for whoever adopted it, which is not the server's to decide."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
    return found


# ------------------------------------------------------------ starting
async def test_the_recipes_command_line_with_every_variable_set(recipe: Recipe) -> None:
    async with recipe.client() as env:
        reset = (await env.reset()).observation
        assert reset.task_id == "hello-note"
        assert reset.info["command_timeout_s"] == 17.5
        assert (await env.exec("pwd")).output == "/srv/override\n"
        assert (await env.exec("find /tests /solution -type f 2>/dev/null")).output == ""
    for part in ("tests", "solution"):
        assert any((recipe.tasks / "hello-note" / part).iterdir())
    log = recipe.log.read_text()
    (said,) = [line for line in log.splitlines() if "TB2_WITHHOLD_TESTS" in line]
    assert "nothing" in said
    assert "CAMEL_RUNTIME" not in log


async def test_the_recipes_server_listens_on_all_addresses(recipe: Recipe) -> None:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(f":{recipe.port:04X}") and row[3] == _LISTEN] == [
        f"00000000:{recipe.port:04X}"
    ]
    # A smoke client comes by IP; every 127.x.y.z is this host, but only "all addresses" answers to them all.
    async with Tbench2Env(f"http://127.45.6.7:{recipe.port}") as env:
        assert (await env.reset()).observation.success


async def test_the_variables_defaults(make_server: MakeServer) -> None:
    server = make_server({"MAX_CONCURRENT_ENVS": "", "TB2_MODE": ""})
    assert "TB2_WITHHOLD_TESTS" not in server.log.read_text()
    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(server.client()) for _ in range(7)]
        await asyncio.gather(*(other.state() for other in others))
        env = await stack.enter_async_context(server.client())
        with pytest.raises(BadRequest, match="there is no task 'headless-terminal'"):
            await env.reset()
        reset = (await env.reset(task_id="ok")).observation
        assert reset.info["command_timeout_s"] == 20.0
        with pytest.raises(CapacityReached) as full:
            await (await stack.enter_async_context(server.client())).state()
        assert (full.value.active_sessions, full.value.max_sessions) == (8, 8)


def test_help() -> None:
    done = subprocess.run([*_PROGRAM, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--host" in done.stdout
    assert "--port" in done.stdout


async def test_the_working_directory_can_be_overridden(make_server: MakeServer) -> None:
    server = make_server({"TB2_TASK_WORKDIR": "/srv/else where"})
    async with server.client() as env:
        assert (await env.reset(task_id="ok")).observation.info["workdir"] == "/srv/else where"
        assert (await env.exec("pwd; ls -A")).output == "/srv/else where\n"
        await env.write_file("out.txt", "ok\n")
        assert (await env.exec("cat '/srv/else where/out.txt'")).output == "ok\n"
        assert (await env.evaluate()).reward == 1.0, "the tests run there, too"


@pytest.mark.parametrize(
    ("env", "wrap"),
    [
        ({}, ("env", "-u", "HOME")),
        ({"LANG": "C", "LC_ALL": "C"}, ()),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ()),
        ({}, ("sh", "-c", 'gone=$(mktemp -d); cd "$gone"; rmdir "$gone"; exec "$@"', "sh")),
        ({}, ("sh", "-c", 'umask 077; exec "$@"', "sh")),
        ({}, ("sh", "-c", 'exec "$@" <&- >/dev/null 2>&1', "sh")),
    ],
    ids=["no HOME", "LANG=C", "ASCII only", "deleted cwd", "umask 077", "no stdin"],
)
async def test_odd_surroundings_change_nothing(
    make_server: MakeServer, tmp_path: Path, env: dict[str, str], wrap: tuple[str, ...]
) -> None:
    make_task(tmp_path / "tasks", "accents", files={"instruction.md": "Écris ok — “señal”.\n"})
    server = make_server(env, tasks=tmp_path / "tasks", wrap=wrap)
    async with server.client() as client:
        assert (await client.reset(task_id="accents")).observation.instruction == "Écris ok — “señal”.\n"
        assert (await client.exec("printf 'é → \\377'")).output == "é → \ufffd"
        assert (await client.exec("umask; cd; pwd")).output == "0022\n/root\n"
        await client.write_file("naïve.txt", "ünï\n")
        assert (await client.exec("cat naïve.txt")).output == "ünï\n"
        assert (await client.exec("echo ok > out.txt")).success
        assert (await client.evaluate()).reward == 1.0
    eventually(lambda: len(list(server.runs.glob("accents.*/result.json"))) == 1, 5)
    (result,) = server.runs.glob("accents.*/result.json")
    assert json.loads(result.read_text(encoding="utf-8"))["reward"] == 1.0


@pytest.mark.parametrize("wrap", [(), ("sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "sh")], ids=["plain", "nohup"])
async def test_signals_reach_an_agents_processes_however_the_server_was_started(
    make_server: MakeServer, wrap: tuple[str, ...]
) -> None:
    """An ignored signal is inherited across exec, and bash cannot undo that: `kill PID` would do nothing."""
    server = make_server(wrap=wrap)
    async with server.client() as env:
        await env.reset(task_id="ok")
        masks = (await env.exec("grep -E 'Sig(Ign|Blk)' /proc/self/status")).output.split()
        assert masks == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
        for name in ("HUP", "INT", "TERM"):  # bash ignores QUIT itself
            output = (await env.exec(f"bash -c 'kill -{name} $$; echo survived'")).output
            assert "survived" not in output.splitlines(), name


# ------------------------------------------------------------ refusing to start
def test_docker_mode_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, {"TB2_MODE": "docker"})
    assert_one_sentence(done, "TB2_MODE")
    assert "local" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_CONCURRENT_ENVS", "many"),
        ("TB2_OUTPUT_DIR", "/dev/null/runs"),
        ("TB2_SCRATCH_DIR", "/proc/scratch"),
    ],
)
def test_a_value_that_cannot_be_served_is_named(tmp_path: Path, name: str, value: str) -> None:
    done = run(tmp_path, {name: value})
    assert_one_sentence(done, value if name == "TB2_SCRATCH_DIR" else name)


@pytest.mark.parametrize("port", ["70000", "-1", "eighty"])
def test_a_port_that_cannot_be_is_refused(tmp_path: Path, port: str) -> None:
    done = run(tmp_path, arguments=["--port", port])
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert "port" in done.stderr.splitlines()[-1]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def test_a_taken_port_is_a_clear_error_and_leaves_nothing(tmp_path: Path, taken_port: int) -> None:
    done = run(tmp_path, arguments=["--port", str(taken_port)])
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert str(taken_port) in done.stderr.splitlines()[-1]
    assert "in use" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "scratch").iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    left = [line for line in descendants(os.getpid()).values() if str(tmp_path) in line]
    assert not left


def test_it_says_that_it_listens_only_when_it_does(tmp_path: Path, taken_port: int) -> None:
    assert "listening" not in run(tmp_path, arguments=["--port", str(taken_port)]).stderr


async def test_a_missing_tasks_folder_is_named_at_reset(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server({"TB2_TASKS_DIR": str(tmp_path / "missing")})
    async with server.client() as env:
        with pytest.raises(ExecutionFailed, match="TB2_TASKS_DIR"):
            await env.reset(task_id="ok")


# ------------------------------------------------------------ stopping
async def busy_episodes(server: Server, count: int) -> "list[asyncio.Task[object]]":
    """`count` clients, each in the middle of a step that will not end by itself."""

    async def play() -> object:
        async with server.client() as env:
            await env.reset(task_id="ok")
            return await env.exec("setsid sleep 999 & sleep 999")

    playing = [asyncio.create_task(play()) for _ in range(count)]
    while sum("sleep 999" in line for line in server.descendants().values()) < 2 * count:
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in playing)
    return playing


async def test_sigterm_with_busy_episodes_ends_cleanly(make_server: MakeServer) -> None:
    server = make_server()
    playing = await busy_episodes(server, 8)
    pids = list(server.descendants())
    assert len(pids) >= HELPERS + 8 * 3

    begun = time.monotonic()
    status = await asyncio.to_thread(server.stop, signal.SIGTERM)
    assert time.monotonic() - begun < 5
    assert status == 0
    assert not alive(pids)
    assert not list(server.scratch.iterdir())
    assert str(server.folder) not in Path("/proc/self/mountinfo").read_text()
    assert "Traceback" not in server.log.read_text()
    ends = await asyncio.gather(*playing, return_exceptions=True)
    assert [type(end) for end in ends] == [ConnectionClosed] * 8
    results = [json.loads(path.read_text())["reward"] for path in server.runs.glob("*/result.json")]
    assert results == [None] * 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_stops_at_once(make_server: MakeServer, number: signal.Signals) -> None:
    server = make_server()
    async with server.client() as env:
        await env.reset(task_id="ok")
        begun = time.monotonic()
        assert await asyncio.to_thread(server.stop, number) == 0
        assert time.monotonic() - begun < 4
        with pytest.raises(ConnectionClosed):
            await env.exec("pwd")


async def test_sigkill_of_the_server_leaves_no_process(make_server: MakeServer) -> None:
    server = make_server()
    playing = await busy_episodes(server, 4)
    pids = list(server.descendants())
    await asyncio.to_thread(server.stop, signal.SIGKILL)
    eventually(lambda: not alive(pids), 3, lambda: f"left: {alive(pids)}")
    eventually(lambda: not list(server.scratch.iterdir()), 5, lambda: f"left: {list(server.scratch.iterdir())}")
    ends = await asyncio.gather(*playing, return_exceptions=True)
    assert [type(end) for end in ends] == [ConnectionClosed] * 4


async def test_two_servers_share_a_scratch_folder(make_server: MakeServer, tmp_path: Path) -> None:
    env = {"TB2_SCRATCH_DIR": str(tmp_path / "scratch")}
    first, second = make_server(env), make_server(env)
    async with second.client() as b:
        await b.reset(task_id="ok", episode_id="twin")
        async with first.client() as a:
            await a.reset(task_id="ok", episode_id="twin")
            await asyncio.gather(a.exec("echo ok > out.txt"), b.exec("echo no > out.txt"))
            assert [(await each.evaluate()).reward for each in (a, b)] == [1.0, 0.0]
        assert await asyncio.to_thread(first.stop) == 0
        assert (await b.exec("cat out.txt")).output == "no\n"
        third = make_server(env)
        async with third.client() as c:
            await c.reset(task_id="ok")
            assert (await c.exec("ls")).output == ""
            assert (await b.exec("echo ok > out.txt; cat out.txt")).output == "ok\n"
        assert (await b.evaluate()).reward == 1.0
    for server in (second, third):
        assert await asyncio.to_thread(server.stop) == 0
    assert not list((tmp_path / "scratch").iterdir())


async def test_what_a_killed_server_left_is_swept_at_the_next_start(make_server: MakeServer, tmp_path: Path) -> None:
    env = {"TB2_SCRATCH_DIR": str(tmp_path / "scratch")}
    first = make_server(env)
    playing = await busy_episodes(first, 2)
    pids = list(first.descendants())
    # All at once, helpers too, as the end of a batch job does: nobody is left to clean up.
    for pid in (first.pid, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(first.stop)
    eventually(lambda: not alive(pids), 3, lambda: f"left: {alive(pids)}")
    left = set((tmp_path / "scratch").iterdir())
    second = make_server(env)
    assert left
    assert not left & set((tmp_path / "scratch").iterdir())
    async with second.client() as client:
        assert (await client.reset(task_id="ok")).observation.success
    await asyncio.gather(*playing, return_exceptions=True)
