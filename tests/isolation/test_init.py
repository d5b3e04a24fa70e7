"""The pause program that is PID 1 of every episode."""

import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tbench2_env.isolation import init

from .child import in_own_process, stat_fields


def state(pid: int) -> str:
    return (stat_fields(pid) or ["gone"])[0]


def wait_for(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + 5
    while state(pid) != wanted:
        assert time.monotonic() < deadline, f"process {pid} is {state(pid)}, not {wanted}"
        time.sleep(0.002)


@pytest.fixture
def pausing(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = tmp_path / "pause"
    program.write_bytes(init.pause_program(os.uname().machine))
    program.chmod(0o755)
    process = subprocess.Popen([program])
    yield process
    process.kill()
    process.wait()


def test_it_runs_and_sleeps(pausing: subprocess.Popen[bytes]) -> None:
    wait_for(pausing.pid, "S")
    assert Path(f"/proc/{pausing.pid}/exe").readlink().name == "pause"
    utime, stime = stat_fields(pausing.pid)[11:13]
    assert int(utime) + int(stime) <= 1, "it burns processor time"


def test_it_sleeps_on_after_a_signal(pausing: subprocess.Popen[bytes]) -> None:
    wait_for(pausing.pid, "S")
    for _ in range(3):  # interrupted and resumed, the system call is made again
        pausing.send_signal(signal.SIGSTOP)
        wait_for(pausing.pid, "T")
        pausing.send_signal(signal.SIGCONT)
        wait_for(pausing.pid, "S")
    pausing.send_signal(signal.SIGTERM)
    assert pausing.wait(5) == -signal.SIGTERM


def test_it_costs_a_few_pages(pausing: subprocess.Popen[bytes]) -> None:
    wait_for(pausing.pid, "S")
    resident_pages = int(Path(f"/proc/{pausing.pid}/statm").read_text().split()[1])
    assert resident_pages * os.sysconf("SC_PAGE_SIZE") <= 64 << 10


@pytest.mark.parametrize("ignored", [True, False])
@in_own_process
def test_zombies_need_no_code_where_their_signal_is_ignored(ignored: bool) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # until the test lets go of the other end
            os._exit(0)
        os.execve(init.pause_descriptor(), ["init"], {})
    os.close(read_end)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").read_bytes() != b"init\0":
        assert time.monotonic() < deadline
        time.sleep(0.002)
    [child] = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    os.close(write_end)
    wait_for(child, "gone" if ignored else "Z")
    os.kill(pid, signal.SIGKILL)


def test_the_descriptor_is_closed_on_exec_and_cannot_be_written() -> None:
    fd = init.pause_descriptor()
    try:
        assert not os.get_inheritable(fd)
        assert os.pread(fd, 1 << 12, 0) == init.pause_program(os.uname().machine)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)


@pytest.mark.parametrize(("machine", "number", "step"), [("x86_64", 62, 1), ("aarch64", 183, 4)])
def test_both_machines_have_a_program(machine: str, number: int, step: int) -> None:
    program = init.pause_program(machine)
    identity, kind, elf_machine, _, entry, segments_at, _, _, header_size, segment_size, segments = struct.unpack_from(
        "<16sHHIQQQIHHH", program
    )
    assert (identity[:7], kind, elf_machine) == (b"\x7fELF\x02\x01\x01", 2, number)
    assert (segments_at, header_size, segment_size, segments) == (64, 64, 56, 1)
    kind, flags, offset, address, _, file_size, memory_size, _ = struct.unpack_from("<IIQQQQQQ", program, segments_at)
    assert (kind, flags, offset, file_size, memory_size) == (1, 5, 0, len(program), len(program))
    assert entry == address + 64 + 56
    assert (len(program) - 120) % step == 0


def test_the_code_for_aarch64_calls_ppoll_for_ever() -> None:
    code = struct.unpack("<7I", init.pause_program("aarch64")[120:])
    registers = {word & 0x1F: word >> 5 & 0xFFFF for word in code[:5] if word & 0xFFE0_0000 == 0xD280_0000}  # movz
    assert registers == {0: 0, 1: 0, 2: 0, 3: 0, 8: 73}
    assert code[5] == 0xD400_0001  # svc 0
    assert code[6] == 0x1400_0000 | (-6 & 0x03FF_FFFF)  # b to the first word


def test_a_machine_without_code_is_an_error() -> None:
    with pytest.raises(KeyError, match="riscv64"):
        init.pause_program("riscv64")


@in_own_process
def test_an_episode_is_the_first_thing_to_go_when_memory_is_short() -> None:
    init.prefer_for_oom_killer()
    assert Path("/proc/self/oom_score_adj").read_text() == "1000\n"
