"""Commands of agents: killing them with all they started, many at once, a launcher that is slow or gone."""

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable

import pytest

from tbench2_env.isolation.channel import MESSAGE_MAX
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import CommandSpec

from .rig import ENV, Rig, processes, stopped, unshare, until

#: Every way for a command's children to get away from it.
ESCAPES = f"""
sleep 3001 &
setsid sleep 3002 &
(setsid sleep 3003 &)
(setsid bash -c '(trap "" TERM HUP INT; sleep 3004; exit) & sleep 3005; exit' &)
setsid {unshare("--user --pid --fork")} bash -c 'sleep 3006 & sleep 3007; exit' &
kill -STOP $!
until [ $(cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^300[1-7]$') -ge 5 ]; do :; done
echo up
"""
ESCAPED = {f"sleep {number}" for number in range(3001, 3006)}


def sleeping(namespace: str) -> set[str]:
    return {line for line in processes([namespace]).values() if line.startswith("sleep ")}


async def test_kill_ends_a_command_with_all_that_escaped_from_it_and_no_earlier_service(rig: Rig) -> None:
    sandbox = await rig.create()
    namespace = await rig.pid_namespace(sandbox)
    assert (await rig.sh(sandbox, "setsid sleep 2001 & sleep 2002 & (sleep 2003 &) ; echo up")).output == "up\n"
    services = {"sleep 2001", "sleep 2002", "sleep 2003"}
    await until(lambda: sleeping(namespace) == services)
    running = rig.start_sh(sandbox, ESCAPES + "exec sleep 3000")
    await running.said("up")
    assert sleeping(namespace) >= ESCAPED | services
    running.process.kill()
    assert (await running.done(2)).status == -signal.SIGKILL
    await until(lambda: sleeping(namespace) == services, 1, lambda: processes([namespace]))
    assert len(processes([namespace])) == 4, "the services and PID 1"
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"


async def test_what_a_command_leaves_behind_is_a_service(rig: Rig) -> None:
    sandbox = await rig.create()
    namespace = await rig.pid_namespace(sandbox)
    running = rig.start_sh(sandbox, "setsid sleep 2001 & echo up")
    assert (await running.done()).status == 0
    running.process.kill()
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"
    await until(lambda: sleeping(namespace) == {"sleep 2001"}, 2, lambda: processes([namespace]))


async def test_kill_leaves_other_commands_and_sandboxes_alone(rig: Rig) -> None:
    sandbox, other = await rig.create(), await rig.create()
    kept = [rig.start_sh(where, "echo up; read; echo done") for where in (sandbox, sandbox, other)]
    doomed = rig.start_sh(sandbox, "echo up; kill -STOP $$")
    for running in (*kept, doomed):
        await running.said("up")
    doomed.process.kill()
    assert (await doomed.done(2)).status == -signal.SIGKILL
    for running in kept:
        running.say()
        assert (await running.done()).output == "up\ndone\n"


async def test_killing_twice_late_or_at_once_is_no_error(rig: Rig) -> None:
    sandbox = await rig.create()
    running = rig.start_sh(sandbox, "exec sleep 1000")
    running.process.kill()
    running.process.kill()
    assert (await running.done(2)).status == -signal.SIGKILL
    running.process.kill()
    missing = rig.start_sh(sandbox, "true", cwd="/")
    await missing.done()
    missing.process.kill()
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"


async def test_killing_what_keeps_forking(rig: Rig) -> None:
    sandbox = await rig.create()
    namespace = await rig.pid_namespace(sandbox)
    running = rig.start_sh(sandbox, "echo up; while :; do (setsid sleep 0.05 &); done")
    await running.said("up")
    running.process.kill()
    assert (await running.done(5)).status == -signal.SIGKILL
    await until(lambda: len(processes([namespace])) == 1, 2, lambda: processes([namespace]))


async def test_zombies_do_not_pile_up(rig: Rig) -> None:
    sandbox = await rig.create()
    await rig.sh(sandbox, "for i in {1..20}; do (setsid true &); done")
    running = rig.start_sh(sandbox, "while grep -hs '^State:.Z' /proc/[0-9]*/status; do :; done; exit")
    assert (await running.done(5)).status == 0


async def test_many_commands_at_once_in_one_sandbox(rig: Rig) -> None:
    sandbox = await rig.create()
    done = await asyncio.gather(*(rig.sh(sandbox, f"echo {number}; exit {number}") for number in range(40)))
    assert [(one.status, one.output) for one in done] == [(number, f"{number}\n") for number in range(40)]


async def test_a_command_that_is_the_last_one_again_and_one_that_is_not(rig: Rig) -> None:
    sandbox = await rig.create()
    for word in ("one", "one", "two", "one"):
        assert (await rig.sh(sandbox, "echo $word", env={"word": word})).output == f"{word}\n"
    for path in ("/bin/true", "/nowhere", "/nowhere", "/bin/true"):
        running = rig.start_command(sandbox, CommandSpec(path, ("x",), "/", {}))
        if path == "/nowhere":
            with pytest.raises(SandboxError, match="/nowhere: execve: No such file"):
                await running.done()
        else:
            assert (await running.done()).status == 0


async def test_waiting_again_or_giving_up_waiting(rig: Rig) -> None:
    sandbox = await rig.create()
    running = rig.start_sh(sandbox, "read; exit 4")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.process.wait(), 0.01)
    running.say()
    assert [await running.process.wait() for _ in range(2)] == [4, 4]


async def test_a_slow_launcher_gets_everything_in_order_and_descriptors_are_kept_for_it(rig: Rig) -> None:
    sandbox = await rig.create()
    env = ENV | {"A": "x" * 60_000}
    with stopped(rig.launcher_pid):
        running = [rig.start_sh(sandbox, f"echo $$ {number}", env=env) for number in range(30)]
        running[7].process.kill()
    done = await asyncio.gather(*(one.done() for one in running))
    assert [one.output.split()[1:] for number, one in enumerate(done) if number != 7] == [
        [str(number)] for number in range(30) if number != 7
    ]
    pids = [int(one.output.split()[0]) for number, one in enumerate(done) if number != 7]
    assert pids == sorted(pids), "they were started in order"


async def test_a_message_that_is_too_large_is_refused_even_while_the_launcher_is_slow(rig: Rig) -> None:
    sandbox = await rig.create()
    large, too_large = ({f"V{n}": "x" * 60_000 for n in range(count)} for count in (4, 5))
    with stopped(rig.launcher_pid):
        waiting = [rig.start_sh(sandbox, "exit 5", env=large) for _ in range(10)]
        with pytest.raises(SandboxError, match=rf"{MESSAGE_MAX} at most"):
            rig.start_sh(sandbox, "true", env=too_large)
    assert [(await one.done()).status for one in waiting] == [5] * 10


@pytest.mark.parametrize("helper", [lambda rig: rig.launcher_pid, lambda rig: rig.pid], ids=["launcher", "spawner"])
async def test_killing_a_command_when_the_helpers_are_gone_is_no_error(rig: Rig, helper: Callable[[Rig], int]) -> None:
    """Whoever cleans up after a command must not fail because of it."""
    sandbox = await rig.create()
    running = rig.start_sh(sandbox, "echo up; exec sleep 1000")
    verifier = rig.start_verifier(sandbox, rig.layer(test="echo up; exec sleep 1000"))
    await running.said("up")
    await verifier.said("up")
    launcher, spawner = rig.launcher_pid, rig.pid
    os.kill(helper(rig), signal.SIGKILL)
    for pid in (launcher, spawner):  # both end, and this loop has not heard of it yet
        wait_until_dead(pid)
    running.process.kill()
    verifier.process.kill()
    for one in (running, verifier):
        with pytest.raises(SandboxError, match="died"):
            await one.done(2)


def wait_until_dead(pid: int) -> None:
    """Blocks, on purpose."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        assert select.select([pidfd], [], [], 5)[0]
        os.close(pidfd)


async def test_the_end_of_the_launcher_is_the_end_of_all(rig: Rig) -> None:
    """Nothing could be started any more."""
    sandbox = await rig.create()
    namespace = await rig.pid_namespace(sandbox)
    os.kill(rig.launcher_pid, signal.SIGKILL)
    assert "the spawner process died" in await asyncio.wait_for(sandbox.died, 2)
    await until(lambda: not processes([namespace]), 1, lambda: processes([namespace]))
    with pytest.raises(SandboxError, match="the spawner"):
        rig.start_sh(sandbox, "true")
    with pytest.raises(SandboxError, match="the spawner"):
        await rig.create()
