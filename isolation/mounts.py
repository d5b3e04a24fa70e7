"""Mount plans: what an episode's mount namespace holds, as data that can be built, described and applied.

Targets are paths inside the episode, applied below a prefix where its root is mounted for the time being. It is PID 1
that carries a plan out: each operation adds its steps to a program.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.program import Program, Step
from tbench2_env.isolation.spec import Limits, Rung

_NO_DEV = sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC


def mount(program: Program, source: str, target: str, fstype: str = "", flags: int = 0, options: str = "") -> Step:
    """Add a mount(2)."""
    addresses = [program.text(text.encode()) for text in (source, target, fstype, options)]
    if not fstype:
        addresses[2] = 0
    what = f"mount({source}, {target}, {fstype or 'bind'}, 0x{flags:x}, {options!r})"
    return program.call("mount", *addresses[:3], flags, addresses[3] if options else 0, what=what)


@dataclass(frozen=True)
class Filesystem:
    """A new filesystem of `fstype` on `target`."""

    fstype: str
    target: str
    options: str = ""
    flags: int = sc.MS_NOSUID | sc.MS_NODEV

    def add(self, program: Program, prefix: str) -> None:
        mount(program, self.fstype, prefix + self.target, self.fstype, self.flags, self.options)

    def describe(self) -> str:
        return f"{self.fstype} on {self.target}" + (f" ({self.options})" if self.options else "")


@dataclass(frozen=True)
class ReadOnly:
    """A path of the episode bound on itself and made read-only."""

    target: str

    def add(self, program: Program, prefix: str) -> None:
        target = prefix + self.target
        mount(program, target, target, flags=sc.MS_BIND)
        mount(program, "", target, flags=sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | _NO_DEV)

    def describe(self) -> str:
        return f"read-only {self.target}"


@dataclass(frozen=True)
class Pin:
    """A folder bound on itself: whoever owns the worktree can then neither remove nor rename it."""

    target: str

    def add(self, program: Program, prefix: str) -> None:
        mount(program, prefix + self.target, prefix + self.target, flags=sc.MS_BIND)

    def describe(self) -> str:
        return f"pin {self.target}"


@dataclass(frozen=True)
class Node:
    """A device of the host's /dev, bound on a new empty file."""

    name: str

    def add(self, program: Program, prefix: str) -> None:
        target = f"{prefix}/dev/{self.name}"
        path = program.text(target.encode())
        program.call("mknodat", sc.AT_FDCWD, path, stat.S_IFREG | 0o666, 0, what=f"mknod({target})")
        mount(program, f"/dev/{self.name}", target, flags=sc.MS_BIND)

    def describe(self) -> str:
        return f"device /dev/{self.name}"


@dataclass(frozen=True)
class Link:
    """A symbolic link at `target`."""

    text: str
    target: str

    def add(self, program: Program, prefix: str) -> None:
        text, target = (program.text(path.encode()) for path in (self.text, prefix + self.target))
        program.call("symlinkat", text, sc.AT_FDCWD, target, what=f"symlink({prefix}{self.target})")

    def describe(self) -> str:
        return f"{self.target} -> {self.text}"


@dataclass(frozen=True)
class Folder:
    target: str
    mode: int = 0o755

    def add(self, program: Program, prefix: str) -> None:
        target = program.text((prefix + self.target).encode())
        program.call("mkdirat", sc.AT_FDCWD, target, 0o777, what=f"mkdir({prefix}{self.target})")
        program.call("fchmodat", sc.AT_FDCWD, target, self.mode, what=f"chmod({prefix}{self.target})")

    def describe(self) -> str:
        return f"folder {self.target} {self.mode:o}"


@dataclass(frozen=True)
class Sysctl:
    """A value under /proc/sys, of the namespaces that we are in."""

    name: str
    value: str

    def add(self, program: Program, prefix: str) -> None:
        program.write_file(f"{prefix}/proc/sys/{self.name}", self.value)

    def describe(self) -> str:
        return f"sysctl {self.name.replace('/', '.')} = {self.value}"


Operation = Filesystem | ReadOnly | Pin | Node | Link | Folder | Sysctl

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEV: tuple[Operation, ...] = (
    Filesystem("tmpfs", "/dev", "mode=755,size=1m,nr_inodes=1k", sc.MS_NOSUID),
    *(Node(name) for name in _DEVICES),
    Link("/proc/self/fd", "/dev/fd"),
    Link("/proc/self/fd/0", "/dev/stdin"),
    Link("/proc/self/fd/1", "/dev/stdout"),
    Link("/proc/self/fd/2", "/dev/stderr"),
    Link("pts/ptmx", "/dev/ptmx"),
    Folder("/dev/shm"),
    Folder("/dev/pts"),
)
# /tests and those in /logs are mount points even while no verifier runs: without these pins the agent's `rmdir /tests`
# detached the verifier's own mount, and a forged reward was read.
_PINS: tuple[Operation, ...] = (
    Pin("/logs"),
    Filesystem("tmpfs", "/tests", "mode=755,size=4k,nr_inodes=2", _NO_DEV | sc.MS_RDONLY),
    Filesystem("tmpfs", "/logs/verifier", "mode=755,size=4k,nr_inodes=2", _NO_DEV | sc.MS_RDONLY),
    Filesystem("tmpfs", "/logs/toolchain", "mode=755,size=4k,nr_inodes=2", _NO_DEV | sc.MS_RDONLY),
)
# Where root inside is root outside, these files of /proc would change the host, or tell of it. As docker has it.
_PROC_OF_HOST_ROOT = tuple(f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi"))
#: Bytes of /dev/shm where the task says nothing of memory.
_SHM_BYTES = 1 << 30


def sandbox_plan(rung: Rung, shm_bytes: int, *, host_network: bool) -> tuple[Operation, ...]:
    """What is mounted over a worktree before it becomes an episode's root."""
    # Terminals belong to group tty (5), which only a range of ids has.
    devpts = "newinstance,ptmxmode=0666,mode=0620" + (",gid=5" if rung.has_id_range else "")
    guards = _PROC_OF_HOST_ROOT if rung.protect_proc_sys else ()
    return (
        Filesystem("proc", "/proc", flags=_NO_DEV),
        *(() if host_network else _sysctls(rung)),
        *(ReadOnly(path) for path in guards if os.path.exists(path)),
        *_DEV,
        Filesystem("tmpfs", "/dev/shm", f"mode=1777,size={shm_bytes}"),
        Filesystem("devpts", "/dev/pts", devpts, sc.MS_NOSUID | sc.MS_NOEXEC),
        *_PINS,
    )


def shm_bytes(limits: Limits) -> int:
    """Of /dev/shm."""
    return _SHM_BYTES if limits.memory_bytes is None else limits.memory_bytes // 2


def _sysctls(rung: Rung) -> tuple[Operation, ...]:
    """Agents have no rights over their network namespace, but may serve on every port and ping, as in docker."""
    groups = f"0 {rung.id_map[2] - 1}"
    return Sysctl("net/ipv4/ip_unprivileged_port_start", "0"), Sysctl("net/ipv4/ping_group_range", groups)


def apply(program: Program, plan: Iterable[Operation], prefix: str) -> None:
    """Have the program carry the plan out below `prefix`; a failure names the call and the paths."""
    for operation in plan:
        operation.add(program, prefix)


def describe(plan: Iterable[Operation]) -> list[str]:
    return [operation.describe() for operation in plan]
