"""Commands of other users than root."""

import contextlib
import os
from dataclasses import replace

import pytest

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import CommandSpec, Rung

from .conftest import StartRig
from .rig import IDS_ARE_FAKED, RUNGS_HERE, Rig, bash, processes, until

WHO = "echo $(id -u) $(id -g) $(id -G); grep -E '^Cap(Eff|Prm|Amb)' /proc/self/status | sort -u -k2; touch /etc/x"


def command(script: str, *ids: int, tty: bool = False) -> CommandSpec:
    return replace(bash(script, tty=tty), ids=ids)


@pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)
async def test_who_a_command_runs_as(start_rig: StartRig, rung: Rung) -> None:
    rig = await start_rig(rung=rung.name)
    sandbox = await rig.create(rig.layer(test="id -u"))
    done = await rig.start_command(sandbox, command(WHO, 33, 34, 100, 65535)).done()
    if not rung.has_id_range:
        assert done.lines[0].startswith("0 0"), "there is one id"
        apt = await rig.sh(sandbox, "apt-config dump APT::Sandbox::User")
        assert apt.lines == ['APT::Sandbox::User "root";'], "it would not download as it cannot be _apt"
        return
    assert done.lines == [
        "33 34 34 100 65535", "CapPrm:\t0000000000000000", "touch: cannot touch '/etc/x': Permission denied",
    ]  # fmt: skip
    script = "touch /tmp/mine; stat -c '%u %g' /tmp/mine; kill -0 1; setpriv --reuid 0 true"
    done = await rig.start_command(sandbox, command(script, 33, 33)).done()
    assert done.lines[0] == "33 33"
    assert len([line for line in done.lines[1:] if "not permitted" in line]) == 2
    if not rung.user_namespaces:
        return
    with pytest.raises(SandboxError, match="Invalid argument"):
        await rig.start_command(sandbox, command("true", 70_000, 0)).done()


async def output(master: int, lines: int) -> list[str]:
    seen = ""

    def complete() -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(master, 1000).decode()
        return seen.count("\n") >= lines

    await until(complete)
    return seen.splitlines()


async def test_somebody_with_a_terminal_and_his_end(rig: Rig) -> None:
    if IDS_ARE_FAKED or not rig.spawner.rung.has_id_range:
        pytest.skip("an episode has one id here")
    sandbox = await rig.create()
    names = [await rig.pid_namespace(sandbox)]
    process, master = await sandbox.open_terminal(command("tty <&0; stat -c %u $(tty); sleep 1000", 33, 33, tty=True))
    try:
        assert await output(master, 2) == ["/dev/pts/0", "33"]
        process.kill()
        assert await process.wait() == -9
    finally:
        os.close(master)
    await until(lambda: len(processes(names)) == 1, 2.0, lambda: processes(names))
