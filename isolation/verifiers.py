"""Verifiers: how one gets into an episode, with mounts that it alone sees, and those that run."""

import os
import signal
from typing import Any

from tbench2_env.isolation import capabilities, covers, entering, provided, worktree
from tbench2_env.isolation import command as commands
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, close_all
from tbench2_env.isolation.episodes import Episode
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.provisions import Provision
from tbench2_env.isolation.reactor import End
from tbench2_env.isolation.spec import CommandSpec, Cover, Provided, Rung, SandboxSpec
from tbench2_env.isolation.stack import Ground
from tbench2_env.isolation.start import Starter, move_all_up


class Mounts:
    """Detached mounts, and where a verifier has them: until `close`, once they are attached or not."""

    def __init__(self, ground: Ground, spec: SandboxSpec, message: dict[str, Any]) -> None:
        """`message` is the request. Raises: OSError; nothing is left open then."""
        self._fixed: list[tuple[int, str]] = []
        self._provided: list[tuple[int, str]] = []
        try:
            self._make(ground, spec, message)
        except OSError:
            self.close()
            raise

    def _make(self, ground: Ground, spec: SandboxSpec, message: dict[str, Any]) -> None:
        worktree.discard_verifiers(ground, spec.name)
        tests, logs = worktree.verifier_mounts(ground, spec.name, message["layer"])
        self._fixed += [(tests, "/tests"), (logs, "/logs/verifier")]
        for cover in map(Cover.from_dict, message["covers"]):
            self._fixed += covers.make(ground, spec, cover)
        for number, one in enumerate(map(Provided.from_dict, message["provided"])):
            own = f"episodes/{spec.name}/provided.{number}"
            self._provided.append((provided.detach(ground, one, own), one.place))

    @property
    def fds(self) -> list[int]:
        return [fd for fd, _ in (*self._fixed, *self._provided)]

    def attach(self, program: Program, rung: Rung) -> None:
        """In the mount namespace of the verifier's own."""
        for fd, place in self._fixed:
            entering.attach(program, fd, place)
        for fd, place in self._provided:
            provided.attach(program, rung, fd, place)

    def close(self) -> None:
        close_all(self.fds)


def enter(program: Program, rung: Rung, provision: Provision, namespaces: dict[str, int], mounts: Mounts) -> None:
    """Join the namespaces of an episode, descriptors by kind, with `mounts`."""
    entering.take_place(program, provision.verifier_joins, sorted(provision.cpus), provision.nice)
    program.call("setns", namespaces["mnt"], sc.CLONE_NEWNS)
    # Still outside the episode's user namespace: with these mounts made inside it, root there remounted /tests
    # read-write and changed the pristine files.
    program.call("unshare", sc.CLONE_NEWNS)
    mounts.attach(program, rung)
    entering.join(program, {kind: fd for kind, fd in namespaces.items() if kind != "mnt"})
    entering.become(program, 0, 0, () if rung.has_id_range else None)
    if "user" not in namespaces:
        entering.confine(program, capabilities.VERIFIER)


class Verifiers:
    """The verifiers of all episodes, children of the spawner, by process id."""

    def __init__(self, server: Channel, ground: Ground) -> None:
        self._server, self._ground = server, ground
        self._running: dict[int, tuple[Episode, commands.Running]] = {}
        self._starter = Starter()

    def start(self, episode: Episode, message: dict[str, Any], fds: list[int]) -> None:
        """`message` is the request. Raises: OSError."""
        rung = self._ground.rung
        command = CommandSpec.from_dict(message["command"])
        move_all_up(fds)
        mounted = Mounts(self._ground, episode.spec, message)
        opened: dict[str, int] = {}
        try:
            for kind in (*episode.kinds, *(["user"] if rung.user_namespaces else [])):
                opened[kind] = episode.open_namespace(kind)
            program = commands.program(
                command, fds, lambda steps: enter(steps, rung, episode.provision, opened, mounted)
            )
            passed = [*fds, *episode.provision.verifier_joins, *opened.values(), *mounted.fds]
            # The spawner must stay able to make namespaces of processes of its own.
            started = self._starter.start(program, passed, aside_into=opened["pid"])
            self._running[started.pid] = episode, commands.Running(message["id"], command, started)
        finally:
            mounted.close()
            close_all(list(opened.values()))

    def kill(self, request: int) -> None:
        """Kill what was started by `request`, if it runs, and all it left."""
        for pid, (episode, verifier) in self._running.items():
            if verifier.request == request:
                os.kill(pid, signal.SIGKILL)  # it may not have become one yet
                episode.kill_verifiers(self._ground.rung)

    def ended(self, pid: int, end: End, *, lives: bool) -> None:
        """Tell of the end of one, after which nothing that it left runs on in its episode, if that still `lives`."""
        episode, verifier = self._running.pop(pid)
        # Not while another runs, which would be killed, too; its own end cleans up.
        if lives and all(other is not episode for other, _ in self._running.values()):
            episode.kill_verifiers(self._ground.rung)
        self._server.send(verifier.news(self._starter, end))

    def episode_of(self, pid: int) -> Episode | None:
        """None: that process is no verifier."""
        return self._running[pid][0] if pid in self._running else None
