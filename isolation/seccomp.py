"""A seccomp filter for agents' commands: resource limits of other processes may not be changed.

prlimit(2) asks for the same user only, not for a user namespace, so an agent could take a verifier's descriptors away:
in a test.sh, `[ -z "$(check)" ]` is then true. A process's own limits (pid 0) stay its own to change.
"""

import ctypes
import errno
import os
import struct

from tbench2_env.isolation import syscalls as sc

# machine -> ((AUDIT_ARCH_*, number of prlimit64), ...): the native ABI and the 32-bit one (linux/audit.h, unistd.h)
_PRLIMIT = {
    "x86_64": ((0xC000_003E, 302), (0x4000_0003, 340)),
    "aarch64": ((0xC000_00B7, 261), (0x4000_0028, 369)),
}
_X32_BIT = 0x4000_0000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16  # struct seccomp_data, little endian
# linux/bpf_common.h and linux/seccomp.h
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0000 | errno.EPERM
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def refuse_foreign_limits() -> None:
    """Install the filter on this process and all that it starts. Raises: OSError where the kernel has no seccomp."""
    program = _program(os.uname().machine)
    buffer = ctypes.create_string_buffer(program)
    # struct sock_fprog: length in instructions, pointer
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    sc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(head))


def _program(machine: str) -> bytes:
    """For each ABI: not this one, go on; not prlimit64, allow; another process's limits, refuse."""
    program = b""
    for arch, number in _PRLIMIT[machine]:
        program += (
            _instruction(_LOAD, _OFFSET_ARCH)
            + _instruction(_JUMP_IF_EQUAL, arch, if_not=7)
            + _instruction(_LOAD, _OFFSET_NUMBER)
            + _instruction(_AND, 0xFFFF_FFFF ^ _X32_BIT)
            + _instruction(_JUMP_IF_EQUAL, number, if_not=2)
            + _instruction(_LOAD, _OFFSET_FIRST_ARGUMENT)
            + _instruction(_JUMP_IF_EQUAL, 0, if_not=1)
            + _instruction(_RETURN, _ALLOW)
            + _instruction(_RETURN, _REFUSE)
        )
    return program + _instruction(_RETURN, _ALLOW)


def _instruction(code: int, value: int, *, if_not: int = 0) -> bytes:
    """struct sock_filter: code, instructions to skip if true and if not, operand."""
    return struct.pack("HBBI", code, 0, if_not, value)
