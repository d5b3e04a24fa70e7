"""What one episode may use: task.toml's needs as limits, with floors, and what is said where a limit was met."""

import os
import re

from tbench2_env.isolation.spec import Host, Limits
from tbench2_env.server.taskconfig import EnvironmentTable, TaskError

#: Processes and threads of one episode: enough for a wide build, too few for a fork bomb to hurt. What hurts is their
#: number per CPU: on two, a neighbour's command took 0.7 s beside a bomb of 1,024, and 5 to 10 s beside one of 4,096,
#: with and without cgroups.
PROCESSES_MAX = min(4096, max(1024, 512 * len(os.sched_getaffinity(0))))
_MIB = 1 << 20
#: Less than this no task can mean: a shell, an interpreter and a test run need it.
_MEMORY_FLOOR_BYTES, _STORAGE_FLOOR_BYTES, _CPUS_FLOOR = 256 * _MIB, 256 * _MIB, 0.5
#: As many bytes for each file as ext4 reckons with when it is made (mke2fs.conf, inode_ratio).
_BYTES_PER_FILE = 16 << 10
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


def of_task(wanted: EnvironmentTable, *, enforced: bool) -> Limits:
    """The limits of a task's episodes. Processes are bounded whatever the task says, and with TB2_LIMITS=off.

    Raises: TaskError naming the key that is no size.
    """
    if not enforced:
        return Limits(processes_max=PROCESSES_MAX)
    memory = _bytes("memory", wanted.memory, wanted.memory_mb)
    storage = _bytes("storage", wanted.storage, wanted.storage_mb)
    storage = None if storage is None else max(storage, _STORAGE_FLOOR_BYTES)
    return Limits(
        memory_bytes=None if memory is None else max(memory, _MEMORY_FLOOR_BYTES),
        storage_bytes=storage,
        files_max=None if storage is None else storage // _BYTES_PER_FILE,
        processes_max=PROCESSES_MAX,
        cpus=None if wanted.cpus is None else max(wanted.cpus, _CPUS_FLOOR),
    )


def describe(limits: Limits, host: Host) -> dict[str, dict[str, object]]:
    """`info.isolation.limits`: each limit with how it is enforced here; those that there are."""
    values = {
        "memory": ("bytes", limits.memory_bytes),
        "storage": ("bytes", limits.storage_bytes),
        "processes": ("max", limits.processes_max),
        "cpus": ("max", limits.cpus),
    }
    return {
        name: {unit: value, "enforced_by": host.enforcement[name]}
        for name, (unit, value) in values.items()
        if value is not None
    }


def _bytes(key: str, size: str | None, mebibytes: int | None) -> int | None:
    """As docker reads sizes: K, M, G and T are powers of 1024."""
    if mebibytes is not None:
        return mebibytes * _MIB
    if size is None:
        return None
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise TaskError(f"task.toml: environment.{key} = {size!r} is no size: write it as 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
