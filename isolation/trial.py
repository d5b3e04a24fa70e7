"""The trial: an episode that proves that this host isolates, before any agent is let in."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tbench2_env.isolation.process import Process, SandboxError
from tbench2_env.isolation.sandbox import IsolationUnavailable, Sandbox, Spawner
from tbench2_env.isolation.spec import CommandSpec, Network, SandboxSpec, SpawnerConfig

_NAME = "trial-episode"
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
_MARK = "tbench2-trial"
#: What an agent does: writes to system and private folders, finds /tests empty, leaves a process behind.
_AGENT = f"""set -e
echo mine >/etc/{_MARK}; mkdir /usr/local/{_MARK}; echo mine >/tmp/{_MARK}
[ -z "$(ls -A /tests)" ]; [ $$ -lt 1000 ]
(exec sleep 3600 <&- >/dev/null 2>&1 &)"""
#: What a verifier does: sees the agent's files and its own, and alone may write the reward.
_VERIFIER = f"""set -e
[ "$(cat /etc/{_MARK} /tmp/{_MARK})" = "$(printf 'mine\\nmine')" ]; [ -d /usr/local/{_MARK} ]
echo 1 >/logs/verifier/reward.txt"""


_LAST_RESORT = (
    " Without isolation it starts only if told to: TB2_ISOLATION=none with MAX_CONCURRENT_ENVS=1 runs one episode at a "
    "time on the node's own files with the server's rights, where an agent can do all that the server can."
)


async def start_best(configs: Sequence[SpawnerConfig]) -> tuple[Spawner, dict[str, str]]:
    """Start a spawner on the first rung that passes the trial; answers with why those before it did not.

    Raises: IsolationUnavailable with a paragraph that says of each rung which call was refused and what frees it.
    """
    refusals: dict[str, str] = {}
    for config in configs:
        try:
            return await start(config), refusals
        except SandboxError as error:
            refusals[config.rung] = str(error)
    raise IsolationUnavailable("this host cannot isolate episodes. " + _paragraph(refusals) + _LAST_RESORT)


async def start(config: SpawnerConfig) -> Spawner:
    """Start a spawner and try it. Raises: SandboxError saying what does not work."""
    spawner = await Spawner.start(config)
    if not spawner.rung.isolated:  # a trial would write to the node, and could prove nothing
        return spawner
    try:
        await run(spawner)
    except BaseException:
        await spawner.stop()
        raise
    return spawner


def _paragraph(refusals: dict[str, str]) -> str:
    """Rungs that fail alike are told of together."""
    rungs_of: dict[str, list[str]] = {}
    for rung, reason in refusals.items():
        rungs_of.setdefault(reason, []).append(rung)
    return " ".join(f"Rung {', '.join(rungs)}: {reason}." for reason, rungs in rungs_of.items())


async def run(spawner: Spawner) -> None:
    """Let an agent and a verifier work in a sandbox, and end it. Raises: SandboxError saying what does not work."""
    layer = _make_layer(spawner)
    sandbox = await spawner.create(SandboxSpec(_NAME, (layer,), Network.PRIVATE))
    try:
        await _succeed("the agent", lambda fds: sandbox.start(_bash("-c", _AGENT), fds))
        await _succeed("the verifier", lambda fds: sandbox.start_verifier(_bash("/tests/test.sh"), fds, layer))
        _check_verdict(sandbox)
    finally:
        with contextlib.suppress(SandboxError):
            await sandbox.destroy()
    _check_clean(spawner)


def _check_clean(spawner: Spawner) -> None:
    for left in (spawner.ground / "episodes" / _NAME, Path("/etc", _MARK)):
        if os.path.lexists(left):
            raise IsolationUnavailable(f"the trial episode left {left} behind")


def _make_layer(spawner: Spawner) -> str:
    for part in ("root", "tests"):
        folder = spawner.layers / _NAME / part
        folder.mkdir(parents=True, exist_ok=True)
        if spawner.rung.owner_shift:
            os.chown(folder, spawner.rung.owner_shift, spawner.rung.owner_shift)
    (spawner.layers / _NAME / "tests/test.sh").write_text(_VERIFIER)
    return _NAME


def _bash(*arguments: str) -> CommandSpec:
    return CommandSpec("/bin/bash", ("bash", *arguments), "/", _ENV)


async def _succeed(who: str, start: Callable[[Sequence[int]], Process]) -> None:
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = await start((null, output, output)).wait()
        said = os.pread(output, 4096, 0).decode(errors="replace").strip()
    finally:
        os.close(output)
        os.close(null)
    if status != 0:
        raise IsolationUnavailable(f"{who} of the trial episode ended with exit status {status}: {said}")


def _check_verdict(sandbox: Sandbox) -> None:
    try:
        reward = (sandbox.verifier_folder / "reward.txt").read_text()
    except OSError as error:
        raise IsolationUnavailable(f"the trial episode's verdict cannot be read: {error}") from None
    if reward != "1\n":
        raise IsolationUnavailable(f"the trial episode's verdict was {reward!r}")
