"""The server's side of isolation: start the spawner, create sandboxes, run commands and verifiers in them.

spawner = await Spawner.start(SpawnerConfig("1", ("/var/tmp/tbench2",), hide=("/opt/tasks",)))
sandbox = await spawner.create(SandboxSpec("episode-1"))
process = sandbox.start(CommandSpec(...), (stdin, stdout, stderr))
status = await process.wait()
await sandbox.destroy()
await spawner.stop()
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tbench2_env.isolation import laid, worktree
from tbench2_env.isolation.aiochannel import AsyncChannel
from tbench2_env.isolation.changes import Worktree
from tbench2_env.isolation.channel import ChannelClosed, close_all, receive_descriptors
from tbench2_env.isolation.spec import CommandSpec, Cover, Host, Rung, SandboxSpec, SpawnerConfig, Usage

#: Seconds that the spawner may take for one request. Its work takes milliseconds; this only ends a wait on a host that
#: has stopped working.
REQUEST_TIMEOUT_S = 60.0
#: Seconds to wait for a destroyed sandbox's processes. One stuck in the kernel is reaped later.
DESTROY_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0

# -I and -S keep site-packages out, and the stub packages keep the client's imports out: the spawner stays lean.
_BOOT = """
import sys, types
for name, path in (("tbench2_env", []), ("tbench2_env.isolation", [sys.argv[1]])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from tbench2_env.isolation.boot import main
main(sys.argv[2:])
"""


_SPAWNER_DIED = "the sandbox is dead: the spawner process died"
#: A message from a helper and the descriptors that came with it.
_Answer = tuple[dict[str, Any], list[int]]


class SandboxError(Exception):
    """The isolation itself failed; never the fault of a command that ran in it."""


class IsolationUnavailable(SandboxError):
    """This host cannot isolate episodes; the text names the refused call and the setting that frees it."""


class Process:
    """A command or verifier that was started in a sandbox."""

    def __init__(self, channel: AsyncChannel, request: int) -> None:
        self._channel, self._request = channel, request
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """The exit status, negative for a signal. Raises: SandboxError when it could not be started."""
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        """Kill it and everything it started; `wait` then answers."""
        if not self.exited.done():
            with contextlib.suppress(ChannelClosed):  # with the helpers, all that they started is gone
                self._channel.post({"id": 0, "op": "kill", "target": self._request})


class Sandbox:
    """One live sandbox."""

    def __init__(self, spawner: "Spawner", spec: SandboxSpec) -> None:
        self.spec = spec
        self._spawner = spawner
        self.verifier_folder = spawner.ground / "episodes" / spec.name / "verifier"
        #: A socket that listens in the episode's network, for whoever proxies for it; closed with the sandbox.
        self.listener: socket.socket | None = None
        self._hits: dict[str, str] = {}
        self._ended = Usage()
        self._counts: dict[str, int] = {}
        #: Resolved with a sentence when the sandbox died by itself.
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, command: CommandSpec, fds: Sequence[int]) -> Process:
        """Start an agent's command; `fds` become its 0, 1, 2, ... Raises: SandboxError when the sandbox is dead."""
        self._check_alive()
        request = {"op": "exec", "name": self.spec.name, "command": command.to_dict()}
        return self._spawner._start_process(self._spawner.launcher, request, fds, self)

    def start_verifier(
        self, command: CommandSpec, fds: Sequence[int], layer: str, covers: Sequence[Cover] = ()
    ) -> Process:
        """Start a command that alone sees `layer`'s tests at /tests, and at /logs/verifier `verifier_folder`, empty.

        In the folders of `covers` it sees what they say.
        """
        self._check_alive()
        request = {
            "op": "verify", "name": self.spec.name, "command": command.to_dict(), "layer": layer,
            "covers": [cover.to_dict() for cover in covers],
        }  # fmt: skip
        return self._spawner._start_process(self._spawner.control, request, fds, self)

    async def open_terminal(self, command: CommandSpec, fds: Sequence[int] = ()) -> tuple[Process, int]:
        """Start a command with a terminal of its own; answers with the process and the terminal's master.

        `fds` become the command's 3, 4, ... Raises: SandboxError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self.start(command, (theirs.fileno(), *fds))
            master = await _receive_descriptor(ours, process)
        return process, master

    async def confirm(self) -> None:
        """Return if the sandbox is alive now. Raises: SandboxError saying what died."""
        self._check_alive()
        try:
            message, _ = await self._spawner._ask({"op": "check", "name": self.spec.name})
            self._count_hits(message["hits"])
        except SandboxError as error:
            # The news of its death may have come before the answer, and says why.
            if not self.died.done():
                self.died.set_result(str(error))
            raise SandboxError(self.died.result()) from None

    def take_hits(self) -> dict[str, str]:
        """What limits were met since the last call without the sandbox being killed for it: a sentence for each."""
        hits, self._hits = self._hits, {}
        return hits

    async def process_names(self) -> list[str]:
        """Names of the agent's live processes, the first 64 (proc_pid_comm(5); chosen by the agent).

        Raises: SandboxError.
        """
        self._check_alive()
        message, _ = await self._spawner._ask({"op": "names", "name": self.spec.name})
        names: list[str] = message["names"]
        return names

    async def usage(self) -> Usage:
        """Raises: SandboxError."""
        message, _ = await self._spawner._ask({"op": "usage", "name": self.spec.name})
        live = Usage(**message["usage"])
        return dataclasses.replace(
            live,
            cpu_s=round(live.cpu_s if message["all_cpu"] else live.cpu_s + self._ended.cpu_s, 3),
            memory_peak_bytes=max(live.memory_peak_bytes, self._ended.memory_peak_bytes),
        )

    def _command_ended(self, cpu_s: float, max_rss_bytes: int) -> None:
        peak = max(self._ended.memory_peak_bytes, max_rss_bytes)
        self._ended = Usage(cpu_s=self._ended.cpu_s + cpu_s, memory_peak_bytes=peak)

    def _count_hits(self, counts: dict[str, int]) -> None:
        """Of a cgroup, which counts how often it refused something."""
        limits = self.spec.limits
        if counts.get("memory", 0) > self._counts.get("memory", 0):
            mib = (limits.memory_bytes or 0) >> 20
            self._hits["memory"] = (
                f"a process was killed at the episode's memory limit of {mib} MiB (environment.memory in task.toml)"
            )
        if counts.get("processes", 0) > self._counts.get("processes", 0):
            self._hits["processes"] = f"the episode reached its limit of {limits.processes_max} processes and threads"
        self._counts = counts

    @property
    def has_worktree(self) -> bool:
        return self._spawner.rung.isolated

    def worktree(self, *, thorough: bool = False) -> Worktree:
        """What was changed in it so far. Blocks. Raises: FileNotFoundError when it is gone, SandboxError."""
        if not self.has_worktree:
            raise SandboxError("there is no worktree on this rung: what an episode changes is the node's own")
        return Worktree(self._spawner.ground, self.spec, self._spawner.rung, thorough=thorough)

    async def destroy(self) -> None:
        """Kill all that runs in it and discard its worktree. A sandbox that is gone already is no error."""
        await self._spawner._destroy(self)

    def take_listener(self, fds: list[int]) -> None:
        if fds:
            self.listener = socket.socket(fileno=fds[0])
            self.died.add_done_callback(lambda died: self._close_listener())

    def _close_listener(self) -> None:
        if self.listener is not None:
            self.listener.close()

    def _check_alive(self) -> None:
        if self.died.done():
            raise SandboxError(self.died.result())


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def _receive_descriptor(sock: socket.socket, process: Process) -> int:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: _set(readable))
    try:
        await readable
        _, fds = receive_descriptors(sock, 16)
    finally:
        loop.remove_reader(sock.fileno())
    if not fds:
        await process.wait()
        raise SandboxError("the command ended before it had a terminal")
    return fds[0]


class Spawner:
    """The running spawner and what it says of this host.

    `folder` is its scratch folder as the host sees it, `ground` the same with what is mounted in it. `layers` is a
    folder there in which the server makes one folder per task: `NAME/root` becomes a lower layer of worktrees,
    `NAME/tests` is what verifiers see at /tests. It is a tmpfs that only this server and its spawner reach.
    """

    def __init__(self, process: subprocess.Popen[bytes], config: SpawnerConfig) -> None:
        self._process, self._config = process, config
        self._requests = itertools.count(1)
        self._answers: dict[int, asyncio.Future[_Answer]] = {}
        self._processes: dict[int, tuple[Process, Sandbox | None]] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._hello: asyncio.Future[tuple[dict[str, Any], list[int]]] = asyncio.get_running_loop().create_future()
        self._cleaners = concurrent.futures.ThreadPoolExecutor(2, "discard")
        self._ground_fd = -1
        self._gone = False
        self._undoing: set[asyncio.Task[None]] = set()
        self.control: AsyncChannel
        self.launcher: AsyncChannel
        self.rung: Rung
        self.folder: Path
        self.ground: Path
        self.layers: Path
        self.host: Host

    @classmethod
    async def start(cls, config: SpawnerConfig) -> Self:
        """Start the spawner on the first scratch folder that works with the rung. Raises: IsolationUnavailable."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        arguments = [str(Path(__file__).parent), json.dumps(config.to_dict()), *map(str, theirs)]
        process = subprocess.Popen(  # noqa: ASYNC220 - once, at start, and vfork is quick
            [sys.executable, "-I", "-S", "-c", _BOOT, *arguments],
            pass_fds=theirs, stdin=subprocess.DEVNULL, env={}, cwd="/",
        )  # fmt: skip
        self = cls(process, config)
        self.control, self.launcher = (AsyncChannel(pair[0], self._message, self._lost) for pair in pairs)
        for pair in pairs:
            pair[1].close()
        await self._greet()
        return self

    async def _greet(self) -> None:
        try:
            hello, fds = await asyncio.wait_for(self._hello, REQUEST_TIMEOUT_S)
            if "error" in hello:
                raise IsolationUnavailable(hello["error"])
        except BaseException:
            await self.stop()
            raise
        self.rung, self.folder, self.host = Rung.from_dict(hello["hello"]), Path(hello["folder"]), Host(**hello["host"])
        self._ground_fd = fds[0]
        # The spawner's mount namespace is not ours; a path through the descriptor leads into it.
        self.ground = Path(f"/proc/self/fd/{self._ground_fd}")
        self.layers = self.ground / "shared/layers"

    @property
    def alive(self) -> bool:
        return not self._gone and self._process.poll() is None

    def scratch_bytes(self, entries_max: int = 200_000) -> int:
        """Bytes that worktrees hold, trash included; counts at most `entries_max` files. Blocks."""
        total = 0
        for kind in ("episodes", "trash"):
            for parent, _, files in os.walk(self.ground / kind):
                for name in files:
                    with contextlib.suppress(OSError):
                        total += os.lstat(os.path.join(parent, name)).st_blocks * 512
                entries_max -= len(files)
                if entries_max < 0:
                    return total
        return total

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox, ready for commands. Raises: SandboxError naming what the host refused."""
        if spec.name in self._sandboxes:
            raise SandboxError(f"there is a sandbox {spec.name!r} already")
        sandbox = self._sandboxes[spec.name] = Sandbox(self, spec)
        creation = asyncio.ensure_future(self._ask({"op": "create", "spec": spec.to_dict()}))
        try:
            sandbox.take_listener((await asyncio.shield(creation))[1])
        except asyncio.CancelledError:
            # The spawner is at it already: let it finish, then undo it.
            creation.add_done_callback(lambda done: self._undo(sandbox, done))
            raise
        except SandboxError:
            self._sandboxes.pop(spec.name, None)
            self._delete(spec.name)
            raise
        return sandbox

    def _undo(self, sandbox: Sandbox, creation: "asyncio.Future[_Answer]") -> None:
        if creation.exception() is None:
            sandbox.take_listener(creation.result()[1])
            self._undoing.add(task := asyncio.ensure_future(self._destroy(sandbox)))
            task.add_done_callback(self._undoing.discard)
        else:
            self._sandboxes.pop(sandbox.spec.name, None)
            self._delete(sandbox.spec.name)

    async def stop(self) -> None:
        """End every sandbox and the spawner; its scratch folder is removed."""
        self.control.close()
        self.launcher.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        self._lost()
        await asyncio.to_thread(self._cleaners.shutdown)
        if self._ground_fd >= 0:
            # A helper that was killed may have left its record; with the folder that would be gone.
            await asyncio.to_thread(laid.sweep, [str(self.folder.parent)])
            # Deletions of ours may have been in the spawner's way when it removed the folder.
            await asyncio.to_thread(worktree.remove, str(self.folder))
            os.close(self._ground_fd)
            self._ground_fd = -1

    # ------------------------------------------------------------ requests
    async def _ask(self, message: dict[str, Any]) -> "_Answer":
        request = next(self._requests)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        try:
            self.control.post({"id": request, **message})
            return await asyncio.wait_for(answer, REQUEST_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(f"the spawner did not {message['op']} within {REQUEST_TIMEOUT_S:g} s") from None
        except ChannelClosed:
            raise SandboxError(_SPAWNER_DIED) from None
        finally:
            self._answers.pop(request, None)

    def _start_process(
        self, channel: AsyncChannel, message: dict[str, Any], fds: Sequence[int], sandbox: Sandbox | None = None
    ) -> Process:
        request = next(self._requests)
        process = Process(channel, request)
        try:
            channel.post({"id": request, **message}, fds)
        except ChannelClosed:
            raise SandboxError(_SPAWNER_DIED) from None
        except ValueError as error:
            raise SandboxError(str(error)) from error
        self._processes[request] = (process, sandbox)
        return process

    async def _destroy(self, sandbox: Sandbox) -> None:
        if self._sandboxes.pop(sandbox.spec.name, None) is None:
            return
        with contextlib.suppress(TimeoutError, SandboxError):
            await asyncio.wait_for(self._ask({"op": "destroy", "name": sandbox.spec.name}), DESTROY_TIMEOUT_S)
        if not sandbox.died.done():
            sandbox.died.set_result("the sandbox was destroyed")
        self._delete(sandbox.spec.name)

    def _delete(self, name: str) -> None:
        """Delete a discarded worktree in the background, two at a time, with whatever it left of its verifiers."""
        trash = self.folder / "trash"

        def delete() -> None:
            for folder in [trash / name, *trash.glob(f"{name}.*")]:
                # An end may be heard of twice; two deletions of one folder would each miss what the other is at.
                own = trash / f".deleting-{os.urandom(8).hex()}"
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(own)
                    worktree.delete(str(own))

        with contextlib.suppress(RuntimeError):  # shut down: the spawner removes the whole folder
            self._cleaners.submit(delete)

    # ------------------------------------------------------------ messages
    def _message(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"id": request, "ok": True}:
                self._resolve(self._answers.get(request), (message, fds))
            case {"event": "exit", "id": request}:
                self._process_ended(request, message)
            case {"event": "failed", "id": request, "error": error} | {"id": request, "error": error}:
                self._request_failed(request, SandboxError(error))
            case {"event": "died", "name": name, "reason": reason}:
                self._sandbox_died(name, reason)
            case {"event": "hit", "name": name, "limit": limit, "text": text}:
                if name in self._sandboxes:
                    self._sandboxes[name]._hits[limit] = text
            case _:
                self._hello.set_result((message, fds))

    def _resolve(self, future: "asyncio.Future[_Answer] | None", result: "_Answer | Exception") -> None:
        if future is None or future.done():
            if isinstance(result, tuple):
                close_all(result[1])
        elif isinstance(result, tuple):
            future.set_result(result)
        else:
            future.set_exception(result)

    def _process_ended(self, request: int, end: dict[str, Any]) -> None:
        process, sandbox = self._processes.pop(request, (None, None))
        if sandbox is not None:
            sandbox._command_ended(end["cpu_s"], end["max_rss_bytes"])
        if process is not None and not process.exited.done():
            process.exited.set_result(end["status"])

    def _request_failed(self, request: int, error: SandboxError) -> None:
        self._resolve(self._answers.get(request), error)
        process, _ = self._processes.pop(request, (None, None))
        if process is not None and not process.exited.done():
            process.exited.set_exception(error)
            process.exited.exception()  # nobody need be waiting for it

    def _sandbox_died(self, name: str, reason: str) -> None:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None and not sandbox.died.done():
            sandbox.died.set_result(f"the sandbox is dead: {reason}")
        self._delete(name)

    def _lost(self) -> None:
        """The spawner is gone, and with it everything it made."""
        self._gone = True
        self.control.close()
        self.launcher.close()
        error = SandboxError(_SPAWNER_DIED)
        if not self._hello.done():
            self._hello.set_exception(IsolationUnavailable("the spawner process died at its start"))
        for answer in self._answers.values():
            self._resolve(answer, error)
        for request in list(self._processes):
            self._request_failed(request, error)
        for sandbox in self._sandboxes.values():
            if not sandbox.died.done():
                sandbox.died.set_result(str(error))
        self._sandboxes.clear()
