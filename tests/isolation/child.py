"""Tests that change their process (namespaces, ids, signals, working directory) and so run in one of their own."""

import contextlib
import ctypes
import functools
import os
import signal
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import userns

P = ParamSpec("P")
_TIMEOUT_S = 20


def in_own_process(test: Callable[P, None]) -> Callable[P, None]:
    """Run the test in a fork; a failure there fails it here, with the traceback."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_TIMEOUT_S)
            try:
                test(*args, **kwargs)
            except BaseException:
                os.write(write_end, traceback.format_exc().encode())
                os._exit(1)
            os._exit(0)
        os.close(write_end)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):  # what the test left behind
            os.killpg(pid, signal.SIGKILL)
        with open(read_end, "rb") as pipe:
            report = pipe.read().decode()
        assert status == 0, report or f"the test's process ended with status {os.waitstatus_to_exitcode(status)}"

    return run


def as_root(test: Callable[P, None]) -> Callable[P, None]:
    """Like `in_own_process`; one who is not root first becomes root of a user namespace with mounts of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.geteuid() != 0:
            own_user_namespace(sc.CLONE_NEWNS)
        test(*args, **kwargs)

    return in_own_process(run)


def own_mounts() -> None:
    """A mount namespace whose mounts nobody else sees."""
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)


def drop_capabilities() -> None:
    """All of them, for good; the ids stay, since a container may fake changes of those."""
    head = struct.pack("Ii", 0x2008_0522, 0)  # linux/capability.h: version 3, this process
    assert ctypes.CDLL(None).capset(head, bytes(24)) == 0


def own_user_namespace(more: int = 0) -> None:
    """Become root of a user namespace with a single id, as in an unprivileged container."""
    uid = os.geteuid()
    sc.unshare(sc.CLONE_NEWUSER | more)
    Path("/proc/self/setgroups").write_text("deny")
    userns.write_maps("/proc", os.getpid(), f"0 {uid} 1\n")


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []
