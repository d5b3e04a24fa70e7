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


def test_processes_that_are_gone_use_nothing() -> None:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    gauge = Gauge(proc)
    assert gauge.tasks(["4194305"]) == 1
    assert gauge.resident(["4194305"]) == {}
    assert gauge.proportional("4194305") == (0, 0)
    gauge.close()
    os.close(proc)
