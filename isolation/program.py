"""Programs of system calls: what a new process does before it becomes a command, without an interpreter.

A fork of a Python process copies its page tables and then, in both, a page for almost every line that runs: 1.9 ms of
CPU for a command that takes 0.95 by posix_spawn, against 1.05 this way. A program is data: steps that are laid out in
memory, or in an ELF executable of its own, and carried out by the few instructions of `machine`.

    program = Program()
    program.call("setns", fd, CLONE_NEWNS)
    program.call("execve", program.text(b"/bin/true"), program.vector([b"true"]), program.vector([]))

A step that fails ends the process, unless it is optional; see `start.Starter` for how the reason is heard of.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.machine import STEP_WORDS, Machine

#: Exit status of a process whose program failed.
NOT_STARTED = 125
#: Where a program has descriptors for a moment: above what a command gets, below what the helpers pass on.
SPARE_FDS = (61, 62, 63)
SPARE_FD = SPARE_FDS[0]
_WORD = (1 << 64) - 1
#: Where an executable's code and data are mapped: far apart, since both are in one page of the file, on machines with
#: pages of 64 KiB, too.
_CODE, _DATA = 0x40_0000, 0x41_0000
#: Bytes of the file before its data: the headers and the code.
_DATA_OFFSET = 512
#: Bytes of a report: the number of the start and each step's result, of eight bytes each.
REPORT_MAX = 1 << 14


@dataclass(frozen=True)
class Label:
    """A place in a program, by the index of its step."""

    index: int


@dataclass(eq=False)
class Step:
    """One system call. What comes next: `then`, or `zero` or `error` in those cases; None is the step below."""

    call: str
    arguments: list[int]
    #: What the failure is called, instead of the call's name; an error of an optional step goes on.
    what: str
    optional: bool
    then: Label | None = None
    zero: Label | None = None
    error: Label | None = None
    #: A step that gets the result as its first argument.
    into: Label | None = None


@dataclass
class Program:
    """Steps, and the data that they point to, for memory at address `base`; 0 stands for an executable's own."""

    base: int = 0
    steps: list[Step] = field(default_factory=list)
    _data: bytearray = field(default_factory=bytearray)
    #: What `image` is made of, and the address of the first step.
    _laid_out: tuple[bytearray, int] | None = None

    def __post_init__(self) -> None:
        self.base = self.base or _DATA + _DATA_OFFSET

    def call(self, call: str, *arguments: int, what: str = "", optional: bool = False) -> Step:
        """Add a step. Arguments are numbers, descriptors and addresses that the methods below answer with."""
        step = Step(call, list(arguments), what or call, optional)
        self.steps.append(step)
        self._laid_out = None
        return step

    def here(self) -> Label:
        """The step that will be added next."""
        return Label(len(self.steps))

    def keep(self, number: int, opening: Step) -> None:
        """Have the descriptor that `opening`, the last step, answers with under `number` as well, close-on-exec."""
        opening.into = self.here()
        self.call("dup3", 0, number, os.O_CLOEXEC)

    def write_file(self, path: str, text: str, *, optional: bool = False) -> None:
        """Add the steps that write to a file that is there."""
        address, data, flags = self.text(path.encode()), text.encode(), os.O_WRONLY | os.O_CLOEXEC
        opened = self.call("openat", sc.AT_FDCWD, address, flags, what=f"open({path})", optional=optional)
        self.keep(SPARE_FD, opened)
        what = f"write({path}, {text})"
        self.call("write", SPARE_FD, self.data(data), len(data), what=what, optional=optional)
        if optional:
            opened.error = self.here()

    def data(self, data: bytes) -> int:
        self._data += bytes(-len(self._data) % 8)
        address = self.base + len(self._data)
        self._data += data
        return address

    def text(self, text: bytes) -> int:
        """Raises: ValueError for a text with NUL in it."""
        if 0 in text:
            raise ValueError("embedded null byte")
        return self.data(text + b"\0")

    def vector(self, texts: Sequence[bytes]) -> int:
        """A list of strings as execve takes it."""
        addresses = [self.text(text) for text in texts]
        return self.data(struct.pack(f"<{len(addresses) + 1}Q", *addresses, 0))

    def image(self, numbers: dict[str, int], report_to: int, start: int) -> tuple[bytes, int]:
        """The program in memory and the address of its first step. It writes what it has done to descriptor
        `report_to` if it fails: the number `start`, and each step's result. Until a step is added, only `start` may be
        another the next time. Raises: ValueError if it is too long."""
        if self._laid_out is None:
            self._laid_out = self._lay_out(numbers, report_to)
        content, first = self._laid_out
        struct.pack_into("<Q", content, len(content) - self._report_size, start)
        return bytes(content), first

    @property
    def _report_size(self) -> int:
        return 8 * (1 + len(self.steps))

    def _lay_out(self, numbers: dict[str, int], report_to: int) -> tuple[bytearray, int]:
        """Data, steps, two more that report and end, and the report."""
        self._data += bytes(-len(self._data) % 8)
        first, count = self.base + len(self._data), len(self.steps)
        report = first + 8 * STEP_WORDS * (count + 2)
        size = self._report_size
        if size > REPORT_MAX:
            raise ValueError(f"a program has {count} steps, {REPORT_MAX // 8 - 1} at most")
        address = [first + 8 * STEP_WORDS * index for index in range(count + 2)]
        words: list[int] = []
        for index, step in enumerate(self.steps):
            following, failed = address[index + 1], address[count]
            then = address[step.then.index] if step.then else following
            error = address[step.error.index] if step.error else following if step.optional else failed
            zero = address[step.zero.index] if step.zero else then
            result = report + 8 * (1 + index)
            also = address[step.into.index] + 8 if step.into else result
            arguments = [argument & _WORD for argument in step.arguments]
            words += [numbers[step.call], *arguments, *[0] * (6 - len(arguments)), result, then, error, zero, also]
        nowhere, end = report + size, address[count + 1]
        words += [numbers["write"], report_to, report, size, 0, 0, 0, nowhere, end, end, end, nowhere]
        words += [numbers["exit_group"], NOT_STARTED, 0, 0, 0, 0, 0, nowhere, end, end, end, nowhere]
        return self._data + struct.pack(f"<{len(words)}Q", *words) + bytes(size), first

    def explain(self, report: bytes) -> OSError:
        """What made it fail, by its report."""
        failed = self.failed(report)
        return OSError("it failed") if failed is None else OSError(failed[0], f"{failed[1]}: {os.strerror(failed[0])}")

    def failed(self, report: bytes) -> tuple[int, str] | None:
        """The number of the error, and what the failure is called."""
        results = struct.unpack_from(f"<{len(report) // 8}q", report)[1:]
        for step, result in zip(self.steps, results, strict=False):
            if result < 0 and not step.optional and step.error is None:
                return -result, step.what
        return None


def executable(machine: Machine, image: bytes, first: int) -> bytes:
    """A static ELF executable of a program for its own memory: a header, code and data (elf(5))."""
    code_offset, data_offset = 64 + 2 * 56, _DATA_OFFSET
    code = machine.load(first) + machine.loop
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = identity + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine.elf_machine, 1, _CODE + code_offset, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    readable, writable, runnable = 4, 2, 1
    segments = [
        struct.pack("<IIQQQQQQ", 1, readable | runnable, 0, _CODE, _CODE, data_offset, data_offset, 0x1_0000),
        struct.pack(
            "<IIQQQQQQ", 1, readable | writable, data_offset, _DATA + data_offset, _DATA + data_offset,
            len(image), len(image), 0x1_0000,
        ),
    ]  # fmt: skip
    assert code_offset + len(code) <= data_offset
    return (header + b"".join(segments) + code).ljust(data_offset, b"\0") + image
