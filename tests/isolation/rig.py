"""The rig: a real spawner, sandboxes with things running in them, and the proof that nothing of it is left."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from support.node import BEST_RUNG as BEST_RUNG
from support.node import IDS_ARE_FAKED as IDS_ARE_FAKED
from support.node import NODE
from support.node import ROOT_IS_OVERLAY as ROOT_IS_OVERLAY
from support.node import RUNGS_HERE as RUNGS_HERE
from support.server import descendants
from tbench2_env.isolation.process import Process, SandboxError
from tbench2_env.isolation.sandbox import Sandbox, Spawner
from tbench2_env.isolation.spec import CommandSpec, Cover, Limits, Network, Provided, SandboxSpec, SpawnerConfig

from .child import stat_fields

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PF_EXITING = 0x4  # linux/sched.h
NO_LIMITS = Limits()
ENV = {"PATH": PATH, "HOME": "/root"}
#: Makes a command another user's, as far as episodes have others.
AS_ANOTHER_USER = "setpriv --reuid 33 --clear-groups" if IDS_ARE_FAKED or BEST_RUNG.has_id_range else ""
USER_NAMESPACES = NODE != "no-userns"
#: Whether we are root over the network and the cgroup that we are in.
HOST_NETWORK_IS_OURS = CGROUPS_ARE_OURS = NODE in ("", "no-userns")


def bash(script: str, *, cwd: str = "/", env: Mapping[str, str] = ENV, tty: bool = False) -> CommandSpec:
    return CommandSpec("/bin/bash", ("bash", "-c", script), cwd, dict(env), tty)


def fresh_name() -> str:
    return f"sandbox-{uuid.uuid4().hex[:8]}"


def unshare(options: str) -> str:
    """Makes a command one in namespaces of its own, if episodes can make any."""
    return f"unshare {options}" if BEST_RUNG.user_namespaces else ""


async def until(true: Callable[[], object], within_s: float = 5.0, why: Callable[[], object] = lambda: "") -> None:
    """Wait until `true()`; fail, showing `why()`, if that takes longer than `within_s` seconds."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not true():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s:g} s: {why()}"
        await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    status: int
    output: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()


class Running:
    """A command whose output goes to memory; writing to its `stdin` is the way to let it go on."""

    def __init__(self, start: Callable[[Sequence[int]], Process], extra_fds: Sequence[int] = ()) -> None:
        self._memory = os.memfd_create("output", os.MFD_CLOEXEC)
        read_end, self._stdin = os.pipe()
        try:
            self.process = start((read_end, self._memory, self._memory, *extra_fds))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read_end)

    @property
    def output(self) -> str:
        return os.fsdecode(os.pread(self._memory, 1 << 22, 0))

    def say(self, line: str = "") -> None:
        os.write(self._stdin, line.encode() + b"\n")

    async def said(self, text: str, within_s: float = 10.0) -> str:
        """Wait until the output holds `text`; answers with the output."""
        await until(
            lambda: text in self.output or self.process.exited.done(), within_s, lambda: f"{text} in {self.output!r}"
        )
        assert text in self.output, f"ended with {self.process.exited} and output {self.output!r}"
        return self.output

    async def done(self, within_s: float = 20.0) -> Done:
        status = await asyncio.wait_for(self.process.wait(), within_s)
        return Done(status, self.output)

    async def ended_with_its_sandbox(self, within_s: float = 2.0) -> bool:
        """Whether it was killed, or is said to have ended because its sandbox is dead."""
        try:
            return (await self.done(within_s)).status == -signal.SIGKILL
        except SandboxError as error:
            return "dead" in str(error)

    def close(self) -> None:
        os.close(self._memory)
        os.close(self._stdin)


class Rig:
    """A started spawner; `stop` ends it and checks that nothing is left."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.spawner: Spawner
        self.sandboxes: list[Sandbox] = []
        self._running: list[Running] = []
        self.pid_namespaces = PidNamespaces()
        self._complaints: list[str] = []
        self._helper_descriptors: dict[int, int] = {}

    @classmethod
    async def start(cls, scratch: Path, hide: Iterable[str] = (), rung: str = "") -> Self:
        self = cls(scratch)
        asyncio.get_running_loop().set_exception_handler(self._complain)
        config = SpawnerConfig(rung or BEST_RUNG.name, (str(scratch),), tuple(hide))
        self.spawner = await Spawner.start(config)
        await self._settle()
        self._helper_descriptors = {
            pid: count_descriptors(pid) for pid in (self.pid, self.launcher_pid, self.warden_pid)
        }
        return self

    async def _settle(self) -> None:
        """All helpers have answered, so they have set themselves up."""
        with pytest.raises(SandboxError, match="no sandbox"):
            await self.spawner._ask({"op": "destroy", "name": "nobody"})
        conversation, request = self.spawner.conversation, {"op": "exec", "name": "nobody", "command": {}}
        with pytest.raises(SandboxError, match="dead"):
            await Process.start(conversation, conversation.launcher, request, ()).wait()
        sandbox = await self.spawner.create(SandboxSpec("first"))
        await sandbox.usage()
        await sandbox.destroy()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._complaints.append(f"{context['message']}: {context.get('exception')!r}")

    # ------------------------------------------------------------ sandboxes and what runs in them
    async def create(
        self, *layers: str, name: str | None = None, network: Network = Network.PRIVATE, limits: Limits = NO_LIMITS
    ) -> Sandbox:
        return await self.create_as(SandboxSpec(name or fresh_name(), layers, network, limits))

    async def create_as(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.spawner.create(spec)
        self.sandboxes.append(sandbox)
        self.pid_namespaces.hold(children(self.pid))
        return sandbox

    def start_sh(
        self,
        sandbox: Sandbox,
        script: str,
        fds: Sequence[int] = (),
        *,
        cwd: str = "/",
        env: Mapping[str, str] = ENV,
    ) -> Running:
        return self.start_command(sandbox, bash(script, cwd=cwd, env=env), fds)

    def start_command(self, sandbox: Sandbox, command: CommandSpec, fds: Sequence[int] = ()) -> Running:
        return self._keep(Running(lambda low: sandbox.start(command, low), fds))

    async def sh(
        self, sandbox: Sandbox, script: str, *, cwd: str = "/", env: Mapping[str, str] = ENV, within_s: float = 20.0
    ) -> Done:
        """Run `script` with bash to its end."""
        return await self.start_sh(sandbox, script, cwd=cwd, env=env).done(within_s)

    def start_verifier(
        self, sandbox: Sandbox, layer: str, *, env: Mapping[str, str] = ENV, path: str = "/bin/bash"
    ) -> Running:
        """Start `bash /tests/test.sh` as the verifier."""
        return self.start_verifier_command(
            sandbox, CommandSpec(path, ("bash", "/tests/test.sh"), "/", dict(env)), layer
        )

    def start_verifier_command(
        self,
        sandbox: Sandbox,
        command: CommandSpec,
        layer: str,
        covers: Sequence[Cover] = (),
        provided: Sequence[Provided] = (),
    ) -> Running:
        return self._keep(Running(lambda low: sandbox.start_verifier(command, low, layer, covers, provided)))

    async def verify(self, sandbox: Sandbox, layer: str, covers: Sequence[Cover] = (), within_s: float = 20.0) -> Done:
        command = CommandSpec("/bin/bash", ("bash", "/tests/test.sh"), "/", dict(ENV))
        return await self.start_verifier_command(sandbox, command, layer, covers).done(within_s)

    def _keep(self, running: Running) -> Running:
        self._running.append(running)
        return running

    def layer(self, root: Mapping[str, str] = {}, *, test: str = "", tests: Mapping[str, str] = {}) -> str:
        """A task's layer: `root` is laid over the node's root, `test` is tests/test.sh, `tests` is beside it."""
        name = f"layer-{uuid.uuid4().hex[:8]}"
        for path, text in {
            **{f"root/{path}": text for path, text in root.items()},
            **{f"tests/{path}": text for path, text in {"test.sh": test, **tests}.items()},
        }.items():
            file = self.spawner.layers / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (self.spawner.layers / name / "root").mkdir(exist_ok=True)
        if shift := self.spawner.rung.owner_shift:
            for made in [self.spawner.layers / name, *(self.spawner.layers / name).rglob("*")]:
                os.chown(made, shift, shift)
        return name

    # ------------------------------------------------------------ the host's view
    @property
    def pid(self) -> int:
        return self.spawner._process.pid

    @property
    def launcher_pid(self) -> int:
        return children(self.pid)[1]

    @property
    def warden_pid(self) -> int:
        return children(self.pid)[0]

    async def pid_namespace(self, sandbox: Sandbox) -> str:
        """Names the sandbox for `processes`. Ask before it is dead."""
        done = await self.sh(sandbox, "readlink /proc/self/ns/pid")
        assert done.output.startswith("pid:["), done
        return done.output.strip()

    def worktrees(self) -> list[str]:
        """Folders of sandboxes on the disk, live or in the trash."""
        return [str(path) for kind in ("episodes", "trash") for path in self.spawner.folder.glob(f"{kind}/*")]

    # ------------------------------------------------------------ the end
    async def stop(self) -> None:
        """Stop the spawner. Nothing may be left of it: process, mount, folder, descriptor, complaint."""
        try:
            await self._check_helpers()
        finally:
            begun = asyncio.get_running_loop().time()
            await self.spawner.stop()
            took_s = asyncio.get_running_loop().time() - begun
            for running in self._running:
                running.close()
        assert took_s < 3, "stop() took long"
        assert not self.spawner.alive
        with self.pid_namespaces as names:
            await until(lambda: not processes(names), 1.0, lambda: processes(names))
        assert not self._complaints
        assert str(self.scratch) not in Path("/proc/self/mountinfo").read_text(), "a mount leaked into the host"
        if self.spawner._process.returncode == -signal.SIGKILL:
            return  # nobody was left to remove the folder; the next spawner does
        left = {path.name for path in self.scratch.iterdir()}
        assert self.spawner.folder.name not in left, "the spawner's folder outlived it"
        assert not {name for name in left if not name.startswith("tbench2-")}, "half a folder is left"

    async def _check_helpers(self) -> None:
        """With every sandbox destroyed, the helpers hold no more descriptors than at first and have no children."""
        if self.spawner.conversation.control._channel.fileno() < 0:
            return  # a test has ended them
        await asyncio.gather(*(sandbox.destroy() for sandbox in self.sandboxes))
        for pid, count in self._helper_descriptors.items():
            await until(
                lambda pid=pid, count=count: count_descriptors(pid) <= count,  # type: ignore[misc]
                10.0,  # of many files, the warden says only then what they are
                lambda pid=pid: f"descriptors left in {command_line(pid)}: {descriptors(pid)}",  # type: ignore[misc]
            )
        await until(lambda: len(descendants(self.pid)) == 2, 2.0, lambda: descendants(self.pid))
        await until(lambda: not self.worktrees(), 10.0, self.worktrees)


class PidNamespaces:
    """Names of PID namespaces, kept from being given to others while they are held: that takes a descriptor each."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def hold(self, pids: Iterable[int]) -> None:
        """The namespaces of these processes, other than our own."""
        for pid in pids:
            name = namespace(pid, "pid")
            if name not in {*self._held, "", namespace(os.getpid(), "pid")}:
                with contextlib.suppress(OSError):  # it is gone
                    self._held[name] = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> list[str]:
        return list(self._held)

    def __exit__(self, *error: object) -> None:
        for fd in self._held.values():
            os.close(fd)


# ---------------------------------------------------------------- looking at the host
@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Make a helper slow."""
    os.kill(pid, signal.SIGSTOP)
    while stat_fields(pid)[0] != "T":
        pass
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def children(pid: int) -> list[int]:
    """Children in the order in which they were born; none if the process is gone."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def namespace(pid: int, kind: str) -> str:
    """The name of a process's namespace, empty if the process is gone."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    return ""


def processes(pid_namespaces: Iterable[str]) -> dict[int, str]:
    """All live processes in one of these PID namespaces, in the host's numbering: pid -> command line."""
    wanted = set(pid_namespaces)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: command_line(pid) for pid in pids if namespace(pid, "pid") in wanted and is_alive(pid)}


def is_alive(pid: int) -> bool:
    """Whether it can still do anything: it has not begun to exit, and is no zombie that somebody has yet to reap."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX" and not int(fields[6]) & _PF_EXITING


def first_process(pid_namespace: str) -> int:
    """PID 1 of a sandbox, in the host's numbering."""
    [pid] = [pid for pid in processes([pid_namespace]) if inner_number(pid) == 1]
    return pid


def inner_number(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in status if line.startswith("NSpid:"))


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    return "?"


def descriptors(pid: int) -> dict[int, str]:
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            found[int(entry.name)] = str(entry.readlink())
    return found


def own_descriptors() -> dict[int, str]:
    return descriptors(os.getpid())


def count_descriptors(pid: int) -> int:
    """But for the executables of PID 1 that the spawner keeps, one for each kind of episode."""
    return sum(not path.startswith("/memfd:start") for path in descriptors(pid).values())
