"""Processes of an episode, from outside its PID namespace: forked into it, found and killed through its /proc."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable

#: Rounds of "find and stop" before the kill. Stopped processes do not fork, so two or three are enough for anything
#: but a fork bomb.
_ROUNDS = 20
_PF_EXITING = 0x4  # linux/sched.h; flags are field 9 of proc_pid_stat(5)
_THREADS = 17  # num_threads, field 20 there
_NS_GET_PARENT = 0xB702  # linux/nsfs.h, ioctl_ns(2)


def send(proc: int, pid: int, number: int) -> None:
    """Signal process `pid` of the procfs open at `proc`; one that is gone or out of our reach is no error.

    A descriptor of /proc/PID works as a pidfd (pidfd_send_signal(2)), and names the process whatever the caller's
    own numbering is.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        fd = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def kill_tree(proc: int, root: int) -> None:
    """Kill process `root` and everything below it, escaped sessions and double forks too (it is their subreaper).

    The root is stopped first and killed last: while it lives, orphans of its tree stay in its tree.
    """
    send(proc, root, signal.SIGSTOP)
    kill_below(proc, root)
    send(proc, root, signal.SIGKILL)


def kill_below(proc: int, root: int) -> None:
    """Kill everything below process `root`, a subreaper that forks nothing meanwhile."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = descendants(proc, root) - stopped
        for pid in fresh:
            send(proc, pid, signal.SIGSTOP)
        if not fresh:
            break
        stopped |= fresh
    for pid in stopped:
        send(proc, pid, signal.SIGKILL)


def kill_where(proc: int, wanted: Callable[[int], bool]) -> None:
    """Kill every process of the episode but PID 1 for which `wanted(pid)` holds, until none is left."""
    for _ in range(_ROUNDS):
        found = [pid for pid in _pids(proc) if pid != 1 and not _is_zombie(proc, pid) and wanted(pid)]
        for pid in found:
            send(proc, pid, signal.SIGKILL)
        if not found:
            break


def in_user_namespace(proc: int, inode: int, but_not: int) -> Callable[[int], bool]:
    """A test for `kill_where`: does the process live in the user namespace `inode` or below, but not in `but_not`?

    A process that is still on its way in, from outside both, is left alone.
    """

    def wanted(pid: int) -> bool:
        with contextlib.suppress(OSError):
            fd = os.open(f"{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            inodes = _with_parents(fd)
            return inode in inodes and but_not not in inodes
        return False

    return wanted


def in_other_mount_namespace(proc: int, agents: int) -> Callable[[int], bool]:
    """A test for `kill_where`: has the process a mount namespace other than `agents`?

    A process that is still on its way in has ours, and is left alone.
    """
    ours = os.stat("/proc/self/ns/mnt").st_ino

    def wanted(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(f"{pid}/ns/mnt", dir_fd=proc).st_ino not in (agents, ours)
        return False

    return wanted


def _with_parents(user_namespace: int) -> list[int]:
    """Inodes of a user namespace and of those above it, as far as the caller may see. Closes the descriptor."""
    inodes = []
    while user_namespace >= 0:
        inodes.append(os.fstat(user_namespace).st_ino)
        try:
            parent = fcntl.ioctl(user_namespace, _NS_GET_PARENT)
        except OSError:  # EPERM: the parent is not below the caller's own
            parent = -1
        os.close(user_namespace)
        user_namespace = parent
    return inodes


def inner_pid(pid: int) -> int:
    """The number of host process `pid` in its innermost PID namespace. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    raise ProcessLookupError(pid)


def is_exiting(pid: int) -> bool:
    """Whether our child `pid` is on its way out, as a PID 1 is while it takes its namespace's processes along."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def _pids(proc: int) -> list[int]:
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def _stat(proc: int, pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc_pid_stat(5)); empty when the process is gone."""
    try:
        fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(fd, 4096).decode(errors="replace").rpartition(")")[2].split()
        finally:
            os.close(fd)
    except OSError:
        return []


def _is_zombie(proc: int, pid: int) -> bool:
    return _stat(proc, pid)[:1] in ([], ["Z"], ["X"])


def descendants(proc: int, root: int) -> set[int]:
    """The live processes below `root`."""
    children: dict[int, list[int]] = {}
    for pid in _pids(proc):
        fields = _stat(proc, pid)
        # A process whose first thread ended before the others looks like a zombie.
        if fields and (fields[0] not in "ZX" or int(fields[_THREADS]) > 1):
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        below = [pid for pid in children.get(queue.pop(), []) if pid not in found]
        found.update(below)
        queue.extend(below)
    return found
