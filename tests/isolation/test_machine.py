"""Numbers and code of both machines, against the kernel's headers and GNU as where those are installed."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tbench2_env.isolation import machine
from tbench2_env.isolation.machine import MACHINES, STEP_WORDS

BOTH = pytest.mark.parametrize("name", MACHINES)
#: Where Linux's headers have the numbers: those of aarch64 are generic, and on every machine.
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
#: The code of `machine`, by the places of a step's words, in bytes.
RESULT, THEN, ERROR, ZERO, ALSO = (8 * word for word in range(7, STEP_WORDS))
SOURCES = {
    "x86_64": f"""
        .intel_syntax noprefix
start:  mov r10, rcx
        mov eax, 56
        syscall
        test rax, rax
        jz child
        ret
child:  mov rbx, r8
loop:   mov rax, [rbx]
        mov rdi, [rbx+8]
        mov rsi, [rbx+16]
        mov rdx, [rbx+24]
        mov r10, [rbx+32]
        mov r8, [rbx+40]
        mov r9, [rbx+48]
        syscall
        mov rcx, [rbx+{RESULT}]
        mov [rcx], rax
        mov rcx, [rbx+{ALSO}]
        mov [rcx], rax
        test rax, rax
        jz zero
        cmp rax, -4095
        jae error
        mov rbx, [rbx+{THEN}]
        jmp loop
error:  mov rbx, [rbx+{ERROR}]
        jmp loop
zero:   mov rbx, [rbx+{ZERO}]
        jmp loop
load:   mov ebx, 0x41fedc
    """,
    "aarch64": f"""
start:  mov x8, #220
        svc #0
        cbz x0, child
        ret
child:  mov x19, x4
loop:   ldr x8, [x19]
        ldp x0, x1, [x19, #8]
        ldp x2, x3, [x19, #24]
        ldp x4, x5, [x19, #40]
        svc #0
        ldr x9, [x19, #{RESULT}]
        str x0, [x9]
        ldr x9, [x19, #{ALSO}]
        str x0, [x9]
        cbz x0, zero
        cmn x0, #4095
        b.hs error
        ldr x19, [x19, #{THEN}]
        b loop
error:  ldr x19, [x19, #{ERROR}]
        b loop
zero:   ldr x19, [x19, #{ZERO}]
        b loop
load:   mov x19, #0xfedc
        movk x19, #0x41, lsl #16
    """,
}


@BOTH
def test_the_numbers_of_system_calls(name: str) -> None:
    header = next((Path(path) for path in HEADERS[name] if Path(path).exists()), None)
    if header is None:
        pytest.skip("the kernel's headers (linux-libc-dev) are not installed")
    # 3264: calls of which machines of 32 bits have a wider one, too.
    numbers = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE))
    ours = MACHINES[name].numbers
    assert {call: int(numbers[call]) for call in ours} == ours


@BOTH
def test_the_code_is_what_it_says(name: str, tmp_path: Path) -> None:
    tools = [f"{name}-linux-gnu-{tool}" for tool in ("as", "objcopy")]
    if name == os.uname().machine:
        tools = ["as", "objcopy"]
    if not all(map(shutil.which, tools)):
        pytest.skip(f"no {' and '.join(tools)} (binutils) here")
    (tmp_path / "code.s").write_text(SOURCES[name])
    for argv in ([tools[0], "-o", "code.o", "code.s"], [tools[1], "-O", "binary", "-j", ".text", "code.o", "code"]):
        subprocess.run(argv, cwd=tmp_path, check=True)
    ours = MACHINES[name]
    assert (tmp_path / "code").read_bytes().hex() == (ours.start + ours.loop + ours.load(0x41_FEDC)).hex()


def test_the_machine_that_we_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.this()
    with open("/proc/self/exe", "rb") as ourselves:
        assert struct.unpack_from("<H", ourselves.read(20), 18)[0] == here.elf_machine
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "x", "6", "1", "riscv64")))
    with pytest.raises(OSError, match="this machine is riscv64, and processes can be started on x86_64 and aarch64"):
        machine.this()
