"""What the kernel itself can hold an episode to: one cgroup leaf per episode where cgroups are ours, else CPU affinity.

Leaves lie in the cgroup that the server runs in, named after the server: OWN/episode.tbench2-XXXX.NAME, in the one
tree of version 2 or in each hierarchy of version 1. They are beside the server's OWN/tbench2-XXXX, not in it: the
kernel shares out the CPU level by level, and all that is in one folder weighs as one process, however many episodes
that is. Processes of an episode have different parents, so each joins on its own, first of all, by writing b"0" to the
leaf's `join_fds`; the kernel asks whether their opener was allowed to.

A leaf that is full of memory loses a process to the kernel's OOM killer; the episode lives on. The peak of its memory
includes the page cache, and what it wrote to a scratch folder on tmpfs.
"""

import contextlib
import errno
import fcntl
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tbench2_env.isolation.spec import Limits

PREFIX = "tbench2-"
#: What makes having a leaf worth it; cpuacct and the like come along where they are.
CONTROLS = ("memory", "pids", "cpu")
_V1_CONTROLLERS = (*CONTROLS, "cpuacct")
#: What a niceness of 0 to 19 weighs (sched_prio_to_weight in the kernel): cpu.shares of version 1.
_WEIGHTS = (1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15)
_CPU_PERIOD_US = 100_000
_CPU_QUOTA_MIN_US = 1_000
#: By version: what a process that has one thread joins a leaf by. In version 1, writing b"0" to `cgroup.procs` takes a
#: lock for which the kernel waits an RCU grace period, 10 ms on an idle machine; for the calling thread alone, it does
#: without (kernel/cgroup/cgroup.c, cgroup_procs_write_start).
_JOIN = {1: "tasks", 2: "cgroup.procs"}
_SUBTREE = "cgroup.subtree_control"


@dataclass(frozen=True)
class Hierarchy:
    """The cgroup that we live in, as a folder, in one mounted hierarchy of version 1 or 2, and its controllers."""

    version: int
    controllers: frozenset[str]
    own: str


def hierarchies(cgroup: str, mountinfo: str) -> list[Hierarchy]:
    """What is mounted here, from the texts of /proc/self/cgroup and /proc/self/mountinfo (cgroups(7), proc(5)).

    Version 2 first: a controller is in one hierarchy only, and version 1 can say more about why it refuses.
    """
    own: dict[frozenset[str], str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        own[frozenset(names.split(",")) - {""}] = path
    found = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        fstype, _, options = after.split(maxsplit=2)
        for controllers, path in own.items():
            version = 1 if controllers else 2
            mounted = fstype == ("cgroup" if controllers else "cgroup2") and controllers <= set(options.split(","))
            folder = _below(mount_point, root, path)
            if mounted and folder is not None:
                found[controllers] = Hierarchy(version, controllers, folder)
    return sorted(found.values(), key=lambda hierarchy: hierarchy.version, reverse=True)


def _below(mount_point: str, root: str, path: str) -> str | None:
    """Where the cgroup `path` is seen when the cgroup `root` is mounted; None when it is not below it."""
    relative = os.path.relpath(path, root)
    return None if relative.startswith("..") else os.path.normpath(f"{mount_point}/{relative}")


class Leaf:
    """The cgroup of one episode: a folder in each hierarchy. `join_fds` are close-on-exec and end with `remove`."""

    def __init__(self, folders: dict[str, Hierarchy]) -> None:
        self._folders = folders
        self.join_fds: list[int] = []

    def make(self, limits: Limits, nice: int = 0) -> None:
        """Raises: OSError; what was made is for `remove`."""
        for folder, hierarchy in self._folders.items():
            os.mkdir(folder)
            for file, value in _settings(limits, nice, hierarchy):
                _write_setting(f"{folder}/{file}", value)
            self.join_fds.append(os.open(f"{folder}/{_JOIN[hierarchy.version]}", os.O_WRONLY | os.O_CLOEXEC))

    @property
    def verifier_join_fds(self) -> list[int]:
        """Those of `join_fds` for a verifier, which must be able to fork where a bomb has filled the leaf.

        In version 2 memory and processes are counted together, so there it shares all of them.
        """
        return [
            fd
            for fd, hierarchy in zip(self.join_fds, self._folders.values(), strict=False)
            if hierarchy.version == 2 or "pids" not in hierarchy.controllers
        ]

    def hits(self) -> dict[str, int]:
        """How often a limit was met: processes killed for want of memory, forks refused."""
        return {
            "memory": self._field("memory.events", "oom_kill") or self._field("memory.oom_control", "oom_kill") or 0,
            "processes": self._field("pids.events", "max") or 0,
        }

    def usage(self) -> dict[str, float]:
        """memory_peak_bytes, cpu_s, processes_peak (threads included): those that the kernel knows here."""
        found: dict[str, float | None] = {
            "memory_peak_bytes": self._number("memory.peak") or self._number("memory.max_usage_in_bytes"),
            "cpu_s": self._cpu_s(),
            "processes_peak": self._number("pids.peak"),
        }
        return {key: value for key, value in found.items() if value is not None}

    def _cpu_s(self) -> float | None:
        if (nanoseconds := self._number("cpuacct.usage")) is not None:
            return nanoseconds / 1e9
        microseconds = self._field("cpu.stat", "usage_usec")
        return None if microseconds is None else microseconds / 1e6

    def remove(self) -> bool:
        """Whether it is gone; a leaf with a process in it is not, so ask again once that has ended."""
        for fd in self.join_fds:
            os.close(fd)
        self.join_fds = []
        return all(_rmdir(folder) for folder in self._folders)

    def _read(self, file: str) -> str:
        controller = file.partition(".")[0]
        for folder, hierarchy in self._folders.items():
            if hierarchy.version == 2 or controller in hierarchy.controllers:
                with contextlib.suppress(OSError):
                    return _read(f"{folder}/{file}")
        return ""

    def _number(self, file: str) -> int | None:
        text = self._read(file).strip()
        return int(text) if text.isdigit() else None

    def _field(self, file: str, key: str) -> int | None:
        fields = dict(line.split() for line in self._read(file).splitlines())
        return int(fields[key]) if key in fields else None


class Cgroups:
    """This server's folder in each usable hierarchy, locked while the server lives. `controls`: subset of CONTROLS.

    `nice`: each episode weighs as one process of that niceness, whatever its own are among themselves.
    """

    def __init__(self, server: str, nice: int) -> None:
        self._server, self._nice = server, nice
        self._locks: dict[Hierarchy, int] = {}
        #: What a leaf's `usage` knows here.
        self.counted: frozenset[str] = frozenset()

    @classmethod
    def find(cls, server: str, nice: int = 0) -> tuple[Self | None, str]:
        """Claim a folder named `server` (tbench2-XXXX) wherever that works, proven by a leaf made and removed.

        Answers with None when nothing does; the text says, for each of CONTROLS that is missing, why.
        """
        self = cls(server, nice)
        mounted = hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
        refusals = {}
        for hierarchy in mounted:
            if not hierarchy.controllers.isdisjoint(_V1_CONTROLLERS) or hierarchy.version == 2:
                refusals.update(self._try(hierarchy))
        reasons = [
            f"no cgroup limits {control}: {refusals.get(control, 'its controller is mounted nowhere')}"
            for control in CONTROLS
            if control not in self.controls
        ]
        if not self.controls:
            self.close()
        return self if self.controls else None, "; ".join(reasons)

    @property
    def controls(self) -> frozenset[str]:
        """Which limits a leaf enforces."""
        return frozenset(control for one in self._locks for control in one.controllers if control in CONTROLS)

    def _try(self, hierarchy: Hierarchy) -> dict[str, str]:
        """Claim the folder in one hierarchy; answers with the controllers that it does not give, and why."""
        wanted = hierarchy.controllers if hierarchy.version == 1 else frozenset(CONTROLS)
        try:
            usable = hierarchy if hierarchy.version == 1 else delegated(hierarchy.own, wanted)
            _sweep(usable.own)
            self._locks[usable] = _claim(f"{usable.own}/{self._server}")
        except OSError as error:
            return dict.fromkeys(wanted, f"{error.filename}: {error.strerror}")
        try:
            self._prove(usable)
        except OSError as error:
            self._release(usable)
            return dict.fromkeys(wanted, f"{error.filename}: {error.strerror}")
        return dict.fromkeys(wanted - usable.controllers, f"{usable.own} was not given its controller")

    def _prove(self, hierarchy: Hierarchy) -> None:
        """A process of ours really joins a leaf. Raises: OSError."""
        leaf = self._leaf("trial", [hierarchy], Limits())
        pid = os.fork()
        if pid == 0:
            number = 1
            try:
                number = join(leaf.join_fds)
            finally:
                os._exit(number)
        number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.counted |= leaf.usage().keys()
        leaf.remove()
        if number:
            raise OSError(number, f"a process cannot join it: {os.strerror(number)}", f"{hierarchy.own}/{self._server}")

    def create(self, name: str, limits: Limits) -> Leaf:
        """A leaf for the episode `name`. Raises: OSError; nothing is left then."""
        return self._leaf(name, self._locks, limits)

    def _leaf(self, name: str, where: Iterable[Hierarchy], limits: Limits) -> Leaf:
        leaf = Leaf({f"{one.own}/episode.{self._server}.{name}": one for one in where})
        try:
            leaf.make(limits, self._nice)
        except OSError:
            leaf.remove()
            raise
        return leaf

    def close(self) -> None:
        """Remove what is empty. A leaf whose process dies slowly is left for the next server's `find`."""
        for hierarchy in list(self._locks):
            self._release(hierarchy)

    def _release(self, hierarchy: Hierarchy) -> None:
        _remove_all(Path(hierarchy.own, self._server))
        os.close(self._locks.pop(hierarchy))


def join(fds: Iterable[int]) -> int:
    """Move this process into the leaf whose `join_fds` these are; 0 or the first error's number."""
    try:
        for fd in fds:
            os.write(fd, b"0")
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def delegated(own: str, wanted: frozenset[str]) -> Hierarchy:
    """Our cgroup of version 2, once it hands down those controllers of `wanted` that it has.

    Raises: OSError with the reason, as when processes live in it (cgroup_v2, "No Internal Process Constraint").
    """
    controllers = wanted & set(Path(own, "cgroup.controllers").read_text().split())
    if not controllers:
        raise OSError(errno.ENOTSUP, f"it was given none of {', '.join(sorted(wanted))}", own)
    _enable(own, controllers)
    return Hierarchy(2, controllers, own)


def _enable(folder: str, controllers: Iterable[str]) -> None:
    file = f"{folder}/{_SUBTREE}"
    try:
        _write(file, " ".join(f"+{controller}" for controller in sorted(controllers)))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        advice = "processes live in it, the server's among them: start the server in a cgroup below it, alone"
        raise OSError(errno.EBUSY, f"cannot hand down controllers, for {advice}", file) from None


def _settings(limits: Limits, nice: int, hierarchy: Hierarchy) -> list[tuple[str, str]]:
    """Files of a leaf and what to write to them, in this order."""
    memory, processes, cpus = limits.memory_bytes, limits.processes_max, limits.cpus
    settings = []
    if nice and "cpu" in hierarchy.controllers:
        weight = ("cpu.weight.nice", nice) if hierarchy.version == 2 else ("cpu.shares", _WEIGHTS[nice])
        settings.append((weight[0], str(weight[1])))
    if memory is not None and "memory" in hierarchy.controllers:
        if hierarchy.version == 2:
            settings += [("memory.max", str(memory)), ("memory.swap.max", "0")]
        else:
            settings += [("memory.limit_in_bytes", str(memory)), ("memory.memsw.limit_in_bytes", str(memory))]
    if processes is not None and "pids" in hierarchy.controllers:
        settings.append(("pids.max", str(processes)))
    if cpus is not None and "cpu" in hierarchy.controllers:
        quota = max(_CPU_QUOTA_MIN_US, round(cpus * _CPU_PERIOD_US))
        if hierarchy.version == 2:
            settings.append(("cpu.max", f"{quota} {_CPU_PERIOD_US}"))
        else:
            settings += [("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    return settings


def _write_setting(file: str, value: str) -> None:
    try:
        _write(file, value)
    except OSError as error:
        no_swap = error.errno == errno.ENOENT and "sw" in os.path.basename(file)
        # Version 1 refuses a quota above that of the cgroup we live in, which then is the one that holds.
        outer_holds = error.errno == errno.EINVAL and file.endswith("cpu.cfs_quota_us")
        if not no_swap and not outer_holds:
            raise


def _read(file: str) -> str:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode()
    finally:
        os.close(fd)


def _write(file: str, value: str) -> None:
    """The file must exist: in a cgroup, a file that is missing cannot be created (EACCES)."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), file) from None
    finally:
        os.close(fd)


# ---------------------------------------------------------------- whose folder it is
def _claim(folder: str) -> int:
    """Make a server's folder and lock it. Raises: OSError."""
    while True:
        os.mkdir(folder, 0o755)
        with contextlib.suppress(FileNotFoundError):  # a neighbour swept it before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(folder):
                return lock
            os.close(lock)


def _sweep(own: str) -> None:
    """Remove the folders of servers that are gone; a live neighbour holds the lock of its folder."""
    for entry in Path(own).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            lock = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_all(entry)
            finally:
                os.close(lock)


def _remove_all(server: Path) -> None:
    """A server's leaves, as far as no process is in them, and its folder, by which a later sweep finds the others."""
    left = [leaf for leaf in server.parent.glob(f"episode.{server.name}.*") if not _rmdir(str(leaf))]
    if not left:
        _rmdir(str(server))


def _rmdir(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:  # EBUSY: a process is in it
        return False
    return True


# ---------------------------------------------------------------- where no cgroup has cpu
class Affinity:
    """Gives episodes CPUs of their own as far as there are any, by sched_setaffinity."""

    def __init__(self) -> None:
        self._episodes = Counter(dict.fromkeys(sorted(os.sched_getaffinity(0)), 0))

    def choose(self, cpus: float) -> set[int]:
        """The ceil(cpus) CPUs that the fewest live episodes use; all of them when there are not so many."""
        count = max(1, math.ceil(cpus))
        chosen = set(sorted(self._episodes, key=lambda cpu: (self._episodes[cpu], cpu))[:count])
        self._episodes.update(chosen)
        return chosen

    def release(self, chosen: Iterable[int]) -> None:
        self._episodes.subtract(chosen)
