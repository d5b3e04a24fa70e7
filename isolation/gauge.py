"""What an episode's processes use, read from outside through a descriptor of the episode's own /proc.

Any process may vanish between two calls: it then counts as using nothing.
"""

import contextlib
import os
from collections.abc import Iterable

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: How many names of an episode's processes are told.
NAMES_MAX = 64
#: PID 1 sleeps: it uses nothing.
_PAUSE = "1"


class Gauge:
    """Reads one episode. Not seen are memory that is mapped nowhere (memfds, detached System V segments, pipes) and
    the CPU time of processes that nobody waited for."""

    def __init__(self, proc: int) -> None:
        """`proc` stays the caller's. Raises: OSError when the episode is gone."""
        # Of our own: whoever shares an open folder shares its position, and would miss entries while we list it.
        self._proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        self._shm = -1
        with contextlib.suppress(OSError):
            self._shm = os.open("1/root/dev/shm", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)

    def close(self) -> None:
        for fd in (self._proc, self._shm):
            if fd >= 0:
                os.close(fd)

    def pids(self) -> list[str]:
        """Processes other than PID 1, in the episode's numbering; none once the episode is dead."""
        try:
            return [name for name in os.listdir(self._proc) if name.isdigit() and name != _PAUSE]
        except OSError:
            return []

    def names(self, most: int) -> list[str]:
        """Names of processes other than PID 1, the first `most` of them by number; zombies are none."""
        names: list[str] = []
        for pid in sorted(self.pids(), key=int):
            name, _, fields = self._read(f"{pid}/stat").partition("(")[2].rpartition(")")
            if fields and fields.split()[0] not in "ZX":
                names.append(name)
            if len(names) == most:
                break
        return names

    def tasks(self, pids: Iterable[str]) -> int:
        """How many processes and threads: what the kernel counts for RLIMIT_NPROC and pids.max, PID 1 included."""
        count = 1
        for pid in pids:
            with contextlib.suppress(OSError):
                # A folder's links are itself, its own "." and one for each thread; read without opening anything.
                count += os.stat(f"{pid}/task", dir_fd=self._proc).st_nlink - 2
        return count

    def resident(self, pids: Iterable[str]) -> dict[str, int]:
        """Resident bytes of each process; pages that processes share are counted for each of them."""
        return {pid: int(fields[1]) * _PAGE for pid in pids if len(fields := self._read(f"{pid}/statm").split()) > 1}

    def proportional(self, pid: str) -> tuple[int, int]:
        """Resident bytes of a process, shared pages divided by their sharers: of shared memory, and all the others."""
        fields = dict(line.split()[:2] for line in self._read(f"{pid}/smaps_rollup").splitlines()[1:])
        shared = int(fields.get("Pss_Shmem:", 0)) * 1024
        return shared, int(fields.get("Pss:", 0)) * 1024 - shared

    def shared_memory(self) -> int:
        """Bytes in the episode's /dev/shm, mapped or not."""
        if self._shm < 0:
            return 0
        info = os.statvfs(self._shm)
        return (info.f_blocks - info.f_bfree) * info.f_frsize

    def cpu_s(self) -> float:
        """Seconds of CPU of the live processes, and of the children that they have waited for."""
        ticks = 0
        for pid in self.pids():
            fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime: proc_pid_stat(5)
        return ticks / _TICKS_PER_S

    def _read(self, path: str) -> str:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                return os.read(fd, 4096).decode(errors="replace")
            finally:
                os.close(fd)
        return ""
