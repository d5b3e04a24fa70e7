"""The warden: one process, forked by the spawner once, that holds episodes to limits which the kernel does not enforce.

It looks at each episode every fifth of a second, through a descriptor of the episode's own /proc, and kills what
exceeds a limit by the pidfd of its PID 1, having told the spawner first.

    from the spawner  {"op": "add", "name", "limits", "kills_at_processes_max"} + [proc, pidfd of PID 1], {"op": "drop",
                      "name"}, {"op": "usage", "id", "name"}
    to the spawner    {"event": "exceeded" | "hit", "name", "limit", "text"}, {"event": "usage", "id", "usage"}
    limits            as `spec.Limits`; None for those that a cgroup enforces
    limit             "memory" | "storage" | "files" | "processes"
    usage             {"memory_peak_bytes", "cpu_s" of live processes, "processes_peak", "storage_bytes", "files"}, or
                      None when there is no such episode
"""

import contextlib
import os
import resource
import signal
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all
from tbench2_env.isolation.gauge import Gauge
from tbench2_env.isolation.memory import Memory
from tbench2_env.isolation.reactor import Reactor
from tbench2_env.isolation.spec import Limits
from tbench2_env.isolation.storage import Drain, Storage

_LOOK_EVERY_S = 0.2
#: Walking worktrees takes this much of each look in all, in slices, so that memory is looked at in time.
_WALKS_BUDGET_S, _WALK_SLICE_S = 0.08, 0.01
#: When usage is asked for a worktree is walked for so long: of a small one what was written a moment ago counts, too.
_USAGE_WALK_S = 0.02
_HIT_EVERY_S = 1.0
#: A full number of processes falls short of the limit whenever some are being replaced by others: the kernel counts
#: those that ended for a while longer than /proc lists them.
_HIT_SHARE = 0.9
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass
class Episode:
    """What the warden knows of an episode. `killed`: it is only kept for its usage."""

    name: str
    limits: Limits
    kills_at_processes_max: bool
    pidfd: int
    gauge: Gauge
    storage: Storage
    memory: Memory = field(init=False)
    processes_peak: int = 1
    hit_at: float = -_HIT_EVERY_S
    killed: bool = False

    def __post_init__(self) -> None:
        self.memory = Memory(self.gauge, self.limits.memory_bytes)

    def close(self) -> None:
        self.storage.close()
        self.gauge.close()
        os.close(self.pidfd)


class Warden:
    """State: the episodes by name."""

    def __init__(self, spawner: Channel) -> None:
        self.spawner = spawner
        self.episodes: dict[str, Episode] = {}
        self.drain = Drain()
        self.drain.look()

    def run(self) -> None:
        """Serve until the spawner is gone. Raises: ChannelClosed."""
        reactor = Reactor(on_child=lambda pid, end: None)
        reactor.watch(self.spawner.fileno(), self._message)
        next_look = 0.0
        while True:
            wait_s = max(0.0, next_look - time.monotonic())
            reactor.turn(round(wait_s * 1000) if self.episodes else None)
            begun = time.monotonic()
            if begun >= next_look - 0.001:
                next_look = begun + _LOOK_EVERY_S
                self._look()

    # ------------------------------------------------------------ from the spawner
    def _message(self) -> None:
        message, fds = self.spawner.receive()
        if message["op"] == "add":
            self._add(message, *fds)
        elif message["op"] == "usage":
            episode = self.episodes.get(message["name"])
            usage = None if episode is None else self._usage(episode)
            self.spawner.send({"event": "usage", "id": message["id"], "usage": usage})
        elif message["name"] in self.episodes:
            self.episodes.pop(message["name"]).close()

    def _add(self, message: dict[str, Any], proc: int, pidfd: int) -> None:
        name, limits = message["name"], Limits.from_dict(message["limits"])
        try:
            gauge = Gauge(proc)
        except OSError:  # it is dead already
            close_all([proc, pidfd])
            return
        os.close(proc)
        storage = Storage(f"episodes/{name}", limits, self.drain)
        self.episodes[name] = Episode(name, limits, message["kills_at_processes_max"], pidfd, gauge, storage)

    def _usage(self, episode: Episode) -> dict[str, float]:
        if not episode.killed:
            self._look_at_processes(episode)
            episode.storage.advance(_USAGE_WALK_S)
        return {
            "memory_peak_bytes": episode.memory.peak,
            "cpu_s": round(episode.gauge.cpu_s(), 3),
            "processes_peak": episode.processes_peak,
            "storage_bytes": episode.storage.size,
            "files": episode.storage.files,
        }

    # ------------------------------------------------------------ looking
    def _look(self) -> None:
        self.drain.look()
        for episode in self.episodes.values():
            if not episode.killed:
                self._look_at_processes(episode)
        self._walk_worktrees()

    def _look_at_processes(self, episode: Episode) -> None:
        pids = episode.gauge.pids()
        if pids:
            episode.storage.touched = True
        # Their number first: it is the cheaper to know, and a fork bomb gains on us with every millisecond.
        if self._has_too_many(episode, len(pids) + 1) or self._has_too_many(episode, episode.gauge.tasks(pids)):
            self._kill(episode, "processes")
        elif episode.memory.is_exceeded(pids):
            self._kill(episode, "memory")

    def _has_too_many(self, episode: Episode, count: int) -> bool:
        """Whether the episode is to be killed for `count` processes and threads; reports those that something caps."""
        episode.processes_peak = max(episode.processes_peak, count)
        most = episode.limits.processes_max
        if most is None or count < _HIT_SHARE * most:
            return False
        if not episode.kills_at_processes_max:
            self._report_full(episode, most)
        return episode.kills_at_processes_max and count >= most

    def _report_full(self, episode: Episode, most: int) -> None:
        now = time.monotonic()
        if now - episode.hit_at >= _HIT_EVERY_S:
            episode.hit_at = now
            text = f"the episode reached its limit of {most} processes and threads: it cannot start more"
            self.spawner.send({"event": "hit", "name": episode.name, "limit": "processes", "text": text})

    def _walk_worktrees(self) -> None:
        deadline = time.monotonic() + _WALKS_BUDGET_S
        due = deque(one for one in self.episodes.values() if not one.killed and one.storage.is_due())
        while due and time.monotonic() < deadline:
            episode = due.popleft()
            # Whoever had no turn comes first at the next look.
            self.episodes[episode.name] = self.episodes.pop(episode.name)
            if not episode.storage.advance(_WALK_SLICE_S):
                due.append(episode)
            elif (limit := episode.storage.exceeded()) is not None:
                self._kill(episode, limit)

    def _kill(self, episode: Episode, limit: str) -> None:
        text = exceeded_text(limit, episode.limits)
        self.spawner.send({"event": "exceeded", "name": episode.name, "limit": limit, "text": text})
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(episode.pidfd, signal.SIGKILL)
        episode.killed = True
        episode.storage.close()


def exceeded_text(limit: str, limits: Limits) -> str:
    """The sentence for the user whose episode was killed for exceeding `limit`."""
    what = {
        "memory": f"more memory than its limit of {_size(limits.memory_bytes)} (environment.memory in task.toml)",
        "storage": f"more storage than its limit of {_size(limits.storage_bytes)} (environment.storage in task.toml)",
        "files": f"more files and folders than its limit of {limits.files_max}",
        "processes": f"more processes and threads than its limit of {limits.processes_max} allows",
    }
    return f"the episode used {what[limit]} and was killed"


def _size(count: int | None) -> str:
    count = count or 0
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def _take_precedence() -> None:
    """Run before all that is not real-time: behind a fork bomb, even a niceness of -20 comes seconds late."""
    with contextlib.suppress(OSError):  # no privilege, no real-time share of our cgroup: it looks when its turn comes
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def main(spawner: Channel) -> NoReturn:
    """Become the warden, in a fork of the spawner, whose working directory is the scratch folder of all episodes."""
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        # Walking a hostile tree takes one descriptor for each 2 KB of a path.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        _take_precedence()
        with contextlib.suppress(ChannelClosed):
            Warden(spawner).run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever happened: a fork must never go on as a second spawner.
        os._exit(1)
