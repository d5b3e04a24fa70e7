"""Verifiers: how one gets into an episode, with mounts that it alone sees, and those that run."""

import os
import signal
from dataclasses import dataclass
from typing import Any

from tbench2_env.isolation import capabilities, covers, processes, provided, userns, worktree
from tbench2_env.isolation import command as commands
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, close_all
from tbench2_env.isolation.episodes import Episode
from tbench2_env.isolation.provisions import Provision, take_place
from tbench2_env.isolation.reactor import End
from tbench2_env.isolation.spec import CommandSpec, Cover, Provided, Rung, SandboxSpec
from tbench2_env.isolation.stack import Ground


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

    def attach(self, rung: Rung) -> None:
        """In the mount namespace of the verifier's own. Raises: OSError."""
        for fd, place in self._fixed:
            sc.move_mount(fd, place)
        for fd, place in self._provided:
            provided.attach(rung, fd, place)

    def close(self) -> None:
        close_all([fd for fd, _ in (*self._fixed, *self._provided)])


def enter(rung: Rung, provision: Provision, namespaces: dict[str, int], mounts: Mounts) -> None:
    """Join the namespaces of an episode, descriptors by kind, from a fork that is in its PID namespace already."""
    take_place(provision.verifier_joins, sorted(provision.cpus))
    sc.setns(namespaces["mnt"], sc.CLONE_NEWNS)
    # Still outside the episode's user namespace: with these mounts made inside it, root there remounted /tests
    # read-write and changed the pristine files.
    sc.unshare(sc.CLONE_NEWNS)
    mounts.attach(rung)
    sc.setns(namespaces["ipc"], sc.CLONE_NEWIPC)
    sc.setns(namespaces["uts"], sc.CLONE_NEWUTS)
    if "net" in namespaces:
        sc.setns(namespaces["net"], sc.CLONE_NEWNET)
    if "user" in namespaces:
        sc.setns(namespaces["user"], sc.CLONE_NEWUSER)
    userns.become_root(supplementary_groups=rung.has_id_range)
    if "user" not in namespaces:
        capabilities.confine_verifier()


@dataclass(frozen=True)
class _Running:
    request: int
    episode: Episode


class Verifiers:
    """The verifiers of all episodes, children of the spawner, by process id."""

    def __init__(self, server: Channel, ground: Ground) -> None:
        self._server, self._ground = server, ground
        self._running: dict[int, _Running] = {}

    def start(self, episode: Episode, message: dict[str, Any], fds: list[int]) -> None:
        """`message` is the request. Raises: OSError."""
        request, rung = message["id"], self._ground.rung
        command = CommandSpec.from_dict(message["command"])
        mounted = Mounts(self._ground, episode.spec, message)
        kinds = [*episode.kinds, *(["user"] if rung.user_namespaces else [])]
        opened = {kind: episode.open_namespace(kind) for kind in kinds}
        try:
            pid = processes.fork_aside_into(opened["pid"])
            if pid == 0:
                commands.become(
                    command,
                    fds,
                    lambda: enter(rung, episode.provision, opened, mounted),
                    lambda reason: self._failed(request, reason),
                )
            self._running[pid] = _Running(request, episode)
        finally:
            mounted.close()
            close_all(list(opened.values()))

    def _failed(self, request: int, reason: str) -> None:
        self._server.send({"event": "failed", "id": request, "error": reason})

    def kill(self, request: int) -> None:
        """Kill what was started by `request`, if it runs, and all it left."""
        for pid, verifier in self._running.items():
            if verifier.request == request:
                os.kill(pid, signal.SIGKILL)  # it may not have become one yet
                verifier.episode.kill_verifiers(self._ground.rung)

    def ended(self, pid: int, end: End, *, lives: bool) -> None:
        """Tell of the end of one, after which nothing that it left runs on in its episode, if that still `lives`."""
        verifier = self._running.pop(pid)
        # Not while another runs, which would be killed, too; its own end cleans up.
        if lives and all(other.episode is not verifier.episode for other in self._running.values()):
            verifier.episode.kill_verifiers(self._ground.rung)
        self._server.send({"event": "exit", "id": verifier.request, **end.to_dict()})

    def episode_of(self, pid: int) -> Episode | None:
        """None: that process is no verifier."""
        verifier = self._running.get(pid)
        return None if verifier is None else verifier.episode
