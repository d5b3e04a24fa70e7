"""The spawner: one lean, single-threaded process that makes every episode and forks everything that runs in one.

Three processes and three channels. The *server* (asyncio, many threads, may not fork safely) asks the *spawner* to
create and destroy sandboxes and to run verifiers; it asks the *launcher*, a landlocked fork of the spawner, to run the
agents' commands; the spawner hands the launcher each new episode's descriptors before it answers the server.

    server -> spawner    {"id", "op": "create" | "check" | "destroy" | "verify"} -> {"id", "ok"} or {"id", "error"}
    server -> launcher   {"id", "op": "exec"}; to both {"op": "kill"}
    events to the server {"event": "exit" | "failed", "id", ...}, {"event": "died", "name"}

When the server is gone its channel closes, the spawner kills every episode, removes its scratch folder and ends; when
the spawner is gone, PDEATHSIG takes the launcher and every episode's PID 1, and with it all that is inside.

Started by `sandbox.Spawner` as `python -I -S -c ...` (lean imports make each fork cheap).
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tbench2_env.isolation import capabilities, init, launcher, mounts, probe, processes, userns, worktree
from tbench2_env.isolation import command as commands
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all, receive_descriptors
from tbench2_env.isolation.reactor import Reactor
from tbench2_env.isolation.spec import RUNGS, CommandSpec, Network, SandboxSpec, SpawnerConfig, encode

#: Seconds that cleaning up may take once the server is gone; what is left then is swept at the next start.
_LAST_CLEANING_S = 3
#: Seconds to wait for killed episodes at the end; a process stuck in the kernel dies later.
_LAST_REAPING_S = 2.0
#: The last argument of a spawner that is in its own user namespace.
_ENTERED = "entered"


@dataclass
class Episode:
    """A sandbox as the spawner knows it. `pid` is its PID 1, in the host's numbering."""

    name: str
    pid: int
    pidfd: int
    created_by: int
    channel: socket.socket | None = None
    own_network: bool = False
    destroyed_by: int | None = None
    proc: int = -1
    #: Inode of the namespace, of the kind that tells agents from verifiers here, that the agent's processes live in.
    agents: int = -1
    verifiers: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Verifier:
    request: int
    episode: Episode


class Spawner:
    """State: episodes by name, running verifiers by process id."""

    def __init__(self, server: Channel, to_launcher: Channel, ground: worktree.Ground) -> None:
        self.server, self.launcher, self.ground = server, to_launcher, ground
        self.pause = init.pause_descriptor()
        self.episodes: dict[str, Episode] = {}
        self.verifiers: dict[int, Verifier] = {}
        self.reactor = Reactor(on_child=self._child_ended)
        self.reactor.watch(server.fileno(), self._request)

    def run(self) -> None:
        """Serve until the server is gone, then leave nothing behind."""
        with contextlib.suppress(ChannelClosed):
            self._say_hello()
            self.reactor.run()
        self._end_everything()

    def _say_hello(self) -> None:
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        hello = {
            "hello": self.ground.rung.to_dict(),
            "folder": self.ground.folder,
            "in_memory": self.ground.in_memory,
            "plan": mounts.describe(mounts.sandbox_plan(self.ground.rung, SandboxSpec("", network=Network.PRIVATE))),
            "hidden_mounts": probe.hidden_mounts(),
            "signals_scoped": launcher.signals_scoped(),
        }
        self.server.send(hello, [root])
        os.close(root)

    def _request(self) -> None:
        message, fds = self.server.receive()
        operation: Callable[[dict[str, Any], list[int]], None] = getattr(self, "_" + message["op"])
        try:
            operation(message, fds)
        except (OSError, ValueError, KeyError) as error:
            self._answer(message["id"], error=str(error))
        finally:
            close_all(fds)

    def _answer(self, request: int, error: str | None = None, fds: Sequence[int] = ()) -> None:
        self.server.send({"id": request, "ok": True} if error is None else {"id": request, "error": error}, fds)

    # ------------------------------------------------------------ create
    def _create(self, message: dict[str, Any], fds: list[int]) -> None:
        spec = SandboxSpec.from_dict(message["spec"])
        worktree_mounts = worktree.create(self.ground, spec)
        sysfs = worktree.open_sysfs("sysfs")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid, pidfd = sc.clone(self._new_namespaces(spec))
            if pid == 0:
                ours.close()
                init.run(spec, self.ground.rung, init.Inside(theirs, worktree_mounts, sysfs, self.pause))
        except OSError:
            worktree.discard(self.ground, spec.name)
            raise
        finally:
            close_all([sysfs, *(fd for fd, _ in worktree_mounts)])
            theirs.close()
        episode = Episode(spec.name, pid, pidfd, message["id"], ours, spec.network is not Network.HOST)
        self.episodes[spec.name] = episode
        self.reactor.watch(ours.fileno(), lambda: self._init_answered(episode))
        # If it dies before it has answered, its channel says so.
        with contextlib.suppress(OSError):
            if self.ground.rung.user_namespaces:
                userns.write_maps("/proc", pid, self.ground.rung.map_line)
            ours.send(encode({}))

    def _new_namespaces(self, spec: SandboxSpec) -> int:
        flags = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
        if self.ground.rung.user_namespaces:
            flags |= sc.CLONE_NEWUSER
        if spec.network is not Network.HOST:
            flags |= sc.CLONE_NEWNET
        return flags

    def _init_answered(self, episode: Episode) -> None:
        assert episode.channel is not None
        try:
            answer, fds = receive_descriptors(episode.channel, 4096)
            self._forget_channel(episode)
            if not answer.startswith(b"ok "):
                raise OSError(answer.decode(errors="replace") or "PID 1 died")
            handed_out = dict(zip(answer.decode().split()[1:], fds, strict=True))
            episode.proc = handed_out.pop("proc")
            listener = [handed_out.pop("listener")] if "listener" in handed_out else []
            self._announce(episode, handed_out)
        except OSError as error:
            # PID 1 is gone or going; its end is not the death of an episode that anybody has.
            self._forget_channel(episode)
            self._signal_init(episode)
            self._discard(episode)
            self._answer(episode.created_by, error=f"cannot set up the sandbox: {error}")
            return
        self._answer(episode.created_by, fds=listener)
        close_all(listener)

    def _announce(self, episode: Episode, handed_out: dict[str, int]) -> None:
        """Hand the launcher the descriptors of a new episode's namespaces."""
        opened = dict(handed_out)
        try:
            for kind in self._kinds(episode):
                opened[kind] = self._open_namespace(episode, kind)
            episode.agents = os.fstat(opened["user" if self.ground.rung.user_namespaces else "mnt"]).st_ino
            descriptors = {**opened, "proc": episode.proc}
            message = {"op": "add", "name": episode.name, "descriptors": list(descriptors)}
            self.launcher.send(message, list(descriptors.values()))
        finally:
            close_all(list(opened.values()))

    def _kinds(self, episode: Episode) -> list[str]:
        """The namespaces of the episode that whoever enters it joins, besides the user namespace."""
        return ["pid", "mnt", "ipc", "uts", *(["net"] if episode.own_network else [])]

    def _forget_channel(self, episode: Episode) -> None:
        if episode.channel is not None:
            self.reactor.forget(episode.channel.fileno())
            episode.channel.close()
            episode.channel = None

    def _open_namespace(self, episode: Episode, name: str) -> int:
        return os.open(f"/proc/{episode.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)

    # ------------------------------------------------------------ verify
    def _verify(self, message: dict[str, Any], fds: list[int]) -> None:
        request, episode = message["id"], self._episode(message["name"])
        command = CommandSpec.from_dict(message["command"])
        tests, logs = worktree.verifier_mounts(self.ground, episode.name, message["layer"])
        kinds = [*self._kinds(episode), *(["user"] if self.ground.rung.user_namespaces else [])]
        opened = {kind: self._open_namespace(episode, kind) for kind in kinds}
        try:
            pid = processes.fork_aside_into(opened["pid"])
            if pid == 0:
                request = message["id"]
                commands.become(
                    command,
                    fds,
                    self._enter_as_verifier(opened, tests, logs),
                    lambda reason: self._failed(request, reason),
                )
            self.verifiers[pid] = Verifier(message["id"], episode)
            episode.verifiers.add(pid)
        finally:
            close_all([tests, logs, *opened.values()])

    def _enter_as_verifier(self, opened: dict[str, int], tests: int, logs: int) -> Callable[[], None]:
        def enter() -> None:
            sc.setns(opened["mnt"], sc.CLONE_NEWNS)
            # Still outside the episode's user namespace: with these mounts made inside it, root there remounted
            # /tests read-write and changed the pristine files.
            sc.unshare(sc.CLONE_NEWNS)
            sc.move_mount(tests, "/tests")
            sc.move_mount(logs, "/logs/verifier")
            sc.setns(opened["ipc"], sc.CLONE_NEWIPC)
            sc.setns(opened["uts"], sc.CLONE_NEWUTS)
            if "net" in opened:
                sc.setns(opened["net"], sc.CLONE_NEWNET)
            if "user" in opened:
                sc.setns(opened["user"], sc.CLONE_NEWUSER)
            userns.become_root(supplementary_groups=self.ground.rung.has_id_range)
            if "user" not in opened:
                capabilities.confine_verifier()

        return enter

    def _failed(self, request: int, reason: str) -> None:
        self.server.send({"event": "failed", "id": request, "error": reason})

    def _kill(self, message: dict[str, Any], fds: list[int]) -> None:
        for pid, verifier in self.verifiers.items():
            if verifier.request == message["target"]:
                os.kill(pid, signal.SIGKILL)  # it may not have become one yet
                self._kill_verifier(verifier.episode)

    def _kill_verifier(self, episode: Episode) -> None:
        """Kill all that verifiers left in the episode: whatever is neither the agent's nor PID 1."""
        with contextlib.suppress(OSError):
            if self.ground.rung.user_namespaces:
                own = os.stat(f"/proc/{episode.pid}/ns/user").st_ino
                wanted = processes.in_user_namespace(episode.proc, own, but_not=episode.agents)
            else:
                # Only verifiers may make mount namespaces, and each has one of its own.
                wanted = processes.in_other_mount_namespace(episode.proc, episode.agents)
            processes.kill_where(episode.proc, wanted)

    # ------------------------------------------------------------ ends
    def _destroy(self, message: dict[str, Any], fds: list[int]) -> None:
        episode = self._episode(message["name"])
        episode.destroyed_by = message["id"]
        self._kill_init(episode)

    def _check(self, message: dict[str, Any], fds: list[int]) -> None:
        """Whether the episode lives: asked when a command was killed, which is heard of before its PID 1's end."""
        episode = self._episode(message["name"])
        if processes.is_exiting(episode.pid):
            raise ValueError("the sandbox is dead: its PID 1 was killed")
        self._answer(message["id"])

    def _kill_init(self, episode: Episode) -> None:
        """Killing PID 1 kills all of its namespace. The launcher's descriptors would keep the namespaces alive."""
        self._signal_init(episode)
        self._drop(episode)

    def _signal_init(self, episode: Episode) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(episode.pidfd, signal.SIGKILL)

    def _drop(self, episode: Episode) -> None:
        self.launcher.send({"op": "drop", "name": episode.name})

    def _episode(self, name: str) -> Episode:
        if name not in self.episodes:
            raise ValueError(f"there is no sandbox {name!r} any more: its PID 1 was killed")
        return self.episodes[name]

    def _child_ended(self, pid: int, status: int) -> None:
        verifier = self.verifiers.pop(pid, None)
        if verifier is not None:
            verifier.episode.verifiers.discard(pid)
            # Not while another runs, which would be killed, too; its own end cleans up.
            if verifier.episode.name in self.episodes and not verifier.episode.verifiers:
                self._kill_verifier(verifier.episode)
            code = os.waitstatus_to_exitcode(status)
            self.server.send({"event": "exit", "id": verifier.request, "status": code})
            return
        episode = next((one for one in self.episodes.values() if one.pid == pid), None)
        if episode is not None and episode.channel is None:
            self._init_ended(episode)
        elif pid == self.launcher_pid:
            # Without it nothing can be run any more: end, and say so by ending.
            raise ChannelClosed

    launcher_pid = -1

    def _init_ended(self, episode: Episode) -> None:
        if episode.destroyed_by is None:
            self._drop(episode)
            self._discard(episode)  # before the news: the server then deletes what was renamed away
            self.server.send({"event": "died", "name": episode.name})
            return
        self._discard(episode)
        self._answer(episode.destroyed_by)

    def _discard(self, episode: Episode) -> None:
        self.episodes.pop(episode.name, None)
        close_all([fd for fd in (episode.pidfd, episode.proc) if fd >= 0])
        worktree.discard(self.ground, episode.name)

    def _end_everything(self) -> None:
        # Whoever would hear is gone or going.
        self.server.mute()
        self.launcher.mute()
        for episode in list(self.episodes.values()):
            self._kill_init(episode)
        self.reactor.forget(self.server.fileno())
        self.launcher_pid = -1
        deadline = time.monotonic() + _LAST_REAPING_S
        while self.episodes and time.monotonic() < deadline:
            self.reactor.turn(50)
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
        signal.alarm(_LAST_CLEANING_S)
        worktree.demolish(self.ground.folder)


def _own_socket(fd: str) -> Channel:
    """The inherited socket, moved out of the low numbers that commands take."""
    high = fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, commands.FIRST_PRIVATE_FD)
    os.close(int(fd))
    return Channel(socket.socket(fileno=high))


def _harden() -> None:
    """Nobody below may look into the helpers; orphans of episodes come here; the terminal's signals do not."""
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    os.setsid()
    sc.leave_session_keyring()
    # An ignored signal stays ignored across exec, and bash cannot undo that: commands must get none of those that
    # Python ignores or that the server was started with (nohup, a script's `&`). What the helpers ignore, they catch.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    sc.restore_thread_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, lambda number, frame: None)


def _start_again_in_own_user_namespace(server: int) -> NoReturn:
    """By exec, because the /proc files of an undumpable process belong to the namespace that it was executed in."""
    try:
        probe.enter_own_user_namespace()
        os.execve(sys.executable, [*sys.orig_argv, _ENTERED], {})
    except OSError as error:
        _refuse(Channel(socket.socket(fileno=server)), error)


def _refuse(server: Channel, error: OSError) -> NoReturn:
    with contextlib.suppress(ChannelClosed):
        server.send({"error": error.strerror or str(error)})
    sys.exit(1)


def main(arguments: list[str]) -> None:
    """`arguments`: the config as JSON, and the numbers of the sockets to the server for spawner and launcher."""
    config = SpawnerConfig.from_dict(json.loads(arguments[0]))
    if RUNGS[config.rung].by_folder and arguments[-1] != _ENTERED:
        _start_again_in_own_user_namespace(int(arguments[1]))
    server, launcher_server = _own_socket(arguments[1]), _own_socket(arguments[2])
    _harden()
    try:
        ground = probe.choose_ground(config)
    except OSError as error:
        _refuse(server, error)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        server.sock.close()
        launcher.main(launcher_server, _high(theirs), ground.rung)
    theirs.close()
    launcher_server.sock.close()
    spawner = Spawner(server, _high(ours), ground)
    spawner.launcher_pid = pid
    spawner.run()


def _high(sock: socket.socket) -> Channel:
    return _own_socket(str(sock.detach()))
