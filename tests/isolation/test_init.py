"""PID 1 of every episode: a program that sleeps once it has set up everything."""

import errno
import os
import resource
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tbench2_env.isolation import init
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import receive_descriptors
from tbench2_env.isolation.init import Inits, Inside
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.spec import RUNGS, Network, SandboxSpec
from tbench2_env.isolation.start import move_up

from .child import as_root, in_own_process, stat_fields
from .rig import Rig, first_process, until

#: Without a user namespace for episodes, and for those who have a single id, too.
PLAIN_RUNG = replace(RUNGS["3"], id_map=(0, 0, 1))


async def asleep(rig: Rig) -> int:
    pid = first_process(await rig.pid_namespace(await rig.create()))
    await until(lambda: stat_fields(pid)[0] == "S")
    return pid


async def test_it_sleeps_on_after_a_signal(rig: Rig) -> None:
    pid = await asleep(rig)
    for _ in range(3):  # interrupted and resumed, the system call is made again
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: stat_fields(pid)[0] == "T")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: stat_fields(pid)[0] == "S")
    utime, stime = stat_fields(pid)[11:13]
    assert int(utime) + int(stime) <= 1, "it burns processor time"


async def test_it_costs_a_few_pages_and_is_the_first_to_go_when_memory_is_short(rig: Rig) -> None:
    pid = await asleep(rig)
    resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    assert resident_pages * resource.getpagesize() <= 64 << 10
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


async def test_zombies_need_no_code(rig: Rig) -> None:
    sandbox = await rig.create()
    pid = first_process(await rig.pid_namespace(sandbox))
    await rig.sh(sandbox, "exec >&- 2>&-; (sleep 0.05 &)")
    children = Path(f"/proc/{pid}/task/{pid}/children")
    await until(lambda: not children.read_text())


def start_ready(folder: Path, places: Sequence[str]) -> tuple[int, int, Program, socket.socket]:
    """A PID 1 that is ready, with a folder in place of each of its mounts: what `start` answers, and our end."""
    inits = Inits(PLAIN_RUNG)  # its memory is PID 1's until that is ready
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = move_up(theirs.detach())
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    inside = Inside(channel, [], [(fd, place) for place in places], fd)
    spec = SandboxSpec("x", network=Network.HOST)
    started = inits.start(sc.CLONE_NEWNS | sc.CLONE_NEWPID, spec, (), inside)
    os.close(channel)
    assert ours.recv(4096) == init.READY
    return *started, ours


@as_root
def test_a_failure_names_the_call(tmp_path: Path) -> None:
    """With a folder where a detached mount should be."""
    pid, pidfd, program, ours = start_ready(tmp_path, [""])
    os.close(pidfd)
    ours.send(b"\0")
    answer, _ = receive_descriptors(ours, 4096)
    error = init.why_not(program, answer)
    assert (error.errno, error.strerror) == (errno.EINVAL, "mount /tmp: Invalid argument")
    os.waitpid(pid, 0)


@as_root
def test_it_ends_with_whoever_was_to_tell_it_to_go_on(tmp_path: Path) -> None:
    pid, _, program, ours = start_ready(tmp_path, [])
    ours.close()
    assert os.waitpid(pid, 0)[1] == 0
    assert init.why_not(program, b"").args == ("PID 1 died",)


@in_own_process
def test_an_episode_is_the_first_thing_to_go_when_memory_is_short() -> None:
    init.prefer_for_oom_killer()
    assert Path("/proc/self/oom_score_adj").read_text() == "1000\n"
