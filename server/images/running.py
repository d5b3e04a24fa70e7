"""RUN: one command in a sandbox over what was built so far; what it changed becomes a layer."""

import contextlib
import os
import re
import stat
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import worktree
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox, Spawner
from tbench2_env.isolation.spec import CommandSpec, Limits, Network, SandboxSpec
from tbench2_env.server import shell
from tbench2_env.server.images import users
from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.layer import BaseView
from tbench2_env.server.images.steps import Run
from tbench2_env.server.images.store import Store
from tbench2_env.server.networks import Choice
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.sandboxes import close_sandbox, network_env, open_sandbox

#: Lines of a failed command's output that its error holds; all that was kept is on disk.
_LOG_LINES = 50
_OUTPUT_LIMIT_BYTES = 1 << 20
_SH = "/bin/sh"
#: Without a slash the name is looked up in PATH, by the image's own shell.
_FIND_AND_RUN = 'exec "$@"'
_MAKE_FOLDERS = 'mkdir -p -- "$@"'
#: The folder is BuildKit's, /dev one that no layer keeps.
_PUT_SCRIPT = 'mkdir -p /dev/pipes && cat <&3 >"$1" && chmod 755 "$1"'
_SETTING_UP_TIMEOUT_S = 20.0
#: What programs print whose change of an owner or of their own ids was refused: coreutils, apt, dpkg, su, tar.
_ABOUT_IDS = re.compile(r"chown|chgrp|ownership|setgroups|set(e|re|res)?[ug]id|not (set|switch) (user|group)")


class BuildFailed(Exception):
    """A step failed, or the build's time ran out; the text names the line, the command, how it ended and its output."""


class Time:
    """The seconds that a whole build has."""

    def __init__(self, timeout_s: float) -> None:
        self._clockout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def is_over(self) -> str:
        """What to say of it when it is."""
        limit = f"{self._clockout_s:g} s (environment.build_timeout_sec in task.toml)"
        return f"the build was stopped after {limit}; the steps that it had finished are kept"


@dataclass(frozen=True)
class Site:
    """Where builds run, with which way out, and where their layers go."""

    spawner: Spawner
    proxy: EgressProxy
    store: Store
    network: Choice

    @property
    def logs(self) -> Path:
        """Where the outputs of commands are kept."""
        return self.store.folder / "logs"


@dataclass(frozen=True)
class Below:
    """What a step is carried out on: folders of stored layers, the topmost first, over the node's root or nothing."""

    stored: tuple[str, ...]
    over_node: bool


@contextlib.asynccontextmanager
async def view(site: Site, below: Below) -> AsyncIterator[BaseView]:
    """All of it as one tree, read-only."""
    async with site.spawner.view(below.stored, over_node=below.over_node) as root:
        yield BaseView(root, shift=site.store.kind.owner_shift)


class Command:
    """One RUN on its way to a layer, bounded by `limits` and `clock`."""

    def __init__(self, site: Site, step: Run, limits: Limits, clock: Time) -> None:
        self._site, self._step, self._limits, self._clock = site, step, limits, clock
        self._log = site.logs
        self._runner = shell.Runner(_OUTPUT_LIMIT_BYTES)

    async def run(self, below: Below, folder: Path) -> None:
        """Make `folder/root` of what the command changes.

        Raises: BuildFailed, DockerfileError for a user that the image does not have, SandboxError, OSError.
        """
        # Named after the layer: the log of the next try takes the place of this one's.
        self._log = self._site.logs / f"{folder.name.partition('.')[0]}.log"
        account = await self._account(below)
        network = self._site.network if self._step.network == "default" else Choice(Network.PRIVATE)
        spec = SandboxSpec(
            uuid.uuid4().hex, (), network.network, self._limits, below.stored, below.over_node, building=True
        )
        sandbox = await open_sandbox(self._site.spawner, spec, network, self._site.proxy)
        try:
            env = {"HOME": account.home, **network_env(network), **self._step.env}
            await self._set_up(sandbox, env)
            await self._run(sandbox, _command(self._step.argv, self._step.workdir, env, account.ids))
            await sandbox.harvest(folder / "root")
        finally:
            self._runner.close()
            await close_sandbox(sandbox, self._site.proxy)
        for scratch in self._step.scratch:
            _throw_away(folder / "root", scratch)

    async def _account(self, below: Below) -> users.Account:
        if self._step.user in (None, "root", "0"):
            return users.Account()
        async with view(self._site, below) as tree:
            try:
                return users.look_up(self._step.user, tree)
            except users.UnknownUser as error:
                raise DockerfileError(self._step.line, f"USER: {error}") from None

    async def _set_up(self, sandbox: Sandbox, env: dict[str, str]) -> None:
        """Have the folders and the script that the command finds, whoever it runs as."""
        if self._step.scratch:
            await self._prepare(sandbox, (_SH, "-c", _MAKE_FOLDERS, "sh", *self._step.scratch), env, b"")
        if self._step.script is not None:
            path, content = self._step.script
            await self._prepare(sandbox, (_SH, "-c", _PUT_SCRIPT, "sh", path), env, content.encode())

    async def _prepare(self, sandbox: Sandbox, argv: Sequence[str], env: dict[str, str], content: bytes) -> None:
        spec = _command(argv, "/", env, ())
        with shell.in_memory(content, "script") as script:
            result = await self._execute(sandbox, spec, _SETTING_UP_TIMEOUT_S, script)
        if result.exit_code != 0:
            raise BuildFailed(f"{self._where()} cannot be set up: {result.output.strip()}")

    async def _run(self, sandbox: Sandbox, spec: CommandSpec) -> None:
        result = await self._execute(sandbox, spec, self._clock.left_s)
        hits = "; ".join(sandbox.take_hits().values())
        if result.timed_out or result.exit_code != 0:
            self._keep_log(result.output)
            how = self._clock.is_over if result.timed_out else f"ended with exit code {result.exit_code}"
            notes = "; ".join(filter(None, (hits, self._one_id(result.output))))
            raise BuildFailed(f"{self._where()} {how}{f' ({notes})' if notes else ''}; {self._tail(result.output)}")

    async def _execute(self, sandbox: Sandbox, spec: CommandSpec, timeout_s: float, *fds: int) -> shell.Result:
        try:
            result = await self._runner.run(lambda low: sandbox.start(spec, low), timeout_s, *fds)
            if result.exit_code != 0:
                await sandbox.confirm()  # a command that was killed is heard of before why its sandbox was
        except SandboxError as error:
            if not self._site.spawner.alive:
                raise
            how = "was ended" if sandbox.died.done() else "cannot be started"
            raise BuildFailed(f"{self._where()} {how}: {error}") from None
        return result

    def _one_id(self, output: str) -> str:
        """What to say of a failure that looks as if it was for want of other ids."""
        rung = self._site.spawner.rung
        if rung.has_id_range or not _ABOUT_IDS.search(output):
            return ""
        return f"rung {rung.name} has one user id only: no file can be given to another user, nothing can run as one"

    def _keep_log(self, output: str) -> None:
        self._site.logs.mkdir(parents=True, exist_ok=True)
        text = f"{self._step.text}\n\n{output}"
        self._log.write_text(text, encoding="utf-8", errors="surrogatepass")

    def _where(self) -> str:
        text = " ".join(self._step.text.split())
        return f"environment/Dockerfile line {self._step.line}: {text if len(text) <= 300 else text[:299] + '…'}:"

    def _tail(self, output: str) -> str:
        lines = output.rstrip().splitlines()
        if not lines:
            return "it printed nothing"
        last = "\n".join(lines[-_LOG_LINES:])
        return f"the last {min(len(lines), _LOG_LINES)} lines of its output (all: {self._log}):\n{last}"


def _command(argv: Sequence[str], cwd: str, env: dict[str, str], ids: tuple[int, ...]) -> CommandSpec:
    if argv[0].startswith("/"):
        return CommandSpec(argv[0], tuple(argv), cwd, env, ids=ids)
    return CommandSpec(_SH, ("sh", "-c", _FIND_AND_RUN, "sh", *argv), cwd, env, ids=ids)


def _throw_away(root: Path, folder: str) -> None:
    """What a cache mount left does not belong to the layer. No link of it is followed: it could lead anywhere."""
    parent, name = os.path.split(folder.rstrip("/"))
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            inner = sc.open_folder_beneath(fd, os.fsencode(parent.strip("/") or "."))
            try:
                _delete(f"/proc/self/fd/{inner}/{name}")
            finally:
                os.close(inner)
    finally:
        os.close(fd)


def _delete(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        worktree.delete(path)
    else:
        Path(path).unlink()
