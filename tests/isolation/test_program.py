"""Programs of system calls: what they are made of, and that an executable of one does on both machines what it says."""

import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.machine import MACHINES, Machine
from tbench2_env.isolation.program import NOT_STARTED, REPORT_MAX, Program, executable

START = 77
SPARE = 50


@dataclass(frozen=True)
class Computer:
    """A machine to run executables on: ours, or one that qemu plays."""

    machine: Machine
    emulator: tuple[str, ...]
    folder: Path

    def run(self, program: Program, given: bytes = b"") -> tuple[int, bytes, bytes]:
        """Exit status, output, report."""
        read_end, write_end = os.pipe()
        path = self.folder / "program"
        path.write_bytes(executable(self.machine, *program.image(self.machine.numbers, write_end, START)))
        path.chmod(0o700)
        done = subprocess.run(
            [*self.emulator, str(path)], input=given, stdout=subprocess.PIPE, pass_fds=[write_end], check=False, env={}
        )
        os.close(write_end)
        with open(read_end, "rb") as reports:
            return done.returncode, done.stdout, reports.read()


@pytest.fixture(params=MACHINES)
def computer(request: pytest.FixtureRequest, tmp_path: Path) -> Computer:
    emulator = f"qemu-{request.param}-static"
    here = request.param == os.uname().machine
    if not here and shutil.which(emulator) is None:
        pytest.skip(f"no {emulator} (qemu-user-static) here: only a machine of that kind runs its code")
    return Computer(MACHINES[request.param], () if here else (emulator,), tmp_path)


def say(program: Program, text: bytes) -> None:
    program.call("write", 1, program.data(text), len(text))


def leave(program: Program, status: int = 0) -> Program:
    program.call("exit_group", status)
    return program


# ---------------------------------------------------------------- run
def test_steps_are_done_in_order_and_the_status_is_theirs(computer: Computer) -> None:
    program = Program()
    for text in (b"one ", b"two ", b"\0\xff"):
        say(program, text)
    assert computer.run(leave(program, 42)) == (42, b"one two \0\xff", b"")


def test_what_comes_after_a_positive_result_after_zero_and_after_an_error(computer: Computer) -> None:
    """cat(1), with a loop; then an error that has a place to go to."""
    program = Program()
    buffer = program.data(b"???")
    begin = program.here()
    reading = program.call("read", 0, buffer, 3)
    program.call("write", 1, buffer, 3).then = begin
    reading.zero = program.here()
    failing = program.call("chdir", program.text(b"/nowhere"))
    leave(program, 1)
    failing.error = program.here()
    say(program, b"end")
    assert computer.run(leave(program), b"abcdefghi") == (0, b"abcdefghiend", b"")


def test_a_step_that_is_optional(computer: Computer) -> None:
    program = Program()
    program.call("chdir", program.text(b"/nowhere"), optional=True)
    say(program, b"went on")
    assert computer.run(leave(program)) == (0, b"went on", b"")


def test_results_that_other_steps_get(computer: Computer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    program = Program()
    buffer = program.data(bytes(16))
    opening = program.call("openat", sc.AT_FDCWD, program.text(bytes(tmp_path / "file")), os.O_RDONLY)
    program.keep(SPARE, opening)
    reading = program.call("read", SPARE, buffer, 16)
    writing = program.call("write", 1, buffer, 7)
    writing.into = program.here()
    program.call("exit_group", 0)  # with what write answered
    assert reading.into is None
    assert computer.run(program) == (7, b"content", b"")


def test_texts_and_vectors(computer: Computer) -> None:
    program = Program()
    echo = program.text(b"/bin/echo")
    program.call("execve", echo, program.vector([b"echo", b"", b"a b", b"\xff"]), program.vector([b"A=1"]))
    assert computer.run(program) == (0, b" a b \xff\n", b"")
    with pytest.raises(ValueError, match="embedded null byte"):
        program.text(b"a\0b")
    with pytest.raises(ValueError, match="embedded null byte"):
        program.vector([b"a", b"\0"])


def test_the_report_of_one_that_failed(computer: Computer) -> None:
    program = Program()
    say(program, b"begun")
    program.call("chdir", program.text(b"/nowhere"), optional=True)
    program.call("chdir", program.text(b"/bin/sh"), what="going there")
    say(program, b"never")
    status, output, report = computer.run(leave(program))
    assert (status, output) == (NOT_STARTED, b"begun")
    assert struct.unpack("<6q", report) == (START, 5, -2, -20, 0, 0)
    why = program.explain(report)
    assert (why.errno, why.strerror) == (20, "going there: Not a directory")


# ---------------------------------------------------------------- made of
def test_an_error_that_had_a_place_to_go_to_is_no_reason() -> None:
    program = Program()
    program.call("chdir", 0).error = program.here()
    program.call("chdir", 0, what="second")
    assert program.explain(struct.pack("<3q", 0, -2, -13)).strerror == "second: Permission denied"
    assert str(program.explain(struct.pack("<3q", 0, -2, 0))) == "it failed"


def test_data_lies_at_multiples_of_eight_of_the_base() -> None:
    program = Program(0x1000)
    assert [program.data(b"a"), program.data(b"bc" * 4), program.data(b""), program.text(b"x")] == [
        0x1000, 0x1008, 0x1010, 0x1010,
    ]  # fmt: skip
    program.call("write", 1, -100)
    image, first = program.image({"write": 1, "exit_group": 2}, 9, 5)
    assert first == 0x1018
    assert image.startswith(b"a\0\0\0\0\0\0\0bcbcbcbcx\0")
    words = struct.unpack_from("<12Q", image, 0x18)
    assert words[:3] == (1, 1, (1 << 64) - 100), "numbers that are negative are of 64 bits"


def test_another_image_differs_by_its_number_alone() -> None:
    program = Program()
    program.call("getpid")
    numbers = MACHINES["x86_64"].numbers
    images = [program.image(numbers, 2, start)[0] for start in (7, 8)]
    number_at = len(images[0]) - 16  # before the result of its one step
    assert [struct.unpack_from("<Q", image, number_at) for image in images] == [(7,), (8,)]
    assert images[0][:number_at] == images[1][:number_at]
    program.call("getpid")
    assert program.image(numbers, 2, 8)[0] != images[1]


def test_one_that_is_too_long_for_a_report() -> None:
    program = Program()
    most = REPORT_MAX // 8 - 1
    for _ in range(most):
        program.call("getpid")
    numbers = MACHINES["x86_64"].numbers
    program.image(numbers, 2, 0)
    program.call("getpid")
    with pytest.raises(ValueError, match=f"a program has {most + 1} steps, {most} at most"):
        program.image(numbers, 2, 0)
