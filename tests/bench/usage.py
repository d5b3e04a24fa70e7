"""What processes and the kernel use, from /proc. CPU in seconds, memory in bytes."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: utime, stime, cutime and cstime in /proc/PID/stat, counted from behind the command's name; proc(5).
_TIMES = slice(11, 15)


def cpu_s(pid: int) -> tuple[float, float]:
    """Of the process itself, and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_TIMES]
    user, system, of_children, system_of_children = (int(field) / _TICKS_PER_S for field in fields)
    return user + system, of_children + system_of_children


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size: a page that several processes share counts once in all."""
    return sum(_kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids)


def peak_rss_bytes(pid: int) -> int:
    """The most since `forget_peak`."""
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def slab_bytes() -> int:
    return _kilobytes(Path("/proc/meminfo"), "Slab:")


def _kilobytes(path: Path, key: str) -> int:
    return next(int(line.split()[1]) << 10 for line in path.read_text().splitlines() if line.startswith(key))


def disk_bytes(folder: Path) -> int:
    """Blocks of everything below, each inode once."""
    seen: dict[tuple[int, int], int] = {}
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # what was thrown away may just be deleted
                status = os.lstat(Path(where, name))
                seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
