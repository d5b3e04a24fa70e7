"""Reading the processes of a real episode, and of our own machine."""

import os
import threading

from tbench2_env.isolation.gauge import Gauge

from .child import in_own_process
from .rig import Rig, children, own_descriptors, until

_MIB = 1 << 20


async def test_the_helpers_list_an_episode_undisturbed(rig: Rig) -> None:
    """An open folder's position belongs to all who share it: the gauge must have one of its own."""
    await rig.create()
    proc = os.open(f"/proc/{children(rig.pid)[-1]}/root/proc", os.O_RDONLY | os.O_DIRECTORY)
    gauge = Gauge(proc)
    await until(lambda: not gauge.pids())  # what made the agent's user namespace is on its way out
    os.lseek(proc, 5, os.SEEK_SET)
    assert gauge.pids() == []
    assert os.lseek(proc, 0, os.SEEK_CUR) == 5
    gauge.close()
    os.close(proc)


@in_own_process  # pytest's has threads of its own that come and go
def test_our_own_processes() -> None:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    before = own_descriptors()
    gauge = Gauge(proc)
    own = str(os.getpid())
    assert own in gauge.pids()
    count = gauge.tasks([own])
    let_go = threading.Event()
    thread = threading.Thread(target=let_go.wait)
    thread.start()
    assert gauge.tasks([own]) == count + 1
    let_go.set()
    thread.join()
    resident = gauge.resident([own])[own]
    data = b"x" * (64 * _MIB)
    assert gauge.resident([own])[own] - resident > 60 * _MIB
    shared, others = gauge.proportional(own)
    assert len(data) < others < gauge.resident([own])[own] + _MIB
    assert shared < 16 * _MIB
    assert gauge.cpu_s() > 0
    gauge.close()
    assert own_descriptors() == before
    os.close(proc)


async def test_names_of_an_episodes_processes(rig: Rig) -> None:
    sandbox = await rig.create()
    for _ in range(100):  # what made the agent's user namespace is on its way out
        if not await sandbox.process_names():
            break
    script = (
        "cp /bin/sleep '/tmp/a) b'; '/tmp/a) b' 1000 & for i in 1 2 3; do sleep 1000 & done; echo up; exec sleep 1000"
    )
    await rig.start_sh(sandbox, script).said("up")
    await rig.sh(sandbox, "until [ $(pgrep -c sleep) = 4 ]; do :; done")
    assert sorted(await sandbox.process_names()) == ["a) b", "sleep", "sleep", "sleep", "sleep"]
    await rig.sh(sandbox, "for i in $(seq 100); do sleep 1000 & done")
    assert len(await sandbox.process_names()) == 64


def test_processes_that_are_gone_use_nothing() -> None:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    gauge = Gauge(proc)
    assert gauge.tasks(["4194305"]) == 1
    assert gauge.resident(["4194305"]) == {}
    assert gauge.proportional("4194305") == (0, 0)
    gauge.close()
    os.close(proc)
