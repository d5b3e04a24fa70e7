"""What the host gives each episode and takes back: a way out of its network, a cgroup leaf, CPUs, a watch."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tbench2_env.isolation import egress
from tbench2_env.isolation.channel import Channel
from tbench2_env.isolation.limits import Affinity, Cgroups, Leaf
from tbench2_env.isolation.spec import Limits, Network, SandboxSpec
from tbench2_env.isolation.stack import Ground

#: What is to be known of an episode's processes.
_OF_PROCESSES = frozenset({"memory_peak_bytes", "cpu_s", "processes_peak"})


@dataclass
class Provision:
    """What one episode has."""

    leaf: Leaf | None = None
    cpus: set[int] = field(default_factory=set)
    plug: egress.Plug | None = None
    #: Of each of its commands and verifiers; 0 where its cgroup has a weight.
    nice: int = 0

    @property
    def joins(self) -> list[int]:
        """For `take_place` of PID 1 and of agents' commands."""
        return [] if self.leaf is None else self.leaf.join_fds

    @property
    def verifier_joins(self) -> list[int]:
        return [] if self.leaf is None else self.leaf.verifier_join_fds


class Provisions:
    """State: what this host offers, and the leaves that could not be removed yet."""

    def __init__(self, ground: Ground, warden: Channel, egress_names: Sequence[str], nice: int = 0) -> None:
        self._warden, self._ground = warden, ground
        in_user_namespace = ground.rung.user_namespaces
        self.egress, self.egress_refusals = egress.find(egress_names, in_user_namespace=in_user_namespace)
        self._cgroups, self._no_cgroups = Cgroups.find(os.path.basename(ground.folder), nice)
        # A worktree in memory would count as the memory of its episode, and storage is ten times that.
        self._by_cgroup = frozenset(() if self._cgroups is None else self._cgroups.controls)
        if ground.in_memory:
            self._by_cgroup -= {"memory"}
        self._affinity = Affinity()
        self._nice = 0 if "cpu" in self._by_cgroup else nice
        self._dying: list[Leaf] = []

    def describe(self) -> dict[str, Any]:
        """How each limit is enforced, and which ways out of the network there are."""
        rung, by = self._ground.rung, self._by_cgroup
        watched = "watched, five times a second: the episode is killed"
        return {
            "enforcement": {
                "memory": "cgroup" if "memory" in by else watched,
                "processes": "RLIMIT_NPROC" if rung.caps_processes else "cgroup" if "pids" in by else watched,
                "cpus": "cgroup" if "cpu" in by else _without_cgroup(self._nice),
                "storage": "the size of a tmpfs" if self._ground.in_memory else watched,
            },
            "no_cgroups": self._no_cgroups,
            "egress": None if self.egress is None else self.egress.name,
            "egress_lacks": [] if self.egress is None else list(self.egress.lacks),
            "egress_refusals": self.egress_refusals,
        }

    def give(self, spec: SandboxSpec) -> Provision:
        """What the episode has before its first process. Raises: OSError."""
        self._remove_dying()
        provision = Provision(nice=self._nice)
        if self._cgroups is not None:
            provision.leaf = self._cgroups.create(spec.name, self._for_cgroup(spec.limits))
        return provision

    def settle(self, provision: Provision, spec: SandboxSpec) -> None:
        """What it has only once somebody uses it: CPUs are shared out among those that compute."""
        if "cpu" not in self._by_cgroup and spec.limits.cpus is not None:
            provision.cpus = self._affinity.choose(spec.limits.cpus)

    def unreachable(self, network: Network) -> tuple[str, ...]:
        """Networks that an episode must not reach though it has a way out."""
        return () if self.egress is None or network is not Network.EGRESS else tuple(self.egress.unreachable)

    def connect(self, provision: Provision, spec: SandboxSpec, pid: int) -> None:
        """Give PID 1 its way out. Raises: OSError."""
        if spec.network is not Network.EGRESS:
            return
        if self.egress is None:
            raise OSError("this host gives episodes no way out of their network: " + "; ".join(self.egress_refusals))
        provision.plug = self.egress.connect(pid)

    def watch(self, spec: SandboxSpec, proc: int, pidfd: int) -> None:
        caps = self._ground.rung.caps_processes or "pids" in self._by_cgroup
        watched = self._for_warden(spec.limits).to_dict()
        message = {"op": "add", "name": spec.name, "limits": watched, "kills_at_processes_max": not caps}
        self._warden.send(message, [proc, pidfd])

    @property
    def counts_processes(self) -> bool:
        """Whether `count` knows all that is to be known of processes, also when they are gone."""
        counted = frozenset() if self._cgroups is None else self._cgroups.counted
        return counted >= _OF_PROCESSES and "memory" in self._by_cgroup

    def count(self, name: str, provision: Provision) -> dict[str, float]:
        """What of an episode's usage the kernel counts: see `sandbox.Usage`."""
        counted = {} if provision.leaf is None else provision.leaf.usage()
        if "memory" not in self._by_cgroup:
            counted.pop("memory_peak_bytes", None)
        if self._ground.in_memory:
            with contextlib.suppress(OSError):
                whole = os.statvfs(f"episodes/{name}")
                counted["storage_bytes"] = (whole.f_blocks - whole.f_bfree) * whole.f_frsize
                counted["files"] = whole.f_files - whole.f_ffree
        return counted

    def take_back(self, name: str, provision: Provision) -> None:
        """When the last process of the episode is gone, or nearly."""
        self._warden.send({"op": "drop", "name": name})
        self._affinity.release(provision.cpus)
        if provision.plug is not None:
            provision.plug.unplug()
        if provision.leaf is not None:
            self._dying.append(provision.leaf)
        self._remove_dying()

    def close(self) -> None:
        """Give back what is the server's own."""
        if self.egress is not None:
            with contextlib.suppress(OSError):
                self.egress.close()
        self._remove_dying()
        if self._cgroups is not None:
            self._cgroups.close()

    def _remove_dying(self) -> None:
        """Leaves whose last process was still dying are tried again."""
        self._dying = [leaf for leaf in self._dying if not leaf.remove()]

    def _for_cgroup(self, wanted: Limits) -> Limits:
        """RLIMIT_NPROC is the better cap for processes: it leaves verifiers out."""
        memory = wanted.memory_bytes if "memory" in self._by_cgroup else None
        processes = None if self._ground.rung.caps_processes else wanted.processes_max
        return replace(wanted, memory_bytes=memory, processes_max=processes)

    def _for_warden(self, wanted: Limits) -> Limits:
        memory = None if "memory" in self._by_cgroup else wanted.memory_bytes
        # A tmpfs bounds itself; of the others the warden watches the size.
        if self._ground.in_memory:
            return replace(wanted, memory_bytes=memory, storage_bytes=None, files_max=None)
        return replace(wanted, memory_bytes=memory)


def _without_cgroup(nice: int) -> str:
    """How CPUs are shared out then."""
    sessions = False
    with contextlib.suppress(OSError), open("/proc/sys/kernel/sched_autogroup_enabled", encoding="ascii") as enabled:
        sessions = enabled.read() == "1\n"
    what = "affinity and, by another session, the niceness" if nice and sessions else "affinity"
    return f"affinity and a niceness of {nice} (the episode may undo the {what})"
