"""Capabilities: what the root of an episode keeps where no user namespace confines it, and what we have ourselves."""

import functools

# linux/capability.h
DAC_OVERRIDE, SETGID, SETUID, NET_ADMIN, SYS_ADMIN, SETFCAP = 1, 6, 7, 12, 21, 31
_SYS_PTRACE = 19
#: What docker leaves to root in a container, but without mknod (27): chown, dac_override, fowner, fsetid, kill, setgid,
#: setuid, setpcap, net_bind_service, net_raw, sys_chroot, audit_write, setfcap.
CONTAINER = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31})
#: A verifier has one more than agents: nobody may trace a process that can do more than he can (ptrace(2)).
VERIFIER = CONTAINER | {_SYS_PTRACE}


def has(capability: int) -> bool:
    """Whether this process has it, in the user namespace that it is in."""
    with open("/proc/self/status", encoding="utf-8") as status:
        mask = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(mask, 16) >> capability & 1)


@functools.cache
def everything() -> frozenset[int]:
    """All that this kernel knows."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as last:
        return frozenset(range(int(last.read()) + 1))
