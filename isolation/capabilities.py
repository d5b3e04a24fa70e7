"""Capabilities: what the root of an episode keeps where no user namespace confines it, and what we have ourselves."""

import struct

from tbench2_env.isolation import syscalls as sc

# linux/capability.h
SYS_ADMIN = 21
_SYS_PTRACE = 19
#: What docker leaves to root in a container, but without mknod (27): chown, dac_override, fowner, fsetid, kill, setgid,
#: setuid, setpcap, net_bind_service, net_raw, sys_chroot, audit_write, setfcap.
_CONTAINER = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31})
#: A verifier has one more than agents: nobody may trace a process that can do more than he can (ptrace(2)).
_VERIFIER = _CONTAINER | {_SYS_PTRACE}


def has(capability: int) -> bool:
    """Whether this process has it, in the user namespace that it is in."""
    with open("/proc/self/status", encoding="utf-8") as status:
        mask = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(mask, 16) >> capability & 1)


def confine_agent() -> None:
    """Drop what an agent's root may not have from this process and all that it will ever execute."""
    _keep(_CONTAINER)


def confine_verifier() -> None:
    _keep(_VERIFIER)


def _keep(kept: frozenset[int]) -> None:
    with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as last:
        everything = range(int(last.read()) + 1)
    for capability in set(everything) - kept:
        sc.prctl(sc.PR_CAPBSET_DROP, capability)
    low, high = (sum(1 << (c % 32) for c in kept if c // 32 == half) for half in (0, 1))
    # struct __user_cap_header_struct (version 3, own pid), __user_cap_data_struct[2]: effective, permitted, inheritable
    sc.capset(struct.pack("Ii", 0x2008_0522, 0), struct.pack("6I", low, low, 0, high, high, 0))
