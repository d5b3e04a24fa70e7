"""The two machines that the helpers run on: numbers of system calls, and the code that carries out a program of them.

The code knows nothing of what it runs. A program (see `program`) is a table in memory of steps of twelve 64-bit words:
the call's number, six arguments, where its result goes, which step is next if it is positive, an error, or zero, and
where else its result goes.

    start(flags, 0, parent_tid, 0, first_step)    # a C function: clone(2); the parent returns
        child:    step = first_step
    next:         result = syscall(*step[0:7]);  *step[7] = *step[11] = result
                  step = step[10] if result == 0 else step[9] if result >= -4095 (unsigned) else step[8]
                  goto next

No stack is used, so a child may share its parent's memory and stack pointer while both run (CLONE_VM). Assembled by
GNU as; tests/isolation/test_machine.py compares with it where it is installed.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

#: Words of a step.
STEP_WORDS = 12


@dataclass(frozen=True)
class Machine:
    """`start` and `loop` are the code above, `loop` from `next` on; `load(address)` sets the first step before it."""

    elf_machine: int  # e_machine of elf(5)
    start: bytes
    loop: bytes
    load: Callable[[int], bytes]
    numbers: dict[str, int]


_X86_64_START = bytes.fromhex(
    "4989ca"  # mov r10, rcx: clone's fourth argument
    "b838000000"  # mov eax, 56 (clone)
    "0f05"  # syscall
    "4885c0 7401 c3"  # test rax, rax; jz child; ret
    "4c89c3"  # child: mov rbx, r8
)
_X86_64_LOOP = bytes.fromhex(
    "488b03"  # next: mov rax, [rbx]
    "488b7b08 488b7310 488b5318"  # mov rdi, [rbx+8]; mov rsi, [rbx+16]; mov rdx, [rbx+24]
    "4c8b5320 4c8b4328 4c8b4b30"  # mov r10, [rbx+32]; mov r8, [rbx+40]; mov r9, [rbx+48]
    "0f05"  # syscall
    "488b4b38 488901"  # mov rcx, [rbx+56]; mov [rcx], rax
    "488b4b58 488901"  # mov rcx, [rbx+88]; mov [rcx], rax
    "4885c0 7414"  # test rax, rax; jz zero
    "483d01f0ffff 7306"  # cmp rax, -4095; jae error
    "488b5b40 ebc2"  # mov rbx, [rbx+64]; jmp next
    "488b5b48 ebbc"  # error: mov rbx, [rbx+72]; jmp next
    "488b5b50 ebb6"  # zero: mov rbx, [rbx+80]; jmp next
)
_AARCH64_START = struct.pack(
    "<5I",
    0xD2801B88,  # mov x8, #220 (clone)
    0xD4000001, 0xB4000040, 0xD65F03C0,  # svc #0; cbz x0, child; ret
    0xAA0403F3,  # child: mov x19, x4
)  # fmt: skip
_AARCH64_LOOP = struct.pack(
    "<18I",
    0xF9400268,  # next: ldr x8, [x19]
    0xA9408660, 0xA9418E62, 0xA9429664,  # ldp x0, x1, [x19, #8]; ldp x2, x3, [x19, #24]; ldp x4, x5, [x19, #40]
    0xD4000001,  # svc #0
    0xF9401E69, 0xF9000120,  # ldr x9, [x19, #56]; str x0, [x9]
    0xF9402E69, 0xF9000120,  # ldr x9, [x19, #88]; str x0, [x9]
    0xB40000E0, 0xB13FFC1F, 0x54000062,  # cbz x0, zero; cmn x0, #4095; b.hs error
    0xF9402273, 0x17FFFFF3,  # ldr x19, [x19, #64]; b next
    0xF9402673, 0x17FFFFF1,  # error: ldr x19, [x19, #72]; b next
    0xF9402A73, 0x17FFFFEF,  # zero: ldr x19, [x19, #80]; b next
)  # fmt: skip


def _load_x86_64(address: int) -> bytes:
    return b"\xbb" + struct.pack("<I", address)  # mov ebx, address


def _load_aarch64(address: int) -> bytes:
    # mov x19, #low half; movk x19, #high half, lsl #16
    return struct.pack("<2I", 0xD2800013 | (address & 0xFFFF) << 5, 0xF2A00013 | (address >> 16) << 5)


#: call -> its numbers on x86_64 (asm/unistd_64.h) and on aarch64 (asm-generic/unistd.h).
_NUMBERS = {
    "bind": (49, 200), "capset": (126, 91), "chdir": (80, 49), "clone": (56, 220), "close": (3, 57),
    "close_range": (436, 436), "dup3": (292, 24), "execve": (59, 221), "execveat": (322, 281), "exit_group": (231, 94),
    "fchmodat": (268, 53), "fchownat": (260, 54), "fcntl": (72, 25), "getpid": (39, 172), "ioctl": (16, 29),
    "keyctl": (250, 219), "kill": (62, 129), "listen": (50, 201), "madvise": (28, 233), "mkdirat": (258, 34),
    "mknodat": (259, 33), "mount": (165, 40), "move_mount": (429, 429), "openat": (257, 56), "pivot_root": (155, 41),
    "ppoll": (271, 73), "prctl": (157, 167), "prlimit64": (302, 261), "read": (0, 63), "recvfrom": (45, 207),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "sched_setaffinity": (203, 122), "sendmsg": (46, 211),
    "setgroups": (116, 159), "sethostname": (170, 161), "setns": (308, 268), "setpriority": (141, 140),
    "setresgid": (119, 149), "setresuid": (117, 147), "setsid": (112, 157), "socket": (41, 198), "symlinkat": (266, 36),
    "umask": (95, 166), "umount2": (166, 39), "unshare": (272, 97), "wait4": (61, 260), "write": (1, 64),
}  # fmt: skip

MACHINES = {
    "x86_64": Machine(
        62, _X86_64_START, _X86_64_LOOP, _load_x86_64, {call: both[0] for call, both in _NUMBERS.items()}
    ),
    "aarch64": Machine(
        183, _AARCH64_START, _AARCH64_LOOP, _load_aarch64, {call: both[1] for call, both in _NUMBERS.items()}
    ),
}


def this() -> Machine:
    """Raises: OSError on a machine that there is no code for."""
    name = os.uname().machine
    if name not in MACHINES:
        raise OSError(f"this machine is {name}, and processes can be started on {' and '.join(MACHINES)} only")
    return MACHINES[name]
