"""The warden beside a real spawner: real episodes that take too much, and many that do nothing."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tbench2_env.isolation.channel import Channel
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Limits
from tbench2_env.isolation.warden import exceeded_text

from .child import stat_fields
from .conftest import StartRig
from .rig import RUNGS_HERE, Rig, children, count_descriptors, until
from .scene import python

_MIB = 1 << 20
_BOOT = """
import os, socket, sys
from tbench2_env.isolation import warden
from tbench2_env.isolation.channel import Channel
os.chdir(sys.argv[2])
warden.main(Channel(socket.socket(fileno=int(sys.argv[1]))))
"""
Event = dict[str, Any]


class Warden:
    """A warden in a process of its own, and what it said."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno()), str(rig.spawner.folder)]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        self.channel = Channel(ours)
        ours.setblocking(False)
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._events.append(self.channel.receive()[0])
        return self._events

    def add(self, sandbox: Sandbox, *, kills: bool = False, **limits: float) -> None:
        """The sandbox that was created last."""
        pid = children(self.rig.pid)[-1]
        proc = os.open(f"/proc/{pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY)
        pidfd = os.pidfd_open(pid)
        message = {"op": "add", "name": sandbox.spec.name, "kills_at_processes_max": kills}
        wanted = Limits(**limits)  # type: ignore[arg-type]
        self.channel.send({**message, "limits": wanted.to_dict()}, [proc, pidfd])
        os.close(proc)
        os.close(pidfd)

    def say(self, op: str, name: str, **more: float) -> None:
        self.channel.send({"op": op, "name": name, **more})

    async def said(self, event: str, within_s: float = 10.0, **wanted: object) -> Event:
        def found() -> Event | None:
            fits = (one for one in self.events if {**one, "event": event, **wanted} == one)
            return next(fits, None)

        await until(found, within_s, lambda: self.events)
        event_found = found()
        assert event_found is not None
        return event_found

    async def usage(self, sandbox: Sandbox) -> dict[str, float]:
        request = len(self.events) + 1000
        self.say("usage", sandbox.spec.name, id=request)
        usage: dict[str, float] = (await self.said("usage", id=request))["usage"]
        return usage

    async def cpu_of(self, sandbox: Sandbox, wanted: float) -> None:
        """Wait until the episode's processes have ended but for their CPU time that was told."""
        for _ in range(100):
            if (await self.usage(sandbox))["cpu_s"] == wanted:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{await self.usage(sandbox)}")

    def cpu_s(self) -> float:
        return sum(int(field) for field in stat_fields(self.process.pid)[11:13]) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.channel.sock.close()
        assert self.process.wait(5) == 0


@pytest.fixture
async def warden(rig: Rig) -> AsyncIterator[Warden]:
    warden = Warden(rig)
    yield warden
    warden.end()


async def exceeds(warden: Warden, sandbox: Sandbox, script: str, limit: str) -> Event:
    """Run what must get the sandbox killed."""
    running = warden.rig.start_sh(sandbox, script)
    event = await warden.said("exceeded", within_s=20)
    assert (event["name"], event["limit"]) == (sandbox.spec.name, limit)
    assert await running.ended_with_its_sandbox()
    return event


# ---------------------------------------------------------------- memory
async def test_a_memory_hog(rig: Rig, warden: Warden) -> None:
    quiet = await rig.create()
    warden.add(quiet, memory_bytes=256 * _MIB)
    sandbox = await rig.create()
    warden.add(sandbox, memory_bytes=256 * _MIB)
    code = """
        data = bytearray(2 << 30)
        for at in range(0, len(data), 4096):
            if at % (256 << 20) == 0: print(at >> 20, flush=True)
            data[at] = 1
        print("all of it", flush=True)
        import time; time.sleep(60)
    """
    event = await exceeds(warden, sandbox, python(code), "memory")
    assert event["text"] == (
        "the episode used more memory than its limit of 256.0 MiB (environment.memory in task.toml) and was killed"
    )
    assert (await warden.usage(sandbox))["memory_peak_bytes"] > 256 * _MIB
    assert (await rig.sh(quiet, "echo fine")).output == "fine\n"


async def test_shared_pages_count_once(rig: Rig, warden: Warden) -> None:
    sandbox = await rig.create()
    warden.add(sandbox, memory_bytes=300 * _MIB)
    code = """
        import os, time
        data = b"x" * (100 << 20)
        for _ in range(20):
            if os.fork() == 0: time.sleep(60)
        print("up", flush=True)
        time.sleep(60)
    """
    running = rig.start_sh(sandbox, python(code))
    await running.said("up")
    usage = await warden.usage(sandbox)
    assert 100 * _MIB < usage["memory_peak_bytes"] <= 300 * _MIB
    assert usage["processes_peak"] >= 22
    assert (await rig.sh(sandbox, "sleep 1; echo fine")).output == "fine\n"
    # And a process of its own beside them is over the limit.
    await exceeds(warden, sandbox, python("data = b'x' * (250 << 20); import time; time.sleep(60)"), "memory")


async def test_files_in_dev_shm_count_once_mapped_or_not(rig: Rig, warden: Warden) -> None:
    sandbox = await rig.create()
    warden.add(sandbox, memory_bytes=200 * _MIB)
    code = """
        import mmap, os, time
        with open("/dev/shm/x", "wb+") as file:
            file.truncate(120 << 20)
            memory = mmap.mmap(file.fileno(), 0)
        for at in range(0, len(memory), 4096): memory[at] = 1
        print("up", flush=True)
        time.sleep(60)
    """
    await rig.start_sh(sandbox, python(code)).said("up")
    assert (await rig.sh(sandbox, "sleep 1; echo fine")).output == "fine\n"
    assert 120 * _MIB < (await warden.usage(sandbox))["memory_peak_bytes"] <= 200 * _MIB
    await exceeds(warden, sandbox, "head -c 100M /dev/zero >/dev/shm/y; sleep 60", "memory")


# ---------------------------------------------------------------- storage
async def test_dd_without_end(rig: Rig, warden: Warden) -> None:
    if bounds_itself(rig):
        return
    sandbox = await rig.create()
    warden.add(sandbox, storage_bytes=256 * _MIB)
    await rig.sh(sandbox, "head -c 100M /dev/zero >/srv/fine")
    event = await exceeds(warden, sandbox, "dd if=/dev/zero of=/srv/x bs=1M", "storage")
    assert "more storage than its limit of 256.0 MiB (environment.storage in task.toml)" in event["text"]
    assert (await warden.usage(sandbox))["storage_bytes"] > 256 * _MIB


async def test_files_without_number(rig: Rig, warden: Warden) -> None:
    if bounds_itself(rig):
        return
    sandbox = await rig.create()
    warden.add(sandbox, files_max=5_000)
    code = """
        import os
        for number in range(2_000_000):
            if number % 1000 == 0: os.makedirs(f"/srv/{number}")
            open(f"/srv/{number // 1000 * 1000}/f{number}", "w").close()
    """
    event = await exceeds(warden, sandbox, python(code), "files")
    assert event["text"] == "the episode used more files and folders than its limit of 5000 and was killed"


async def test_a_worktree_below_its_limit_is_left_alone_and_measured(rig: Rig, warden: Warden) -> None:
    if bounds_itself(rig):
        return
    sandbox = await rig.create()
    warden.add(sandbox, storage_bytes=64 * _MIB, files_max=3000)
    script = "head -c 32M /dev/zero >/srv/x; mkdir /srv/d; touch /srv/d/{1..2000}; rm /srv/d/1???; sleep 0.5; echo fine"
    assert (await rig.sh(sandbox, script)).output == "fine\n"
    usage = await warden.usage(sandbox)
    assert 32 * _MIB <= usage["storage_bytes"] < 33 * _MIB
    # The overlay's folders of /srv, /tmp and the like come to a few entries.
    assert 1001 + 2 <= usage["files"] < 1001 + 60
    assert [one for one in warden.events if one["event"] == "exceeded"] == []


def bounds_itself(rig: Rig) -> bool:
    """A worktree in memory is a tmpfs of its own size; the warden then has nothing to watch."""
    if rig.spawner.host.in_memory:
        assert rig.spawner.host.enforcement["storage"] == "the size of a tmpfs"
    return rig.spawner.host.in_memory


# ---------------------------------------------------------------- processes
async def test_a_fork_bomb_within_its_cap_is_reported(rig: Rig, warden: Warden) -> None:
    sandbox = await rig.create(limits=Limits(processes_max=256))
    warden.add(sandbox, processes_max=256)
    bomb = "for i in {1..300}; do sleep 3 & done 2>/dev/null; wait"
    rig.start_sh(sandbox, bomb)
    begun = time.monotonic()
    hit = await warden.said("hit")
    assert (hit["name"], hit["limit"]) == (sandbox.spec.name, "processes")
    assert hit["text"] == "the episode reached its limit of 256 processes and threads: it cannot start more"
    await until(lambda: time.monotonic() - begun > 2.5)
    assert 2 <= len([one for one in warden.events if one["event"] == "hit"]) <= 3
    assert 250 <= (await warden.usage(sandbox))["processes_peak"] <= 256


@pytest.mark.parametrize(
    "bomb",
    [
        "for i in {1..300}; do sleep 30 & done; wait",
        python(
            """
            import threading, time
            for _ in range(300): threading.Thread(target=time.sleep, args=(30,)).start()
            """
        ),
    ],
)
async def test_a_bomb_that_nothing_caps_is_killed(start_rig: StartRig, bomb: str) -> None:
    uncapped = [rung for rung in RUNGS_HERE if not rung.caps_processes]
    rig = await start_rig(rung=(uncapped or RUNGS_HERE)[0].name)
    warden = Warden(rig)
    sandbox = await rig.create()
    warden.add(sandbox, kills=True, processes_max=256)
    event = await exceeds(warden, sandbox, bomb, "processes")
    assert event["text"].startswith("the episode used more processes and threads than its limit of 256")
    warden.end()


async def test_a_thousand_processes_that_come_and_go(rig: Rig, warden: Warden) -> None:
    sandbox = await rig.create()
    warden.add(sandbox, memory_bytes=200 * _MIB, processes_max=4096)
    code = """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(1000):
            if os.fork() == 0: time.sleep(1.5); os._exit(0)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            if os.fork() == 0: os._exit(0)
    """
    assert (await rig.sh(sandbox, python(code))).status == 0
    usage = await warden.usage(sandbox)
    assert usage["processes_peak"] > 500, "as far as it was looked at in time"
    assert usage["memory_peak_bytes"] <= 200 * _MIB
    assert [one["event"] for one in warden.events] == ["usage"]


# ---------------------------------------------------------------- usage and life
async def test_usage(rig: Rig, warden: Warden) -> None:
    sandbox = await rig.create()
    warden.add(sandbox)
    busy = "import time; data = b'x' * (50 << 20); end = time.process_time() + 1\nwhile time.process_time() < end: pass"
    running = rig.start_sh(sandbox, python(busy + "\nprint('up', flush=True); time.sleep(60)"))
    await running.said("up")
    await rig.sh(sandbox, "sleep 0.3")
    usage = await warden.usage(sandbox)
    assert 1.0 <= usage["cpu_s"] < 1.5
    assert 50 * _MIB < usage["memory_peak_bytes"] < 80 * _MIB
    running.process.kill()
    await running.done()
    await warden.cpu_of(sandbox, 0.0)


async def test_it_forgets_what_is_dropped_and_minds_nothing_that_is_gone(rig: Rig, warden: Warden) -> None:
    first = await rig.create()
    assert await warden.usage(first) is None
    before = count_descriptors(warden.process.pid)
    warden.add(first, memory_bytes=_MIB, storage_bytes=_MIB)
    assert await warden.usage(first) is not None
    await first.destroy()
    assert (await warden.usage(first))["files"] >= 0, "it has died, and is yet to be dropped"
    warden.say("drop", first.spec.name)
    warden.say("drop", first.spec.name)
    assert await warden.usage(first) is None
    assert count_descriptors(warden.process.pid) == before


async def test_a_hostile_worktree(rig: Rig, warden: Warden) -> None:
    if bounds_itself(rig):
        return
    sandbox = await rig.create()
    warden.add(sandbox, storage_bytes=1 << 30, files_max=100_000)
    code = r"""
        import os
        os.chdir("/srv")
        os.symlink("/", "link"); os.mkfifo("fifo"); os.mkdir("closed", 0)
        os.mkdir(b"\xff\xfe"); open(b"\xff\xfe/\n", "w").close()
        for _ in range(500):
            os.mkdir("x" * 255); os.chdir("x" * 255)
        open("bottom", "w").write("x" * 100_000)
    """
    assert (await rig.sh(sandbox, python(code))).status == 0
    end = time.monotonic() + 8
    while (usage := await warden.usage(sandbox))["files"] < 500:
        assert time.monotonic() < end
        await asyncio.sleep(0.2)
    assert 506 <= usage["files"] < 530
    assert warden.process.poll() is None
    await rig.sh(sandbox, "rm -rf /srv/xxx*")


async def test_64_idle_episodes_cost_less_than_3_percent_of_a_core(rig: Rig, warden: Warden) -> None:
    for _ in range(64):
        warden.add(
            await rig.create(), memory_bytes=1 << 30, storage_bytes=1 << 30, files_max=100_000, processes_max=100
        )
    await warden.usage(rig.sandboxes[-1])
    begun, used = time.monotonic(), warden.cpu_s()
    await until(lambda: time.monotonic() - begun > 4)
    assert warden.cpu_s() - used < 0.03 * 4


@pytest.mark.parametrize("limit", ["memory", "storage", "files", "processes"])
def test_texts_are_sentences(limit: str) -> None:
    limits = Limits(memory_bytes=2 << 30, storage_bytes=10 << 30, files_max=7, processes_max=8)
    text = exceeded_text(limit, limits)
    assert text.startswith("the episode used more ")
    assert text.endswith(" and was killed")
    assert any(number in text for number in ("2.0 GiB", "10.0 GiB", " 7 ", " 8 "))
