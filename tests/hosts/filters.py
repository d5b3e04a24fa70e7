"""Seccomp filters that imitate what nodes do to system calls: enroot's faked ids, user namespaces switched off.

They look at the native ABI only, as enroot's own does.
"""

import ctypes
import errno
import fcntl
import os
import select
import struct
from collections.abc import Iterable

from tbench2_env.isolation import syscalls as sc

# machine -> (AUDIT_ARCH_*, numbers), from linux/audit.h and asm/unistd.h
_NATIVE = {
    "x86_64": (
        0xC000_003E,
        {"seccomp": 317, "clone": 56, "unshare": 272},
        # chown, fchown, lchown, fchownat, set{uid,gid,reuid,regid}, setgroups, set{resuid,resgid,fsuid,fsgid}
        (92, 93, 94, 260, 105, 106, 113, 114, 116, 117, 119, 122, 123),
    ),
    "aarch64": (
        0xC000_00B7,
        {"seccomp": 277, "clone": 220, "unshare": 97},
        # fchownat, fchown, set{regid,gid,reuid,uid,resuid,resgid,fsuid,fsgid}, setgroups
        (54, 55, 143, 144, 145, 146, 147, 149, 151, 152, 159),
    ),
}
_ARCH, _NUMBERS, _FAKED = _NATIVE[os.uname().machine]
_CLONE3 = 435
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16  # struct seccomp_data, little endian
# linux/bpf_common.h and linux/seccomp.h
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ERRNO, _ASK_LISTENER = 0x7FFF_0000, 0x0005_0000, 0x7FC0_0000
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_NOTIF_RECEIVE, _NOTIF_SEND, _NOTIF_CONTINUE = 0xC050_2100, 0xC018_2101, 1
_libc = ctypes.CDLL(None, use_errno=True)


def fake_ids() -> None:
    """Let the calls that change ids or owners answer success without doing anything."""
    fakes = (_if_number(number) + _instruction(_RETURN, _ERRNO | 0) for number in _FAKED)
    _install(fakes, flags=0)


def refuse_user_namespaces() -> int:
    """Let every new user namespace fail with ENOSPC, as with the sysctl user.max_user_namespaces=0.

    The sysctl is one for the whole machine, hence a filter. The flags of clone3 are in memory, where no filter can
    look: somebody must `answer_clone3` at the descriptor returned.
    """
    by_flags = (
        _if_number(_NUMBERS[call], skip=4)
        + _instruction(_LOAD, _OFFSET_FIRST_ARGUMENT)
        + _instruction(_AND, sc.CLONE_NEWUSER)
        + _instruction(_JUMP_IF_EQUAL, sc.CLONE_NEWUSER, if_not=1)
        + _instruction(_RETURN, _ERRNO | errno.ENOSPC)
        for call in ("clone", "unshare")
    )
    return _install((_if_number(_CLONE3) + _instruction(_RETURN, _ASK_LISTENER), *by_flags), flags=_NEW_LISTENER)


def answer_clone3(listener: int, until: int) -> None:
    """Judge every clone3 of the filter's processes, until the pidfd `until` says that its process has ended."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(until, select.POLLIN)
    while (ready := dict(poll.poll())) and until not in ready:
        notification = bytearray(80)  # struct seccomp_notif: id, pid, flags, seccomp_data
        try:
            fcntl.ioctl(listener, _NOTIF_RECEIVE, notification)
            number, pid, address = struct.unpack_from("QI", notification) + struct.unpack_from("Q", notification, 32)
            refused = _clone3_flags(pid, address) & sc.CLONE_NEWUSER
            verdict = (0, -errno.ENOSPC, 0) if refused else (0, 0, _NOTIF_CONTINUE)
            # struct seccomp_notif_resp: id, value, error, flags
            fcntl.ioctl(listener, _NOTIF_SEND, bytearray(struct.pack("QqiI", number, *verdict)))
        except OSError as error:
            if error.errno != errno.ENOENT:  # it was killed meanwhile
                raise


def _clone3_flags(pid: int, address: int) -> int:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return int.from_bytes(memory.read(8), "little")
    except OSError:
        return 0  # no such process any more, or no such memory: the kernel will say so


def _install(rules: Iterable[bytes], flags: int) -> int:
    other_abi = _instruction(_LOAD, _OFFSET_ARCH) + _instruction(_JUMP_IF_EQUAL, _ARCH, if_so=1)
    allow = _instruction(_RETURN, _ALLOW)
    program = other_abi + allow + b"".join(rules) + allow
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: length in instructions, pointer
    head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    number = ctypes.c_long(_NUMBERS["seccomp"])
    result = int(_libc.syscall(number, ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(flags), head))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_SET_MODE_FILTER)")
    return result


def _if_number(number: int, skip: int = 1) -> bytes:
    """Skip the next instructions unless this is the system call `number`."""
    return _instruction(_LOAD, _OFFSET_NUMBER) + _instruction(_JUMP_IF_EQUAL, number, if_not=skip)


def _instruction(code: int, value: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """struct sock_filter: code, instructions to skip if true and if not, operand."""
    return struct.pack("HBBI", code, if_so, if_not, value)
