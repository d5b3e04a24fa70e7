"""A server to be killed: `doomed.py SCRATCH RUNG` starts a spawner and sandboxes full of processes, and says so."""

import asyncio
import os
import sys
from collections.abc import Sequence

from tbench2_env.isolation.process import Process
from tbench2_env.isolation.sandbox import Spawner
from tbench2_env.isolation.spec import CommandSpec, SandboxSpec, SpawnerConfig

SANDBOXES = 3
#: Spawner, launcher and warden.
HELPERS = 3
#: In each sandbox: PID 1, a service in a session of its own and a command; in the first, a verifier too.
PROCESSES_IN_ALL = HELPERS + SANDBOXES * 3 + 1
_ENV = {"PATH": "/usr/bin:/bin"}


async def main(scratch: str, rung: str) -> None:
    spawner = await Spawner.start(SpawnerConfig(rung, (scratch,)))
    null = os.open("/dev/null", os.O_RDWR)
    fds = (null, null, null)
    running: list[Process] = []
    for number in range(SANDBOXES):
        sandbox = await spawner.create(SandboxSpec(f"sandbox-{number}"))
        service = CommandSpec("/bin/bash", ("bash", "-c", "setsid sleep 1000 & echo"), "/", _ENV)
        await sandbox.start(service, fds).wait()
        running.append(sandbox.start(_sleep(), fds))
        if number == 0:
            (spawner.layers / "task/tests").mkdir(parents=True)
            running.append(sandbox.start_verifier(_sleep(), fds, "task"))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(process.wait() for process in running))


def _sleep(words: Sequence[str] = ("sleep", "1000")) -> CommandSpec:
    return CommandSpec("/bin/sleep", tuple(words), "/", _ENV)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
