"""Starting and ending the spawner, many sandboxes at once, and what is left when a part of it dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import descendants
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import IsolationUnavailable, Sandbox, Spawner
from tbench2_env.isolation.spec import Limits, Rung, SandboxSpec, SpawnerConfig, Usage

from .conftest import StartRig
from .doomed import HELPERS, PROCESSES_IN_ALL, SANDBOXES
from .rig import (
    BEST_RUNG,
    RUNGS_HERE,
    PidNamespaces,
    Rig,
    children,
    first_process,
    fresh_name,
    is_alive,
    own_descriptors,
    processes,
    stopped,
    until,
)

DOOMED = Path(__file__).with_name("doomed.py")


# ---------------------------------------------------------------- start
async def test_what_it_says_of_this_host(rig: Rig) -> None:
    assert rig.spawner.rung == BEST_RUNG
    assert rig.spawner.host.signals_scoped
    assert rig.spawner.alive
    assert rig.spawner.folder.parent == rig.scratch
    assert rig.spawner.folder.stat().st_mode & 0o077 == 0


async def test_layers_are_a_folder_that_only_the_server_and_its_spawner_reach(rig: Rig) -> None:
    (rig.spawner.layers / "task").mkdir()
    assert [path.name for path in rig.spawner.layers.iterdir()] == ["task"]
    assert not (rig.spawner.folder / "shared/layers").exists(), "it is mounted in the spawner's namespace only"


async def test_it_is_lean_and_knows_nothing_of_the_server(rig: Rig) -> None:
    for pid in (rig.pid, rig.launcher_pid, rig.warden_pid):
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
        assert "pydantic" not in Path(f"/proc/{pid}/maps").read_text()
        assert int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 < 40 << 20
        assert os.getsid(pid) == pid, "a Ctrl-C in the server's terminal is not for it"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals_of_the_servers_terminal_do_not_end_it(rig: Rig, number: int) -> None:
    sandbox = await rig.create()
    for pid in (rig.pid, rig.launcher_pid, rig.warden_pid):
        os.kill(pid, number)
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"
    await rig.create()


async def test_a_host_that_cannot_isolate_is_named_with_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = own_descriptors()
    with pytest.raises(
        IsolationUnavailable, match=rf"scratch {tmp_path}/file: .*; scratch /proc/nowhere: No such file"
    ):
        await Spawner.start(SpawnerConfig(BEST_RUNG.name, (str(tmp_path / "file"), "/proc/nowhere")))
    assert own_descriptors() == before
    assert not descendants(os.getpid())


async def test_a_spawner_that_dies_at_its_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IsolationUnavailable, match="died at its start"):
        await Spawner.start(SpawnerConfig("no such rung", (str(tmp_path),)))
    assert "no such rung" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


async def test_giving_up_while_it_starts(tmp_path: Path) -> None:
    before = own_descriptors()
    for delay_s in (0, 0.001, 0.01, 0.03, 0.06):
        starting = asyncio.ensure_future(Spawner.start(SpawnerConfig(BEST_RUNG.name, (str(tmp_path),))))
        await asyncio.sleep(delay_s)
        starting.cancel()
        [spawner] = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(spawner, Spawner):  # it was quicker
            await spawner.stop()
        assert isinstance(spawner, Spawner | asyncio.CancelledError)
        assert list(tmp_path.iterdir()) == []
    assert own_descriptors() == before
    assert not descendants(os.getpid())


@pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)
async def test_each_rung_of_the_ladder(start_rig: StartRig, rung: Rung) -> None:
    rig = await start_rig(rung=rung.name)
    sandbox = await rig.create(rig.layer({"app/x": "layer"}))
    assert rig.spawner.rung == rung
    assert (await rig.sh(sandbox, "cat /app/x; id -u; hostname; ls -A /tests; echo x >/etc/f; echo $?")).lines == [
        "layer0",
        "tbench",
        "0",
    ]
    test = "cat /tests/secret; touch /tests/x; echo 1 >/logs/verifier/reward.txt"
    done = await rig.verify(sandbox, rig.layer(test=test, tests={"secret": "S"}))
    assert done.output == "S"
    assert (sandbox.verifier_folder / "reward.txt").read_text() == "1\n"
    for attack in ("echo x >/proc/sys/kernel/hostname", "mount -t tmpfs x /mnt", "rmdir /tests", "mknod /b b 7 0"):
        assert (await rig.sh(sandbox, f"{attack}; exit")).status != 0, attack
    assert os.uname().nodename != "x"


# ---------------------------------------------------------------- made ahead
async def test_an_idle_sandbox_runs_nothing_and_has_no_cpu_before_it_is_adopted(rig: Rig) -> None:
    limits = Limits(cpus=1)
    idle = [await rig.spawner.create(SandboxSpec(fresh_name(), limits=limits), idle=True) for _ in range(4)]
    rig.sandboxes += idle
    with pytest.raises(SandboxError, match="dead"):
        await rig.sh(idle[0], "echo early")
    used = [await rig.create(limits=limits), idle[1]]
    await idle[1].adopt()
    found = [(await rig.sh(each, "grep Cpus_allowed_list /proc/self/status")).output for each in used]
    assert len(set(found)) == min(2, os.cpu_count() or 1) or rig.spawner.host.enforcement["cpus"] == "cgroup"
    os.kill(children(rig.pid)[-2], signal.SIGKILL)  # the last of the idle
    await asyncio.wait_for(idle[3].died, 5)
    with pytest.raises(SandboxError, match="no sandbox"):
        await idle[3].adopt()


# ---------------------------------------------------------------- many at once
async def test_64_sandboxes_at_once(rig: Rig) -> None:
    async def play(number: int) -> str:
        sandbox = await rig.create()
        await rig.sh(sandbox, f"echo {number} >/tmp/x")
        return (await rig.sh(sandbox, "cat /tmp/x")).output

    played = await asyncio.gather(*(play(number) for number in range(64)))
    assert played == [f"{number}\n" for number in range(64)]
    assert len(children(rig.pid)) == 66, "two helpers and 64 first processes"
    begun = asyncio.get_running_loop().time()
    await asyncio.gather(*(sandbox.destroy() for sandbox in rig.sandboxes))
    assert asyncio.get_running_loop().time() - begun < 3
    assert len(children(rig.pid)) == 2


@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006])
async def test_giving_up_on_a_sandbox_in_mid_flight(rig: Rig, delay_s: float) -> None:
    for number in range(5):
        creation = asyncio.ensure_future(rig.create(name=f"given-up-{number}"))
        await asyncio.sleep(delay_s)
        creation.cancel()
        for sandbox in await asyncio.gather(creation, return_exceptions=True):
            assert isinstance(sandbox, asyncio.CancelledError) or sandbox in rig.sandboxes
    await asyncio.gather(*(sandbox.destroy() for sandbox in rig.sandboxes))
    await until(lambda: not rig.spawner._sandboxes, 2)
    await until(lambda: len(children(rig.pid)) == 2, 2, lambda: descendants(rig.pid))
    await until(lambda: not rig.worktrees(), 2, rig.worktrees)
    again = await rig.create(name="given-up-0")
    assert (await rig.sh(again, "echo fine")).output == "fine\n"


async def test_giving_up_on_a_sandbox_that_cannot_be_made_anyway(rig: Rig) -> None:
    creation = asyncio.ensure_future(rig.create("nosuchlayer", name="given-up"))
    await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    await until(lambda: not rig.spawner._sandboxes and not rig.worktrees(), 2, rig.worktrees)


async def test_a_first_process_that_dies_while_it_is_made(rig: Rig) -> None:
    """As the OOM killer does; the sandbox fails, and no other suffers."""
    survivor = await rig.create()
    killer = Killer(rig.pid)
    for _ in range(30):
        outcome = await killer.attack(asyncio.ensure_future(rig.create()))
        if isinstance(outcome, SandboxError):
            break
    assert "cannot set up the sandbox" in str(outcome), "it was never in time"
    assert (await rig.sh(survivor, "echo fine")).output == "fine\n"
    assert (await rig.sh(await rig.create(), "echo fine")).output == "fine\n"


class Killer:
    """Kills a new first process when it has said that it is ready and before the spawner has heard it."""

    def __init__(self, spawner_pid: int) -> None:
        self._spawner = spawner_pid

    async def attack(self, creation: asyncio.Future[Sandbox]) -> object:
        """Answers with what came of the creation."""
        known = set(children(self._spawner))
        hunt = asyncio.ensure_future(asyncio.to_thread(self._hunt, known))
        [outcome, _] = await asyncio.gather(creation, hunt, return_exceptions=True)
        return outcome

    def _hunt(self, known: set[int]) -> None:
        deadline = time.monotonic() + 5
        while not (born := set(children(self._spawner)) - known):
            assert time.monotonic() < deadline
        [pid] = born
        while Path(f"/proc/{pid}/gid_map").read_bytes() == b"":
            assert time.monotonic() < deadline
        with stopped(self._spawner):  # it has just said "mapped", or is about to
            deadline = time.monotonic() + 0.1
            while Path(f"/proc/{pid}/cmdline").read_bytes() != b"init\0":
                if time.monotonic() > deadline:
                    return
            os.kill(pid, signal.SIGKILL)
            while is_alive(pid):
                pass


# ---------------------------------------------------------------- ends
def dies_unmeasured(rig: Rig) -> bool:
    """Whether the kernel counts what processes use, so that they need not live until the warden has looked."""
    return rig.spawner.host.enforcement["memory"] == "cgroup"


async def test_it_dies_at_once_although_its_files_are_still_being_counted(rig: Rig) -> None:
    sandbox = await rig.create()
    await rig.sh(sandbox, "for i in {1..100000}; do :; done; sleep 60 & touch /srv/{1..30}")
    pid = first_process(await rig.pid_namespace(sandbox))
    with stopped(rig.warden_pid):
        ending = asyncio.ensure_future(sandbox.destroy())
        if dies_unmeasured(rig):
            await until(lambda: not is_alive(pid), 5)
        await asyncio.sleep(0.05)
        assert is_alive(pid) is not dies_unmeasured(rig)
        assert not ending.done()
    usage = await ending
    assert usage is not None
    assert usage.cpu_s > 0
    assert usage.files > 30
    assert usage.processes_peak > 1


async def test_stop_while_the_files_of_one_are_counted(rig: Rig) -> None:
    sandbox = await rig.create()
    pid = first_process(await rig.pid_namespace(sandbox))
    os.kill(rig.warden_pid, signal.SIGSTOP)
    ending = asyncio.ensure_future(sandbox.destroy())
    if dies_unmeasured(rig):
        await until(lambda: not is_alive(pid), 5)
    begun = asyncio.get_running_loop().time()
    await rig.spawner.stop()
    assert asyncio.get_running_loop().time() - begun < 1
    assert await ending is None
    assert list(rig.scratch.iterdir()) == []


# ---------------------------------------------------------------- stop
async def test_stop_ends_whatever_runs(rig: Rig) -> None:
    sandboxes = [await rig.create() for _ in range(3)]
    running = [rig.start_sh(sandbox, "setsid sleep 1000 & echo up; exec sleep 1000") for sandbox in sandboxes]
    running.append(rig.start_verifier(sandboxes[0], rig.layer(test="echo up; sleep 1000")))
    for one in running:
        await one.said("up")
    namespaces = [await rig.pid_namespace(sandbox) for sandbox in sandboxes]
    begun = asyncio.get_running_loop().time()
    await rig.spawner.stop()
    assert asyncio.get_running_loop().time() - begun < 1
    assert not processes(namespaces)
    assert list(rig.scratch.iterdir()) == []
    for one in running:
        with pytest.raises(SandboxError, match="spawner"):
            await one.done(1)
    for sandbox in sandboxes:
        assert "spawner" in await sandbox.died
        with pytest.raises(SandboxError, match="spawner"):
            rig.start_sh(sandbox, "true")
        await sandbox.destroy()
    with pytest.raises(SandboxError, match="spawner"):
        await rig.create()
    await rig.spawner.stop()


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.004, 0.008, 0.016, 0.032])
async def test_stop_while_sandboxes_are_made_and_destroyed(rig: Rig, delay_s: float) -> None:
    first = await asyncio.gather(*(rig.create() for _ in range(8)))
    under_way: list[asyncio.Future[Sandbox] | asyncio.Future[Usage | None]] = [
        *(asyncio.ensure_future(rig.create()) for _ in range(16)),
        *(asyncio.ensure_future(sandbox.destroy()) for sandbox in first),
    ]
    await asyncio.sleep(delay_s)
    await rig.spawner.stop()
    for result in await asyncio.gather(*under_way, return_exceptions=True):
        assert result is None or isinstance(result, SandboxError | Usage) or result in rig.sandboxes
    assert list(rig.scratch.iterdir()) == []


async def test_stop_deletes_worktrees_that_are_still_large(rig: Rig) -> None:
    sandbox = await rig.create()
    await rig.sh(sandbox, "mkdir -p /srv/{1..15}/{1..15}; touch /srv/{1..15}/{1..15}/{a..d}")
    await sandbox.destroy()
    await rig.create()
    await rig.spawner.stop()
    assert list(rig.scratch.iterdir()) == []


# ---------------------------------------------------------------- when a part of it dies
async def test_the_death_of_the_spawner_is_the_death_of_all(rig: Rig, start_rig: StartRig) -> None:
    sandboxes = [await rig.create() for _ in range(3)]
    running = [rig.start_sh(sandbox, "setsid sleep 1000 & echo up; exec sleep 1000") for sandbox in sandboxes]
    running.append(rig.start_verifier(sandboxes[0], rig.layer(test="echo up; sleep 1000")))
    for one in running:
        await one.said("up")
    namespaces = [await rig.pid_namespace(sandbox) for sandbox in sandboxes]
    assert len(processes(namespaces)) == 11
    launcher = rig.launcher_pid
    os.kill(rig.pid, signal.SIGKILL)
    await until(lambda: not processes(namespaces) and not is_alive(launcher), 1, lambda: processes(namespaces))
    for sandbox in sandboxes:
        assert "the spawner process died" in await asyncio.wait_for(sandbox.died, 1)
        with pytest.raises(SandboxError, match="the spawner process died"):
            rig.start_sh(sandbox, "true")
    for one in running:
        with pytest.raises(SandboxError, match="the spawner process died"):
            await one.done(1)
    with pytest.raises(SandboxError, match="the spawner"):
        await rig.create()
    assert not rig.spawner.alive
    left = rig.spawner.folder
    assert left.exists()
    await start_rig()
    assert not left.exists(), "the next server sweeps it"


@pytest.mark.parametrize("delay_s", [0.001, 0.003, 0.006, 0.01])
async def test_the_death_of_the_spawner_while_sandboxes_are_made(rig: Rig, delay_s: float) -> None:
    """A half-made sandbox must neither live on nor go on in the spawner's place."""
    creations = [asyncio.ensure_future(rig.create()) for _ in range(12)]
    await asyncio.sleep(delay_s)
    launcher = rig.launcher_pid
    with stopped(rig.pid):
        below = descendants(rig.pid)
        os.kill(rig.pid, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*creations, return_exceptions=True), 2)
    assert {str(outcome) for outcome in outcomes if not isinstance(outcome, Sandbox)} <= {
        "the sandbox is dead: the spawner process died"
    }
    assert launcher in below
    await until(lambda: not any(is_alive(pid) for pid in below), 1, lambda: [pid for pid in below if is_alive(pid)])
    assert not rig.spawner.alive


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(
        [sys.executable, DOOMED, tmp_path / "scratch", BEST_RUNG.name], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    with server, server.stdout:
        try:
            assert server.stdout.readline() == "ready\n"
            yield server
        finally:
            server.kill()


async def test_the_death_of_the_server_is_the_death_of_all(
    doomed: subprocess.Popen[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await until(lambda: len(descendants(doomed.pid)) == PROCESSES_IN_ALL, 5, lambda: descendants(doomed.pid))
    below = descendants(doomed.pid)
    pid_namespaces = PidNamespaces()
    pid_namespaces.hold(below)
    with pid_namespaces as names:
        assert len(names) == SANDBOXES
        assert len(processes(names)) == PROCESSES_IN_ALL - HELPERS
        doomed.kill()
        await until(lambda: not processes(names), 2, lambda: processes(names))
    await until(lambda: not any(is_alive(pid) for pid in below), 2, lambda: below)
    await until(lambda: not list((tmp_path / "scratch").iterdir()), 2)
    assert capfd.readouterr().err == ""


async def test_servers_that_share_a_scratch_folder_do_not_meet(rig: Rig, start_rig: StartRig) -> None:
    other = await start_rig(scratch=rig.scratch)
    one, two = await rig.create(name="same"), await other.create(name="same")
    await rig.sh(one, "echo x >/srv/x")
    assert (await other.sh(two, "ls /srv/x")).status == 2
    await other.spawner.stop()
    assert (await rig.sh(one, "cat /srv/x")).output == "x\n"
    assert first_process(await rig.pid_namespace(one))
