"""User namespaces: writing id maps, a namespace that only serves as an id map, taking on an id inside."""

import os
import signal

from tbench2_env.isolation import syscalls as sc


def write_maps(proc: str, pid: int, line: str) -> None:
    """Give the user namespace of process `pid`, seen in the procfs at `proc`, the same map for users and groups."""
    for name in ("uid_map", "gid_map"):
        _write(f"{proc}/{pid}/{name}", line)


def write_own_maps(uid: int, gid: int) -> None:
    """Make the one user we were before root of the user namespace just made (user_namespaces(7))."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1\n")
    _write("/proc/self/gid_map", f"0 {gid} 1\n")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        advice = sc.advice("id map", error.errno or 0)
        raise OSError(error.errno, f"write({path}, {text!r}): {error.strerror}{advice}") from None
    finally:
        os.close(fd)


def open_mapped(line: str) -> int:
    """A descriptor of a new user namespace with the map `line`, for idmapped mounts; no process stays in it."""
    pid, pidfd = sc.clone(sc.CLONE_NEWUSER)
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        write_maps("/proc", pid, line)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(pid, 0)
