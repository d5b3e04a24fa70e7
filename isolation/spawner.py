"""The spawner: one lean, single-threaded process that makes every episode and forks everything that runs in one.

Three processes and three channels. The *server* (asyncio, many threads, may not fork safely) asks the *spawner* to
create and destroy sandboxes and to run verifiers; it asks the *launcher*, a landlocked fork of the spawner, to run the
agents' commands; the spawner hands the launcher each new episode's descriptors before it answers the server, but those
of one that is created idle when it is adopted.

    server -> spawner    {"id", "op": "create" | "adopt" | "check" | "destroy" | "harvest" | "abandon" | "verify" |
                                      "names" | "usage" | "view" | "unview"}
                         -> {"id", "ok"} or {"id", "error"}
    server -> launcher   {"id", "op": "exec"}; to both {"op": "kill"}
    events to the server {"event": "exit" | "failed", "id", ...}, {"event": "died", "name"}

When the server is gone its channel closes, the spawner kills every episode, removes its scratch folder and ends; when
the spawner is gone, PDEATHSIG takes the launcher and every episode's PID 1, and with it all that is inside.
A third helper, the warden, watches what episodes use; it tells the spawner why it kills one. `boot` starts all three.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tbench2_env.isolation import init, launcher, mounts, probe, processes, userns, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all, receive_descriptors
from tbench2_env.isolation.episodes import Episode
from tbench2_env.isolation.gauge import NAMES_MAX, Gauge
from tbench2_env.isolation.harvest import Harvesters
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.provisions import Provision, Provisions
from tbench2_env.isolation.reactor import End, Reactor
from tbench2_env.isolation.spec import Limits, Network, SandboxSpec
from tbench2_env.isolation.stack import Ground
from tbench2_env.isolation.start import move_up
from tbench2_env.isolation.verifiers import Verifiers

#: Seconds that cleaning up may take once the server is gone; what is left then is swept at the next start.
_LAST_CLEANING_S = 3
#: Seconds to wait for killed episodes at the end; a process stuck in the kernel dies later.
_LAST_REAPING_S = 2.0


@dataclass(frozen=True)
class Helpers:
    """Channels to the two other helpers, and the process ids of both."""

    launcher: Channel
    warden: Channel
    pids: tuple[int, ...]


class Spawner:
    """State: episodes by name, and the processes that work on them besides their own."""

    def __init__(self, server: Channel, helpers: "Helpers", ground: Ground, provisions: Provisions) -> None:
        self.server, self.ground, self.provisions = server, ground, provisions
        self.launcher, self.warden, self.helpers = helpers.launcher, helpers.warden, helpers.pids
        self.inits = init.Inits(ground.rung)
        self.episodes: dict[str, Episode] = {}
        self.verifiers = Verifiers(server, ground)
        self.harvesters = Harvesters(ground.rung)
        #: Whom the warden was asked about, by request, what the kernel had counted, and the limits met.
        self._being_measured: dict[int, tuple[Episode, dict[str, float], Mapping[str, int]]] = {}
        self.reactor = Reactor(on_child=self._child_ended)
        self.reactor.watch(server.fileno(), self._request)
        self.reactor.watch(self.warden.fileno(), self._listen_to_warden)

    def run(self) -> None:
        """Serve until the server is gone, then leave nothing behind."""
        with contextlib.suppress(ChannelClosed):
            self._say_hello()
            self.reactor.run()
        self._end_everything()

    def _say_hello(self) -> None:
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        plan = mounts.sandbox_plan(self.ground.rung, mounts.shm_bytes(Limits()), host_network=False)
        hello = {
            "hello": self.ground.rung.to_dict(),
            "folder": self.ground.folder,
            "host": {
                "plan": worktree.describe(self.ground) + mounts.describe(plan),
                "hidden_mounts": probe.hidden_mounts(),
                "signals_scoped": launcher.signals_scoped(),
                "in_memory": self.ground.in_memory,
                **self.provisions.describe(),
            },
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
        provision = self.provisions.give(spec)
        try:
            self._start_init(message, spec, provision)
        except OSError:
            self.provisions.take_back(spec.name, provision)
            raise

    def _start_init(self, message: dict[str, Any], spec: SandboxSpec, provision: Provision) -> None:
        worktree_mounts = worktree.create(self.ground, spec)
        sysfs = worktree.open_sysfs("sysfs")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = move_up(theirs.detach())
        try:
            inside = init.Inside(channel, provision.joins, worktree_mounts, sysfs)
            unreachable = self.provisions.unreachable(spec.network)
            pid, pidfd, program = self.inits.start(self._new_namespaces(spec), spec, unreachable, inside)
        except OSError:
            worktree.discard(self.ground, spec.name)
            raise
        finally:
            close_all([channel, sysfs, *(fd for fd, _ in worktree_mounts)])
        episode = Episode(spec, pid, pidfd, message["id"], provision, ours, idle=message.get("idle", False))
        self.episodes[spec.name] = episode
        self.reactor.watch(ours.fileno(), lambda: self._init_answered(episode, program))
        # If it dies before it has answered, its channel says so.
        try:
            said = ours.recv(4096)
            if said != init.READY:
                raise init.why_not(program, said)
            if self.ground.rung.user_namespaces:
                userns.write_maps("/proc", pid, self.ground.rung.map_line)
            self.provisions.connect(provision, spec, pid)
            ours.send(b"\0")
        except OSError as error:
            self._creation_failed(episode, error)

    def _new_namespaces(self, spec: SandboxSpec) -> int:
        flags = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
        if self.ground.rung.user_namespaces:
            flags |= sc.CLONE_NEWUSER
        if spec.network is not Network.HOST:
            flags |= sc.CLONE_NEWNET
        return flags

    def _init_answered(self, episode: Episode, program: Program) -> None:
        assert episode.channel is not None
        try:
            answer, fds = receive_descriptors(episode.channel, 4096)
            self._forget_channel(episode)
            if not answer.startswith(b"ok "):
                raise init.why_not(program, answer)
            handed_out = dict(zip(answer.decode().split()[1:], fds, strict=True))
            episode.proc = handed_out.pop("proc")
            listener = [handed_out.pop("listener")] if "listener" in handed_out else []
            episode.for_launcher = handed_out
            if not episode.idle:
                self._announce(episode)
        except OSError as error:
            self._creation_failed(episode, error)
            return
        self._answer(episode.created_by, fds=listener)
        close_all(listener)

    def _creation_failed(self, episode: Episode, error: OSError) -> None:
        """PID 1 is gone or going; its end is not the death of an episode that anybody has."""
        self._forget_channel(episode)
        episode.kill()
        self._discard(episode)
        self._answer(episode.created_by, error=f"cannot set up the sandbox: {error.strerror or error}")

    def _adopt(self, message: dict[str, Any], fds: list[int]) -> None:
        episode = self._live_episode(message["name"])
        self._announce(episode)
        self._answer(message["id"])

    def _announce(self, episode: Episode) -> None:
        """Somebody has the episode: hand the launcher the descriptors of its namespaces, and have it watched."""
        opened, episode.for_launcher = episode.for_launcher, {}
        try:
            self.provisions.settle(episode.provision, episode.spec)
            for kind in episode.kinds:
                opened[kind] = episode.open_namespace(kind)
            episode.agents = os.fstat(opened["user" if self.ground.rung.user_namespaces else "mnt"]).st_ino
            descriptors = {**opened, "proc": episode.proc}
            message: dict[str, Any] = {"op": "add", "name": episode.name, "descriptors": list(descriptors)}
            message |= {"cpus": sorted(episode.provision.cpus), "nice": episode.provision.nice}
            self.launcher.send(message, [*descriptors.values(), *episode.provision.joins])
            self.provisions.watch(episode.spec, episode.proc, episode.pidfd)
        finally:
            close_all(list(opened.values()))

    def _forget_channel(self, episode: Episode) -> None:
        if episode.channel is not None:
            self.reactor.forget(episode.channel.fileno())
            episode.channel.close()
            episode.channel = None

    # ------------------------------------------------------------ views
    def _view(self, message: dict[str, Any], fds: list[int]) -> None:
        folder = worktree.create_view(self.ground, SandboxSpec.from_dict(message["spec"]))
        self.server.send({"id": message["id"], "ok": True, "folder": folder})

    def _unview(self, message: dict[str, Any], fds: list[int]) -> None:
        worktree.remove_view(message["name"])
        self._answer(message["id"])

    # ------------------------------------------------------------ verify
    def _verify(self, message: dict[str, Any], fds: list[int]) -> None:
        self.verifiers.start(self._episode(message["name"]), message, fds)

    def _kill(self, message: dict[str, Any], fds: list[int]) -> None:
        self.verifiers.kill(message["target"])

    # ------------------------------------------------------------ ends
    def _destroy(self, message: dict[str, Any], fds: list[int]) -> None:
        """Answered with what it had used. What the kernel does not count of processes only the warden knows, while they
        live."""
        episode = self._episode(message["name"])
        episode.destroyed_by, episode.used = message["id"], None
        if self.provisions.counts_processes:
            episode.kill()
        self._measure(message["id"], episode)

    def _harvest(self, message: dict[str, Any], fds: list[int]) -> None:
        episode = self._live_episode(message["name"])
        episode.destroyed_by, episode.harvest_to = message["id"], message["target"]
        episode.kill()

    def _abandon(self, message: dict[str, Any], fds: list[int]) -> None:
        """End a harvest at once; it is answered when its process has ended."""
        if message["name"] in self.episodes:
            self.episodes[message["name"]].harvest_to = None
        self.harvesters.kill(message["name"])
        self._answer(message["id"])

    def _check(self, message: dict[str, Any], fds: list[int]) -> None:
        """Whether the episode lives: asked when a command was killed, which is heard of before its PID 1's end."""
        hits = self._live_episode(message["name"]).hits()
        self.server.send({"id": message["id"], "ok": True, "hits": hits})

    def _names(self, message: dict[str, Any], fds: list[int]) -> None:
        gauge = Gauge(self._episode(message["name"]).proc)
        try:
            self.server.send({"id": message["id"], "ok": True, "names": gauge.names(NAMES_MAX)})
        finally:
            gauge.close()

    def _episode(self, name: str) -> Episode:
        episode = self.episodes.get(name)
        if episode is None or episode.ended:  # its pid may be another's by now
            raise ValueError(f"there is no sandbox {name!r} any more")
        return episode

    def _live_episode(self, name: str) -> Episode:
        episode = self._episode(name)
        if processes.is_exiting(episode.pid):
            self._listen_to_warden()
            raise ValueError(f"the sandbox is dead: {episode.reason}")
        return episode

    def _child_ended(self, pid: int, end: End) -> None:
        verified = self.verifiers.episode_of(pid)
        if verified is not None:
            self.verifiers.ended(pid, end, lives=verified.name in self.episodes)
            return
        episode = next((one for one in self.episodes.values() if one.pid == pid and not one.ended), None)
        if episode is not None and episode.channel is None:
            self._init_ended(episode)
        elif (harvester := self.harvesters.pop(pid)) is not None:
            why = harvester.why(end)
            worktree.discard(self.ground, harvester.name)
            self._answer(harvester.request, why)
        elif pid in self.helpers:
            # Without it nothing can be run, or held to its limits, any more: end, and say so by ending.
            raise ChannelClosed

    def _init_ended(self, episode: Episode) -> None:
        if episode.destroyed_by is None:
            self._listen_to_warden()
            self._discard(episode)  # before the news: the server then deletes what was renamed away
            self.server.send({"event": "died", "name": episode.name, "reason": episode.reason})
            return
        if episode.harvest_to is not None:
            self._release(episode)
            self.harvesters.start(episode.name, episode.harvest_to, episode.destroyed_by)
            return
        if episode.used is None:
            episode.ended = True  # the warden is still looking at its worktree
        else:
            self._destroyed(episode, episode.used)

    def _destroyed(self, episode: Episode, used: dict[str, Any]) -> None:
        worktree.discard(self.ground, episode.name)
        self.server.send({"id": episode.destroyed_by, "ok": True, **used})
        self._release(episode)  # while the server goes on

    def _discard(self, episode: Episode) -> None:
        worktree.discard(self.ground, episode.name)
        self._release(episode)

    def _release(self, episode: Episode) -> None:
        """Give back all that it has but its worktree."""
        self.episodes.pop(episode.name, None)
        # The launcher's descriptors would keep the namespaces alive.
        self.launcher.send({"op": "drop", "name": episode.name})
        close_all([fd for fd in (episode.pidfd, episode.proc, *episode.for_launcher.values()) if fd >= 0])
        self.provisions.take_back(episode.name, episode.provision)

    # ------------------------------------------------------------ limits
    def _usage(self, message: dict[str, Any], fds: list[int]) -> None:
        """With "alive" it is only answered for an episode that lives, as `check` is, and with its hits."""
        episode = self._live_episode(message["name"]) if message.get("alive") else self._episode(message["name"])
        self._measure(message["id"], episode, episode.hits() if message.get("alive") else {})

    def _measure(self, request: int, episode: Episode, hits: Mapping[str, int] = {}) -> None:
        """Ask the warden, and meanwhile the kernel, which knows some of it better."""
        self.warden.send({"op": "usage", "id": request, "name": episode.name})
        self._being_measured[request] = episode, self.provisions.count(episode.name, episode.provision), hits

    def _measured(self, message: dict[str, Any]) -> None:
        episode, counted, hits = self._being_measured.pop(message["id"])
        usage = {**(message["usage"] or {}), **counted}
        answer = {"usage": usage, "all_cpu": "cpu_s" in counted}
        if message["id"] != episode.destroyed_by:
            self.server.send({"id": message["id"], "ok": True, "hits": hits, **answer})
        elif episode.ended:
            self._destroyed(episode, answer)
        else:
            episode.used = answer
            episode.kill()

    def _listen_to_warden(self) -> None:
        """It says why it kills before it does.

        Never blocks: an episode's end that was handled in the same turn may have read all that there was.
        """
        for message, _ in self.warden.waiting():
            episode = self.episodes.get(message.get("name", ""))
            if message["event"] == "usage":
                self._measured(message)
            elif episode is not None and message["event"] == "exceeded":
                episode.reason = message["text"]
            elif episode is not None:
                self.server.send(message)

    def _end_everything(self) -> None:
        # Whoever would hear is gone or going.
        self.server.mute()
        self.launcher.mute()
        self.warden.mute()
        for episode in list(self.episodes.values()):
            episode.harvest_to, episode.used = None, {}
            if episode.ended:
                self._discard(episode)
            else:
                episode.kill()
        self.harvesters.kill()
        self.reactor.forget(self.server.fileno())
        self.reactor.forget(self.warden.fileno())
        self.helpers = ()
        deadline = time.monotonic() + _LAST_REAPING_S
        while (self.episodes or self.harvesters) and time.monotonic() < deadline:
            self.reactor.turn(50)
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
        signal.alarm(_LAST_CLEANING_S)
        self.provisions.close()
        worktree.demolish(self.ground.folder)
