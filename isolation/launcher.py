"""The launcher starts the agents' commands: a fork of the spawner, landlocked once for all, so that nothing it starts
can signal a verifier. It keeps descriptors of every episode's namespaces, which it could not open itself.

Requests come straight from the server, episodes from the spawner. A request names an episode that the spawner
announced before the server knew of it, so announcements are read first.
"""

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any, NoReturn

from tbench2_env.isolation import capabilities, entering, processes, seccomp
from tbench2_env.isolation import command as commands
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all
from tbench2_env.isolation.init import prefer_for_oom_killer
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.reactor import End, Reactor
from tbench2_env.isolation.spec import CommandSpec, Rung
from tbench2_env.isolation.start import Started, Starter, move_all_up


@dataclass
class Entrance:
    """How to get into an episode: descriptors of its namespaces by kind and of its /proc, its cgroup leaf, its CPUs,
    its commands' niceness."""

    fds: dict[str, int]
    joins: list[int]
    cpus: list[int]
    nice: int
    #: The last command and its descriptors, and its program: most are bash, which reads its script, and alike.
    last: tuple[CommandSpec, list[int], Program] | None = None

    @property
    def proc(self) -> int:
        return self.fds["proc"]

    def close(self) -> None:
        close_all([*self.fds.values(), *self.joins])


class Launcher:
    """State: the episodes' descriptors by name, the running commands by process id."""

    def __init__(self, server: Channel, spawner: Channel, rung: Rung) -> None:
        self.server, self.spawner, self.rung = server, spawner, rung
        self.episodes: dict[str, Entrance] = {}
        #: By process id, each with the name of its episode.
        self.running: dict[int, tuple[str, commands.Running]] = {}
        self.starter = Starter()

    def run(self) -> NoReturn:
        reactor = Reactor(on_child=self._child_ended)
        reactor.watch(self.spawner.fileno(), self._read_announcements)
        reactor.watch(self.server.fileno(), self._request)
        with contextlib.suppress(ChannelClosed):
            reactor.run()
        os._exit(0)

    # ------------------------------------------------------------ from the spawner
    def _read_announcements(self) -> None:
        for message, fds in self.spawner.waiting():
            name = message["name"]
            if message["op"] == "add":
                self.episodes[name] = _entrance(message, fds)
            elif name in self.episodes:
                self.episodes.pop(name).close()

    # ------------------------------------------------------------ from the server
    def _request(self) -> None:
        message, fds = self.server.receive()
        self._read_announcements()
        if message["op"] == "exec":
            self._exec(message, fds)
        else:
            self._kill(message["target"])
        close_all(fds)

    def _exec(self, message: dict[str, Any], fds: list[int]) -> None:
        request, name = message["id"], message["name"]
        episode = self.episodes.get(name)
        if episode is None:
            self._failed(request, "the sandbox is dead")
            return
        command = CommandSpec.from_dict(message["command"])
        try:
            started = self._start(command, episode, fds)
        except (OSError, ValueError) as error:
            self._failed(request, f"cannot start a process in the sandbox: {error}")
            return
        self.running[started.pid] = name, commands.Running(request, command, started)

    def _start(self, command: CommandSpec, episode: Entrance, fds: list[int]) -> Started:
        """Gives `fds` other numbers. Raises: OSError, ValueError."""
        move_all_up(fds)
        program = self._program(command, episode, fds)
        # For all children to come. The way back is not taken, because it is EPERM where our own PID namespace belongs
        # to an outer user namespace (enroot).
        sc.setns(episode.fds["pid"], sc.CLONE_NEWPID)
        namespaces = [episode.fds[kind] for kind in entering.KINDS if kind in episode.fds]
        return self.starter.start(program, [*fds, *episode.joins, *namespaces])

    def _program(self, command: CommandSpec, episode: Entrance, fds: list[int]) -> Program:
        """Raises: ValueError."""
        if episode.last is None or episode.last[:2] != (command, fds):
            program = commands.program(command, fds, lambda steps: self._enter(steps, episode, command.ids))
            episode.last = command, list(fds), program
        return episode.last[2]

    def _enter(self, program: Program, episode: Entrance, ids: tuple[int, ...]) -> None:
        has_range = self.rung.has_id_range
        entering.take_place(program, episode.joins, episode.cpus, episode.nice)
        entering.join(program, episode.fds)
        entering.become(program, 0, 0, () if has_range else None)
        if not self.rung.user_namespaces:
            entering.confine(program, capabilities.CONTAINER)
        if ids and has_range:
            uid, gid, *groups = ids
            entering.become(program, uid, gid, groups)

    def _failed(self, request: int, reason: str) -> None:
        self.server.send({"event": "failed", "id": request, "error": reason})

    def _kill(self, target: int) -> None:
        for pid, (name, running) in self.running.items():
            if running.request == target:
                self._kill_tree(pid, self.episodes.get(name))

    def _kill_tree(self, pid: int, episode: Entrance | None) -> None:
        with contextlib.suppress(OSError):
            if episode is None:
                os.kill(pid, signal.SIGKILL)
            else:
                processes.kill_tree(episode.proc, processes.inner_pid(pid))

    def _child_ended(self, pid: int, end: End) -> None:
        if pid in self.running:
            _, running = self.running.pop(pid)
            self.server.send(running.news(self.starter, end))


def _entrance(message: dict[str, Any], fds: list[int]) -> Entrance:
    kinds = message["descriptors"]
    named = dict(zip(kinds, fds[: len(kinds)], strict=True))
    # Opened anew: a descriptor that was sent shares its position with the sender's, who lists the folder, too.
    shared, named["proc"] = named["proc"], os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=named["proc"])
    os.close(shared)
    return Entrance(named, fds[len(kinds) :], message["cpus"], message["nice"])


def main(server: Channel, spawner: Channel, rung: Rung) -> NoReturn:
    """Become the launcher, in a fork of the spawner."""
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    prefer_for_oom_killer()
    if signals_scoped():
        sc.landlock_scope(sc.LANDLOCK_SCOPE_SIGNAL | sc.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET)
    with contextlib.suppress(OSError, KeyError):  # a kernel without seccomp, another machine
        seccomp.refuse_foreign_limits()
    Launcher(server, spawner, rung).run()


def signals_scoped() -> bool:
    """Whether this kernel can keep agents from signalling verifiers by landlock (ABI 6, Linux 6.12)."""
    return sc.landlock_abi() >= 6
