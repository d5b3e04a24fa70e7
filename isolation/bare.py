"""No isolation (the rung "none"): one episode at a time, its processes plain children, its files the node's own.

One process is spawner and launcher in one. It answers what the server asks of both (see `spawner`), in the same words,
and there is no warden. It is the subreaper of all that it starts, so whatever is below it belongs to the episode, and
that alone is killed when the episode ends. A verifier has a parent of its own, so that what it leaves can be told from
the agent's processes.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from tbench2_env.isolation import command as commands
from tbench2_env.isolation import entering, probe, processes, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all
from tbench2_env.isolation.gauge import NAMES_MAX
from tbench2_env.isolation.laid import RECORD, Laid
from tbench2_env.isolation.program import NOT_STARTED, Program
from tbench2_env.isolation.reactor import End, Reactor
from tbench2_env.isolation.spec import ID_COUNT, RUNGS, CommandSpec, Provided, Rung, SandboxSpec, SpawnerConfig
from tbench2_env.isolation.stack import Ground
from tbench2_env.isolation.start import Starter, move_all_up

TESTS, REWARDS = "/tests", "/logs/verifier"
#: What is seen of live processes: what the server counted of the commands that ended is all there is.
_USED: dict[str, Any] = {"usage": {}, "all_cpu": False}
_NOT_KEPT = "not kept (TB2_ISOLATION=none)"
#: Seconds to wait for killed processes, less than the server waits for the answer.
_KILL_TIMEOUT_S = 3.0


def obstacles() -> list[str]:
    """Why no verifier can have its files here, a sentence each; none if it can."""
    found = []
    for path in (TESTS, REWARDS):
        parent = os.path.dirname(path)
        writable = os.access(parent if os.path.lexists(parent) else "/", os.W_OK)
        if os.path.lexists(path):
            found.append(f"no verdict is possible: {path} exists on this node already")
        elif not writable:
            found.append(f"no verdict is possible: this user cannot make {path} on this node")
    return found


def prepare(config: SpawnerConfig, server: Channel, commands_server: Channel) -> "Bare":
    """Claim a scratch folder. Raises: OSError saying what does not work."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is that of another PID namespace, so no episode's processes could be found: mount ours")
    refusals = []
    for scratch in config.scratch:
        try:
            folder = worktree.claim_folder(os.path.realpath(scratch))
        except OSError as error:
            refusals.append(f"scratch {scratch}: {error.strerror or error}")
            continue
        os.chdir(folder)
        for name in ("episodes", "trash", "shared/layers"):
            os.makedirs(name)
        return Bare(server, commands_server, Ground(folder, _resolve(), (), in_memory=False), config.nice)
    raise OSError("; ".join(refusals))


def _resolve() -> Rung:
    """With one id only, nothing can be given to another."""
    rung = RUNGS["none"]
    has_range = any(inside == 0 and count >= ID_COUNT for inside, _, count in probe.id_map())
    return rung if has_range and os.geteuid() == 0 else replace(rung, id_map=(0, 0, 1))


class Bare:
    """State: the episode, what is laid out for it, its commands and verifiers by process id.

    `staged` is how much was laid out before the verifier's files were.
    """

    def __init__(self, server: Channel, commands_server: Channel, ground: Ground, nice: int) -> None:
        self.server, self.commands_server, self.ground, self.nice = server, commands_server, ground, nice
        self.episode: SandboxSpec | None = None
        self.laid = Laid(os.path.abspath(RECORD), chown=ground.rung.has_id_range)
        self.staged = 0
        self.running: dict[int, commands.Running] = {}
        self.starter = Starter()
        self.verifiers: dict[int, int] = {}
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.reactor = Reactor(on_child=self._child_ended)
        self.reactor.watch(server.fileno(), lambda: self._request(server))
        self.reactor.watch(commands_server.fileno(), lambda: self._request(commands_server))

    def run(self) -> None:
        """Serve until the server is gone, then leave nothing behind."""
        with contextlib.suppress(ChannelClosed):
            self._say_hello()
            self.reactor.run()
        self._end_episode()
        worktree.demolish(self.ground.folder)

    def _say_hello(self) -> None:
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        host = {
            "plan": [], "hidden_mounts": [], "signals_scoped": False,
            "in_memory": sc.filesystem_type(".") == sc.TMPFS_MAGIC,
            "enforcement": dict.fromkeys(("memory", "processes", "cpus", "storage"), _NOT_KEPT),
            "no_cgroups": "", "egress": None, "egress_lacks": [], "egress_refusals": {},
        }  # fmt: skip
        self.server.send({"hello": self.ground.rung.to_dict(), "folder": self.ground.folder, "host": host}, [root])
        os.close(root)

    def _request(self, channel: Channel) -> None:
        message, fds = channel.receive()
        operation: Callable[[dict[str, Any], list[int]], None] = getattr(self, "_" + message["op"])
        try:
            operation(message, fds)
        except (OSError, ValueError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)
            channel.send({"id": message["id"], "error": text})
        finally:
            close_all(fds)

    # ------------------------------------------------------------ the episode
    def _create(self, message: dict[str, Any], fds: list[int]) -> None:
        spec = SandboxSpec.from_dict(message["spec"])
        if self.episode is not None:
            raise ValueError("without isolation there is one episode at a time, and another is under way")
        self._end_episode()  # what could not be ended at the time
        if left := processes.descendants(self.proc, os.getpid()):
            raise ValueError(f"processes of the episode before cannot be killed: {sorted(left)}")
        try:
            for layer in reversed(spec.layers):
                self.laid.lay(f"shared/layers/{layer}/root", "/")
            os.makedirs(f"episodes/{spec.name}/verifier")
        except OSError:
            self.laid.undo()
            raise
        self.staged = len(self.laid)
        self.episode = spec
        self.server.send({"id": message["id"], "ok": True})

    def _destroy(self, message: dict[str, Any], fds: list[int]) -> None:
        self._check_name(message["name"])
        self._end_episode()
        self.server.send({"id": message["id"], "ok": True, **_USED})

    def _end_episode(self) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while processes.descendants(self.proc, os.getpid()) and time.monotonic() < deadline:
            processes.kill_below(self.proc, os.getpid())
            time.sleep(0.005)
        self.laid.undo()
        if self.episode is not None:
            worktree.discard(self.ground, self.episode.name)
            self.episode = None

    def _check_name(self, name: str) -> None:
        if self.episode is None or self.episode.name != name:
            raise ValueError(f"there is no sandbox {name!r} any more")

    def _check(self, message: dict[str, Any], fds: list[int]) -> None:
        self._check_name(message["name"])
        self.server.send({"id": message["id"], "ok": True, "hits": {}})

    def _names(self, message: dict[str, Any], fds: list[int]) -> None:
        self._check_name(message["name"])
        names = []
        for pid in sorted(processes.descendants(self.proc, os.getpid()))[:NAMES_MAX]:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
                names.append(comm.read().rstrip("\n"))
        self.server.send({"id": message["id"], "ok": True, "names": names})

    def _usage(self, message: dict[str, Any], fds: list[int]) -> None:
        self._check_name(message["name"])
        self.server.send({"id": message["id"], "ok": True, "hits": {}, **_USED})

    # ------------------------------------------------------------ commands
    def _exec(self, message: dict[str, Any], fds: list[int]) -> None:
        if self.episode is None or self.episode.name != message["name"]:
            raise ValueError("the sandbox is dead")
        running = self._start(self.starter, message, fds)
        self.running[running.started.pid] = running

    def _start(self, starter: Starter, message: dict[str, Any], fds: list[int]) -> commands.Running:
        """`message` is the request; `fds` get other numbers. Raises: OSError, ValueError."""
        command = CommandSpec.from_dict(message["command"])
        move_all_up(fds)
        started = starter.start(commands.program(command, fds, self._enter), fds)
        return commands.Running(message["id"], command, started)

    def _enter(self, program: Program) -> None:
        """What a process of the episode does first: it ends with the helper, and comes first for the OOM killer."""
        program.call("prctl", sc.PR_SET_DUMPABLE, 1)  # else its /proc files are root's
        program.call("prctl", sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        entering.prefer_for_oom_killer(program)
        entering.take_place(program, (), (), self.nice)

    def _kill(self, message: dict[str, Any], fds: list[int]) -> None:
        requests = {pid: running.request for pid, running in self.running.items()} | self.verifiers
        for pid, request in requests.items():
            if request == message["target"]:
                processes.kill_tree(self.proc, pid)

    def _child_ended(self, pid: int, end: End) -> None:
        if pid in self.running:
            self.commands_server.send(self.running.pop(pid).news(self.starter, end))
        elif pid in self.verifiers:
            self.laid.undo(self.staged)
            self.server.send({"event": "exit", "id": self.verifiers.pop(pid), **end.to_dict()})

    # ------------------------------------------------------------ verifiers
    def _verify(self, message: dict[str, Any], fds: list[int]) -> None:
        """Its files are on the node while it runs; the rewards are written to where the server reads them."""
        self._check_name(message["name"])
        if self.verifiers:
            raise ValueError("without isolation there is one verifier at a time, and another is under way")
        rewards = os.path.abspath(f"episodes/{message['name']}/verifier")
        worktree.delete(rewards)
        os.mkdir(rewards)
        try:
            self.laid.copy(f"shared/layers/{message['layer']}/tests", TESTS)
            self.laid.link(REWARDS, rewards)
            for one in map(Provided.from_dict, message["provided"]):
                self.laid.link(one.place, one.folder)
            pid = os.fork()
        except OSError:
            self.laid.undo(self.staged)
            raise
        if pid == 0:
            self._watch_over(message, fds)
        self.verifiers[pid] = message["id"]

    def _watch_over(self, message: dict[str, Any], fds: list[int]) -> NoReturn:
        """In a child: run the verifier, kill what it leaves, and end as it did."""
        number = NOT_STARTED
        try:
            sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
            sc.prctl(sc.PR_SET_DUMPABLE, 1)  # else its /proc files are root's
            signal.set_wakeup_fd(-1)
            for each in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(each, signal.SIG_DFL)
            sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
            starter = Starter()
            try:
                running = self._start(starter, message, fds)
            except (OSError, ValueError) as error:
                self.server.send({"event": "failed", "id": message["id"], "error": str(error)})
                raise
            number = os.waitstatus_to_exitcode(os.waitpid(running.started.pid, 0)[1])
            news = running.news(starter, End(number, 0.0, 0))
            if news["event"] == "failed":
                self.server.send(news)
            while processes.descendants(self.proc, os.getpid()):
                processes.kill_below(self.proc, os.getpid())
                time.sleep(0.005)
            if number < 0:
                os.kill(os.getpid(), -number)
        finally:
            # Whatever happened: a fork must never go on as a second helper.
            os._exit(number if number >= 0 else 128 - number)
