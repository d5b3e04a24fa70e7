"""The server's side of isolation: start the spawner, create sandboxes, run commands and verifiers in them.

spawner = await Spawner.start(SpawnerConfig("1", ("/var/tmp/tbench2",), hide=("/opt/tasks",)))
sandbox = await spawner.create(SandboxSpec("episode-1"))
process = sandbox.start(CommandSpec(...), (stdin, stdout, stderr))
status = await process.wait()
await sandbox.destroy()
await spawner.stop()

What travels between server and helpers for that is the matter of `conversation`.
"""

import asyncio
import contextlib
import copy
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

from tbench2_env.isolation import helpers, laid, worktree
from tbench2_env.isolation.aiochannel import AsyncChannel, receive_one
from tbench2_env.isolation.changes import Worktree
from tbench2_env.isolation.channel import Message
from tbench2_env.isolation.conversation import REQUEST_TIMEOUT_S, SPAWNER_DIED, Conversation, Refused
from tbench2_env.isolation.process import Process, SandboxError
from tbench2_env.isolation.spec import CommandSpec, Cover, Host, Provided, Rung, SandboxSpec, SpawnerConfig, Usage
from tbench2_env.isolation.tally import Tally
from tbench2_env.isolation.trash import Trash

#: Seconds to wait for a destroyed sandbox's processes. One stuck in the kernel is reaped later.
DESTROY_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0


class IsolationUnavailable(SandboxError):
    """This host cannot isolate episodes; the text names the refused call and the setting that frees it."""


class Sandbox:
    """One live sandbox."""

    def __init__(self, spawner: "Spawner", spec: SandboxSpec) -> None:
        self.spec = spec
        self._spawner = spawner
        self.verifier_folder = spawner.ground / "episodes" / spec.name / "verifier"
        #: A socket that listens in the episode's network, for whoever proxies for it; closed with the sandbox.
        self.listener: socket.socket | None = None
        self.tally = Tally(spec.limits)
        self._harvested = False
        #: Resolved with a sentence when the sandbox died by itself.
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, command: CommandSpec, fds: Sequence[int]) -> Process:
        """Start an agent's command; `fds` become its 0, 1, 2, ... Raises: SandboxError when the sandbox is dead."""
        self._check_alive()
        request = {"op": "exec", "name": self.spec.name, "command": command.to_dict()}
        return self._run(self._spawner.conversation.launcher, request, fds)

    def start_verifier(
        self,
        command: CommandSpec,
        fds: Sequence[int],
        layer: str,
        covers: Sequence[Cover] = (),
        provided: Sequence[Provided] = (),
    ) -> Process:
        """Start a command that alone sees `layer`'s tests at /tests, and at /logs/verifier `verifier_folder`, empty.

        In the folders of `covers` it sees what they say, and it has what is `provided`.
        """
        self._check_alive()
        if any(one.writable for one in provided):
            self._spawner._check_isolated()
        request = {
            "op": "verify", "name": self.spec.name, "command": command.to_dict(), "layer": layer,
            "covers": [cover.to_dict() for cover in covers], "provided": [one.to_dict() for one in provided],
        }  # fmt: skip
        return self._run(self._spawner.conversation.control, request, fds)

    def _run(self, channel: AsyncChannel, request: dict[str, Any], fds: Sequence[int]) -> Process:
        return Process.start(self._spawner.conversation, channel, request, fds, self.tally)

    async def open_terminal(self, command: CommandSpec, fds: Sequence[int] = ()) -> tuple[Process, int]:
        """Start a command with a terminal of its own; answers with the process and the terminal's master.

        `fds` become the command's 3, 4, ... Raises: SandboxError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self.start(command, (theirs.fileno(), *fds))
            masters = await receive_one(ours)
        if not masters:
            await process.wait()
            raise SandboxError("the command ended before it had a terminal")
        return process, masters[0]

    async def adopt(self) -> None:
        """Make one that was created `idle` ready for commands. Raises: SandboxError when it is dead."""
        await self._spawner._ask({"op": "adopt", "name": self.spec.name})

    async def confirm(self) -> None:
        """Return if the sandbox is alive now. Raises: SandboxError saying what died."""
        await self._ask_alive("check")

    async def _ask_alive(self, operation: str) -> dict[str, Any]:
        self._check_alive()
        try:
            message, _ = await self._spawner._ask({"op": operation, "name": self.spec.name, "alive": True})
        except SandboxError as error:
            # The news of its death may have come before the answer, and says why.
            if not self.died.done():
                self.died.set_result(str(error))
            raise SandboxError(self.died.result()) from None
        self.tally.count_hits(message["hits"])
        return message

    def take_hits(self) -> dict[str, str]:
        """What limits were met since the last call without the sandbox being killed for it: a sentence for each."""
        return self.tally.take_hits()

    async def process_names(self) -> list[str]:
        """Names of the agent's live processes, the first 64 (proc_pid_comm(5); chosen by the agent).

        Raises: SandboxError.
        """
        self._check_alive()
        message, _ = await self._spawner._ask({"op": "names", "name": self.spec.name})
        names: list[str] = message["names"]
        return names

    async def usage(self, *, confirm: bool = False) -> Usage:
        """With `confirm`, of a sandbox that is alive now. Raises: SandboxError."""
        plain = {"op": "usage", "name": self.spec.name}
        return self.tally.usage(await self._ask_alive("usage") if confirm else (await self._spawner._ask(plain))[0])

    @property
    def has_worktree(self) -> bool:
        return self._spawner.rung.isolated

    def worktree(self, *, thorough: bool = False) -> Worktree:
        """What was changed in it so far. Blocks. Raises: FileNotFoundError when it is gone, SandboxError."""
        self._spawner._check_isolated()
        return Worktree(self._spawner.ground, self.spec, self._spawner.rung, thorough=thorough)

    async def harvest(self, target: Path) -> None:
        """Kill all that runs in it and make `target`, an absolute path, of its upper: the root of a stored layer.

        It is moved there if it can be, and copied to another file system; see `isolation.harvest` for what is kept.
        When it is cancelled, a part of `target` may be left. The sandbox is gone in any case.

        Raises: SandboxError, also when it was not made `building` and overlayfs kept something by reference.
        """
        await self._spawner._harvest(self, target)

    async def destroy(self) -> Usage | None:
        """Kill all that runs in it and discard its worktree; answers with what it had used, if it was still there."""
        return await self._spawner._destroy(self)

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


class Spawner:
    """The running spawner and what it says of this host.

    `folder` is its scratch folder as the host sees it, `ground` the same with what is mounted in it. `layers` is a
    folder there in which the server makes one folder per task: `NAME/root` becomes a lower layer of worktrees,
    `NAME/tests` is what verifiers see at /tests. It is a tmpfs that only this server and its spawner reach.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._sandboxes: dict[str, Sandbox] = {}
        self._ground_fd = -1
        self._undoing: set[asyncio.Future[Usage | None]] = set()
        self._trash: Trash
        self.conversation: Conversation
        self.rung: Rung
        self.folder: Path
        self.ground: Path
        self.layers: Path
        self.host: Host

    @classmethod
    async def start(cls, config: SpawnerConfig) -> Self:
        """Start the spawner on the first scratch folder that works with the rung. Raises: IsolationUnavailable."""
        process, control, launcher = helpers.start(config)  # at once: vfork is quick
        self = cls(process)
        self.conversation = Conversation(control, launcher, self._event, self._lost)
        await self._greet()
        return self

    async def _greet(self) -> None:
        try:
            hello, fds = await asyncio.wait_for(self.conversation.hello, REQUEST_TIMEOUT_S)
            if "error" in hello:
                raise IsolationUnavailable(hello["error"])
        except Refused as refused:
            await self.stop()
            raise IsolationUnavailable(str(refused)) from None
        except BaseException:
            await self.stop()
            raise
        self.rung, self.folder, self.host = Rung.from_dict(hello["hello"]), Path(hello["folder"]), Host(**hello["host"])
        self._trash = Trash(self.folder)
        self._ground_fd = fds[0]
        # The spawner's mount namespace is not ours; a path through the descriptor leads into it.
        self.ground = Path(f"/proc/self/fd/{self._ground_fd}")
        self.layers = self.ground / "shared/layers"

    @property
    def alive(self) -> bool:
        return not self.conversation.over and self._process.poll() is None

    def scratch_bytes(self, entries_max: int = 200_000) -> int:
        """Bytes that worktrees hold, trash included; counts at most `entries_max` files. Blocks."""
        return worktree.held_bytes(str(self.ground), entries_max)

    async def create(self, spec: SandboxSpec, *, idle: bool = False) -> Sandbox:
        """A new sandbox, ready for commands, if `idle` once adopted. Raises: SandboxError naming what was refused."""
        await self._trash.room()
        if spec.name in self._sandboxes:
            raise SandboxError(f"there is a sandbox {spec.name!r} already")
        if spec.stored or not spec.over_node:
            self._check_isolated()
        sandbox = self._sandboxes[spec.name] = Sandbox(self, spec)
        creation = asyncio.ensure_future(self._ask({"op": "create", "spec": spec.to_dict(), "idle": idle}))
        try:
            sandbox.take_listener((await asyncio.shield(creation))[1])
        except asyncio.CancelledError:
            # The spawner is at it already: let it finish, then undo it.
            creation.add_done_callback(lambda done: self._undo(sandbox, done))
            raise
        except SandboxError:
            self._sandboxes.pop(spec.name, None)
            self._trash.delete_soon()
            raise
        return sandbox

    def _undo(self, sandbox: Sandbox, creation: asyncio.Future[Message]) -> None:
        if creation.exception() is None:
            sandbox.take_listener(creation.result()[1])
            self._undoing.add(task := asyncio.ensure_future(self._destroy(sandbox)))
            task.add_done_callback(self._undoing.discard)
        else:
            self._sandboxes.pop(sandbox.spec.name, None)
            self._trash.delete_soon()

    @contextlib.asynccontextmanager
    async def view(self, stored: Sequence[str], *, over_node: bool) -> AsyncIterator[Path]:
        """A folder in which stored layers are merged, topmost first, read-only, over the node's root as episodes see it
        if `over_node`. Owners are as on the disk. It is there until the block ends. Raises: SandboxError."""
        self._check_isolated()
        spec = SandboxSpec(f"view-{os.urandom(8).hex()}", stored=tuple(stored), over_node=over_node)
        try:
            message, _ = await self._ask({"op": "view", "spec": spec.to_dict()})
            yield self.ground / message["folder"]
        finally:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self._ask({"op": "unview", "name": spec.name}))

    async def stop(self) -> None:
        """End every sandbox and the spawner; its scratch folder is removed."""
        self.conversation.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        self.conversation.end()
        if self._ground_fd >= 0:
            await asyncio.to_thread(self._trash.close)
            # A helper that was killed may have left its record; with the folder that would be gone.
            await asyncio.to_thread(laid.sweep, [str(self.folder.parent)])
            # Deletions of ours may have been in the spawner's way when it removed the folder.
            await asyncio.to_thread(worktree.remove, str(self.folder))
            os.close(self._ground_fd)
            self._ground_fd = -1

    # ------------------------------------------------------------ requests
    async def _ask(self, message: dict[str, Any], timeout_s: float | None = REQUEST_TIMEOUT_S) -> Message:
        """Raises: SandboxError."""
        try:
            return await self.conversation.ask(message, timeout_s)
        except Refused as refused:
            raise SandboxError(str(refused)) from None

    async def _destroy(self, sandbox: Sandbox) -> Usage | None:
        if sandbox._harvested or self._sandboxes.pop(sandbox.spec.name, None) is None:
            return None
        usage, tally = None, copy.copy(sandbox.tally)  # what ends from now on is counted as live
        with contextlib.suppress(SandboxError):
            answer, _ = await self._ask({"op": "destroy", "name": sandbox.spec.name}, DESTROY_TIMEOUT_S)
            usage = tally.usage(answer)
        if not sandbox.died.done():
            sandbox.died.set_result("the sandbox was destroyed")
        self._trash.delete_soon()
        return usage

    def _check_isolated(self) -> None:
        if not self.rung.isolated:
            raise SandboxError("there are no layers on this rung: what an episode sees and changes is the node's own")

    async def _harvest(self, sandbox: Sandbox, target: Path) -> None:
        self._check_isolated()
        sandbox._check_alive()
        sandbox._harvested = True
        name = sandbox.spec.name
        message = {"op": "harvest", "name": name, "target": str(target)}
        # As long as it takes: there may be gigabytes to be copied.
        harvest = asyncio.ensure_future(self._ask(message, timeout_s=None))
        try:
            await asyncio.shield(harvest)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await self._ask({"op": "abandon", "name": name})
                await harvest
            raise
        except SandboxError as error:
            raise SandboxError(sandbox.died.result() if sandbox.died.done() else str(error)) from None
        finally:
            self._sandboxes.pop(name, None)
            if not sandbox.died.done():
                sandbox.died.set_result("the sandbox has become a layer")
            self._trash.delete_soon()

    # ------------------------------------------------------------ events
    def _event(self, message: dict[str, Any]) -> None:
        match message:
            case {"event": "died", "name": name, "reason": reason}:
                self._sandbox_died(name, reason)
            case {"event": "hit", "name": name, "limit": limit, "text": text}:
                if name in self._sandboxes:
                    self._sandboxes[name].tally.hit(limit, text)

    def _sandbox_died(self, name: str, reason: str) -> None:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None and not sandbox.died.done():
            sandbox.died.set_result(f"the sandbox is dead: {reason}")
        self._trash.delete_soon()

    def _lost(self) -> None:
        for sandbox in self._sandboxes.values():
            if not sandbox.died.done():
                sandbox.died.set_result(SPAWNER_DIED)
        self._sandboxes.clear()
