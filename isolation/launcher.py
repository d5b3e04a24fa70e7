"""The launcher starts the agents' commands: a fork of the spawner, landlocked once for all, so that nothing it starts
can signal a verifier. It keeps descriptors of every episode's namespaces, which it could not open itself.

Requests come straight from the server, episodes from the spawner. A request names an episode that the spawner
announced before the server knew of it, so announcements are read first.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from tbench2_env.isolation import capabilities, processes, provisions, seccomp, userns
from tbench2_env.isolation import command as commands
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all
from tbench2_env.isolation.init import prefer_for_oom_killer
from tbench2_env.isolation.reactor import End, Reactor
from tbench2_env.isolation.spec import CommandSpec, Rung

#: The namespaces that a command joins, user last: the others need the outer namespace's rights.
_KINDS = {
    "mnt": sc.CLONE_NEWNS, "ipc": sc.CLONE_NEWIPC, "uts": sc.CLONE_NEWUTS, "net": sc.CLONE_NEWNET,
    "user": sc.CLONE_NEWUSER,
}  # fmt: skip


@dataclass(frozen=True)
class Entrance:
    """How to get into an episode: descriptors of its namespaces by kind and of its /proc, its cgroup leaf, its CPUs."""

    fds: dict[str, int]
    joins: list[int]
    cpus: list[int]

    @property
    def proc(self) -> int:
        return self.fds["proc"]

    def close(self) -> None:
        close_all([*self.fds.values(), *self.joins])


@dataclass(frozen=True)
class Running:
    request: int
    episode: str


class Launcher:
    """State: the episodes' descriptors by name, the running commands by process id."""

    def __init__(self, server: Channel, spawner: Channel, rung: Rung) -> None:
        self.server, self.spawner, self.rung = server, spawner, rung
        self.episodes: dict[str, Entrance] = {}
        self.running: dict[int, Running] = {}

    def run(self) -> NoReturn:
        reactor = Reactor(on_child=self._child_ended)
        reactor.watch(self.spawner.fileno(), self._announcement)
        reactor.watch(self.server.fileno(), self._request)
        with contextlib.suppress(ChannelClosed):
            reactor.run()
        os._exit(0)

    # ------------------------------------------------------------ from the spawner
    def _announcement(self) -> None:
        message, fds = self.spawner.receive()
        name = message["name"]
        if message["op"] == "add":
            self.episodes[name] = _entrance(message, fds)
        elif name in self.episodes:
            self.episodes.pop(name).close()

    def _read_announcements(self) -> None:
        self.spawner.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._announcement()
        self.spawner.sock.setblocking(True)

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
        try:
            pid = processes.fork_into(episode.fds["pid"])
        except OSError as error:
            self._failed(request, f"cannot start a process in the sandbox: {error}")
            return
        if pid == 0:
            spec = CommandSpec.from_dict(message["command"])
            commands.become(spec, fds, self._enter(episode, spec.ids), lambda reason: self._failed(request, reason))
        self.running[pid] = Running(request, name)

    def _enter(self, episode: Entrance, ids: tuple[int, ...]) -> Callable[[], None]:
        def enter() -> None:
            provisions.take_place(episode.joins, episode.cpus)
            for name, kind in _KINDS.items():
                if name in episode.fds:
                    sc.setns(episode.fds[name], kind)
            userns.become_root(supplementary_groups=self.rung.has_id_range)
            if not self.rung.user_namespaces:
                capabilities.confine_agent()
            if ids and self.rung.has_id_range:
                userns.become(*ids)

        return enter

    def _failed(self, request: int, reason: str) -> None:
        self.server.send({"event": "failed", "id": request, "error": reason})

    def _kill(self, target: int) -> None:
        for pid, running in self.running.items():
            if running.request == target:
                self._kill_tree(pid, self.episodes.get(running.episode))

    def _kill_tree(self, pid: int, episode: Entrance | None) -> None:
        with contextlib.suppress(OSError):
            if episode is None:
                os.kill(pid, signal.SIGKILL)
            else:
                processes.kill_tree(episode.proc, processes.inner_pid(pid))

    def _child_ended(self, pid: int, end: End) -> None:
        running = self.running.pop(pid, None)
        if running is not None:
            self.server.send({"event": "exit", "id": running.request, **end.to_dict()})


def _entrance(message: dict[str, Any], fds: list[int]) -> Entrance:
    kinds = message["descriptors"]
    named = dict(zip(kinds, fds[: len(kinds)], strict=True))
    # Opened anew: a descriptor that was sent shares its position with the sender's, who lists the folder, too.
    shared, named["proc"] = named["proc"], os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=named["proc"])
    os.close(shared)
    return Entrance(named, fds[len(kinds) :], message["cpus"])


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
