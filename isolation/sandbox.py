"""The server's side of isolation: start the spawner, create sandboxes, run commands and verifiers in them.

spawner = await Spawner.start(scratch=["/var/tmp/tbench2"], hide=["/opt/tasks"])
sandbox = await spawner.create(SandboxSpec("episode-1"))
process = sandbox.start(CommandSpec(...), (stdin, stdout, stderr))
status = await process.wait()
await sandbox.destroy()
await spawner.stop()
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tbench2_env.isolation import worktree
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all, encode_checked, receive_descriptors
from tbench2_env.isolation.spec import CommandSpec, Rung, SandboxSpec, SpawnerConfig

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
from tbench2_env.isolation.spawner import main
main(sys.argv[2:])
"""


class SandboxError(Exception):
    """The isolation itself failed; never the fault of a command that ran in it."""


class IsolationUnavailable(SandboxError):
    """This host cannot isolate episodes; the text names the refused call and the setting that frees it."""


class Process:
    """A command or verifier that was started in a sandbox."""

    def __init__(self, channel: "_AsyncChannel", request: int) -> None:
        self._channel, self._request = channel, request
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """The exit status, negative for a signal. Raises: SandboxError when it could not be started."""
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        """Kill it and everything it started; `wait` then answers."""
        if not self.exited.done():
            with contextlib.suppress(SandboxError):  # with the helpers, all that they started is gone
                self._channel.post({"id": 0, "op": "kill", "target": self._request})


class _AsyncChannel:
    """A channel on the event loop: never blocks; replies resolve futures, events resolve processes."""

    def __init__(self, sock: socket.socket, spawner: "Spawner") -> None:
        sock.setblocking(False)
        self._channel, self._spawner = Channel(sock), spawner
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[tuple[dict[str, Any], list[int]]] = collections.deque()
        self._loop.add_reader(sock.fileno(), self._receive)

    def post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send now, or as soon as the other side has read enough; the caller keeps its descriptors either way."""
        try:
            if not self._unsent:
                self._channel.send(message, fds)
                return
            encode_checked(message, fds)  # refused now, not when its turn comes
        except BlockingIOError:
            self._loop.add_writer(self._channel.fileno(), self._send_more)
        except (OSError, ChannelClosed) as error:
            raise SandboxError("the sandbox is dead: the spawner process died") from error
        self._unsent.append((message, [os.dup(fd) for fd in fds]))

    def _send_more(self) -> None:
        try:
            while self._unsent:
                self._channel.send(*self._unsent[0])
                close_all(self._unsent.popleft()[1])
            self._loop.remove_writer(self._channel.fileno())
        except BlockingIOError:
            pass
        except (OSError, ChannelClosed):
            self._spawner._lost()

    def _receive(self) -> None:
        try:
            while True:
                self._spawner._message(*self._channel.receive())
        except BlockingIOError:
            pass
        except ChannelClosed:
            self._spawner._lost()

    def close(self) -> None:
        if self._channel.fileno() < 0:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self._channel.sock.close()


class Sandbox:
    """One live sandbox."""

    def __init__(self, spawner: "Spawner", spec: SandboxSpec) -> None:
        self.spec = spec
        self._spawner = spawner
        self.verifier_folder = spawner.ground / "episodes" / spec.name / "verifier"
        #: A socket that listens in the episode's network, for whoever proxies for it; closed with the sandbox.
        self.listener: socket.socket | None = None
        #: Resolved with a sentence when the sandbox died by itself.
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, command: CommandSpec, fds: Sequence[int]) -> Process:
        """Start an agent's command; `fds` become its 0, 1, 2, ... Raises: SandboxError when the sandbox is dead."""
        self._check_alive()
        return self._spawner._start_process(
            self._spawner.launcher, {"op": "exec", "name": self.spec.name, "command": command.to_dict()}, fds
        )

    def start_verifier(self, command: CommandSpec, fds: Sequence[int], layer: str) -> Process:
        """Start a command that alone sees `layer`'s tests at /tests, and at /logs/verifier `verifier_folder`, empty."""
        self._check_alive()
        request = {"op": "verify", "name": self.spec.name, "command": command.to_dict(), "layer": layer}
        return self._spawner._start_process(self._spawner.control, request, fds)

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
            await self._spawner._ask({"op": "check", "name": self.spec.name})
        except SandboxError as error:
            if not self.died.done():
                self.died.set_result(str(error))
            raise

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
    """The running spawner and what it says of this host: `rung`, `signals_scoped`, `folder`, `layers`, `plan`, ...

    `folder` is its scratch folder as the host sees it, `ground` the same with what is mounted in it. `layers` is a
    folder there in which the server makes one folder per task: `NAME/root` becomes a lower layer of worktrees,
    `NAME/tests` is what verifiers see at /tests. It is a tmpfs that only this server and its spawner reach.
    """

    def __init__(self, process: subprocess.Popen[bytes], config: SpawnerConfig) -> None:
        self._process, self._config = process, config
        self._requests = itertools.count(1)
        self._answers: dict[int, asyncio.Future[list[int]]] = {}
        self._processes: dict[int, Process] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._hello: asyncio.Future[tuple[dict[str, Any], list[int]]] = asyncio.get_running_loop().create_future()
        self._cleaners = concurrent.futures.ThreadPoolExecutor(2, "discard")
        self._ground_fd = -1
        self._gone = False
        self._undoing: set[asyncio.Task[None]] = set()
        self.control: _AsyncChannel
        self.launcher: _AsyncChannel
        self.rung: Rung
        self.folder: Path
        self.ground: Path
        self.layers: Path
        self.signals_scoped = self.in_memory = False
        self.plan: list[str] = []
        self.hidden_mounts: list[str] = []

    @classmethod
    async def start(cls, *, rung: str, scratch: Sequence[str], hide: Sequence[str] = ()) -> Self:
        """Start the spawner on the first scratch folder that works with `rung`.

        `hide` are host paths that no episode may see, besides those outside the system folders.
        Raises: IsolationUnavailable.
        """
        config = SpawnerConfig(rung, tuple(scratch), tuple(hide))
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        arguments = [str(Path(__file__).parent), json.dumps(config.to_dict()), *map(str, theirs)]
        process = subprocess.Popen(  # noqa: ASYNC220 - once, at start, and vfork is quick
            [sys.executable, "-I", "-S", "-c", _BOOT, *arguments],
            pass_fds=theirs, stdin=subprocess.DEVNULL, env={}, cwd="/",
        )  # fmt: skip
        self = cls(process, config)
        self.control, self.launcher = (_AsyncChannel(pair[0], self) for pair in pairs)
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
        self.rung, self.folder = Rung.from_dict(hello["hello"]), Path(hello["folder"])
        self.signals_scoped, self.in_memory = hello["signals_scoped"], hello["in_memory"]
        self.plan, self.hidden_mounts = hello["plan"], hello["hidden_mounts"]
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
            sandbox.take_listener(await asyncio.shield(creation))
        except asyncio.CancelledError:
            # The spawner is at it already: let it finish, then undo it.
            creation.add_done_callback(lambda done: self._undo(sandbox, done))
            raise
        except SandboxError:
            self._sandboxes.pop(spec.name, None)
            self._delete(spec.name)
            raise
        return sandbox

    def _undo(self, sandbox: Sandbox, creation: "asyncio.Future[list[int]]") -> None:
        if creation.exception() is None:
            sandbox.take_listener(creation.result())
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
            # Deletions of ours may have been in the spawner's way when it removed the folder.
            await asyncio.to_thread(worktree.remove, str(self.folder))
            os.close(self._ground_fd)
            self._ground_fd = -1

    # ------------------------------------------------------------ requests
    async def _ask(self, message: dict[str, Any]) -> list[int]:
        request = next(self._requests)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        try:
            self.control.post({"id": request, **message})
            return await asyncio.wait_for(answer, REQUEST_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(f"the spawner did not {message['op']} within {REQUEST_TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(request, None)

    def _start_process(self, channel: _AsyncChannel, message: dict[str, Any], fds: Sequence[int]) -> Process:
        request = next(self._requests)
        process = self._processes[request] = Process(channel, request)
        try:
            channel.post({"id": request, **message}, fds)
        except (SandboxError, ValueError) as error:
            del self._processes[request]
            raise SandboxError(str(error)) from error
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
                self._resolve(self._answers.get(request), fds)
            case {"event": "exit", "id": request, "status": status}:
                self._process_ended(request, status)
            case {"event": "failed", "id": request, "error": error} | {"id": request, "error": error}:
                self._request_failed(request, SandboxError(error))
            case {"event": "died", "name": name}:
                self._sandbox_died(name)
            case _:
                self._hello.set_result((message, fds))

    def _resolve(self, future: "asyncio.Future[list[int]] | None", result: list[int] | Exception) -> None:
        if future is None or future.done():
            if isinstance(result, list):
                close_all(result)
        elif isinstance(result, list):
            future.set_result(result)
        else:
            future.set_exception(result)

    def _process_ended(self, request: int, status: int) -> None:
        process = self._processes.pop(request, None)
        if process is not None and not process.exited.done():
            process.exited.set_result(status)

    def _request_failed(self, request: int, error: SandboxError) -> None:
        self._resolve(self._answers.get(request), error)
        process = self._processes.pop(request, None)
        if process is not None and not process.exited.done():
            process.exited.set_exception(error)
            process.exited.exception()  # nobody need be waiting for it

    def _sandbox_died(self, name: str) -> None:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None and not sandbox.died.done():
            sandbox.died.set_result("the sandbox is dead: its PID 1 was killed")
        self._delete(name)

    def _lost(self) -> None:
        """The spawner is gone, and with it everything it made."""
        self._gone = True
        self.control.close()
        self.launcher.close()
        error = SandboxError("the sandbox is dead: the spawner process died")
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
