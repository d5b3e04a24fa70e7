"""The steps by which a new process gets into an episode: its cgroup and CPUs, namespaces, ids, capabilities."""

import os
import struct
from collections.abc import Mapping, Sequence

from tbench2_env.isolation import capabilities
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.program import Program

#: Namespaces in the order in which they are joined, user last: the others need the outer namespace's rights. That of
#: processes is not among them: a process is born into it.
KINDS = {
    "mnt": sc.CLONE_NEWNS, "ipc": sc.CLONE_NEWIPC, "uts": sc.CLONE_NEWUTS, "net": sc.CLONE_NEWNET,
    "user": sc.CLONE_NEWUSER,
}  # fmt: skip

_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2  # linux/prctl.h


def take_place(program: Program, joins: Sequence[int], cpus: Sequence[int], nice: int) -> None:
    """What every process that is started in an episode does first of all, as the leader of a session."""
    if joins:
        itself = program.data(b"0")
        for fd in joins:
            program.call("write", fd, itself, 1, what="cannot join the episode's cgroup")
    if cpus:
        mask = sum(1 << cpu for cpu in cpus)
        size = (mask.bit_length() + 63) // 64 * 8
        # CPUs may have been taken from all of us since.
        program.call("sched_setaffinity", 0, size, program.data(mask.to_bytes(size, "little")), optional=True)
    if nice:
        program.call("setpriority", os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + nice, 19))
        _be_nice_as_session(program, nice)


def _be_nice_as_session(program: Program, nice: int) -> None:
    """With autogroups (sched(7)) it is the session that weighs as one process, whatever niceness its processes have,
    and has a niceness of its own; without CAP_SYS_ADMIN of the host that is set ten times a second at most, by all
    together. Before the namespaces are joined: it is the host's /proc that has the file."""
    program.write_file("/proc/self/autogroup", str(nice), optional=True)


def prefer_for_oom_killer(program: Program) -> None:
    """An episode is the first thing that the kernel's OOM killer takes, so that it never takes the trainer."""
    program.write_file("/proc/self/oom_score_adj", "1000")


def attach(program: Program, mount_fd: int, place: str) -> None:
    """Move a detached mount to its place."""
    target = program.text(place.encode(errors="surrogateescape"))
    empty = program.text(b"")
    program.call("move_mount", mount_fd, empty, sc.AT_FDCWD, target, sc.MOVE_MOUNT_F_EMPTY_PATH, what=f"mount {place}")


def join(program: Program, namespaces: Mapping[str, int]) -> None:
    """Namespaces are descriptors by kind; what is of no kind that is joined is left alone."""
    for name, kind in KINDS.items():
        if name in namespaces:
            program.call("setns", namespaces[name], kind, what=f"setns {name}")


def become(program: Program, uid: int, gid: int, groups: Sequence[int] | None) -> None:
    """Take on ids, and with them, unless they are root's, lose all capabilities.

    A single-id map may have setgroups denied (user_namespaces(7)), hence None for `groups`.
    """
    if groups is not None:
        program.call("setgroups", len(groups), program.data(struct.pack(f"{len(groups)}I", *groups)))
    program.call("setresgid", gid, gid, gid)
    program.call("setresuid", uid, uid, uid)


def confine(program: Program, kept: frozenset[int]) -> None:
    """Drop the capabilities that are not in `kept` from this process and all that it will ever execute."""
    for capability in sorted(capabilities.everything() - kept):
        program.call("prctl", sc.PR_CAPBSET_DROP, capability)
    _set_capabilities(program, kept, frozenset())


def keep_capabilities(program: Program, kept: frozenset[int]) -> None:
    """Leave a process with just these when it executes something, even if it is not root then (capabilities(7))."""
    _set_capabilities(program, kept, kept)
    for capability in sorted(kept):
        program.call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def _set_capabilities(program: Program, kept: frozenset[int], inheritable: frozenset[int]) -> None:
    words = [
        sum(1 << (c % 32) for c in those if c // 32 == half) for half in (0, 1) for those in (kept, kept, inheritable)
    ]
    # struct __user_cap_header_struct (own pid), __user_cap_data_struct[2]: effective, permitted, inheritable
    header, data = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), struct.pack("6I", *words)
    program.call("capset", program.data(header), program.data(data))
