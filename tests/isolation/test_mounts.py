"""Mount plans as data, and what each operation does when it is carried out."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tbench2_env.isolation import mounts
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.mounts import Filesystem, Folder, Link, Node, Pin, ReadOnly, sandbox_plan
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.spec import RUNGS, Limits
from tbench2_env.isolation.start import Starter

from .child import as_root, own_mounts


def plan_on(rung: str) -> tuple[mounts.Operation, ...]:
    return sandbox_plan(RUNGS[rung], mounts.shm_bytes(Limits(memory_bytes=2 << 20)), host_network=False)


def carry_out(plan: list[mounts.Operation], prefix: Path) -> None:
    """Raises: OSError, as PID 1 fails."""
    program, starter = Program(), Starter()
    mounts.apply(program, plan, str(prefix))
    program.call("exit_group", 0)
    started = starter.start(program, ())
    _, status = os.waitpid(started.pid, 0)
    failure = starter.ended(started, os.waitstatus_to_exitcode(status))
    if failure is not None:
        raise failure


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Filesystem("proc", "/proc"), "proc on /proc"),
        (Filesystem("tmpfs", "/dev/shm", "mode=1777"), "tmpfs on /dev/shm (mode=1777)"),
        (ReadOnly("/proc/sys"), "read-only /proc/sys"),
        (Pin("/logs"), "pin /logs"),
        (Node("null"), "device /dev/null"),
        (Link("pts/ptmx", "/dev/ptmx"), "/dev/ptmx -> pts/ptmx"),
        (Folder("/dev/shm", 0o1777), "folder /dev/shm 1777"),
    ],
)
def test_an_operation_describes_itself(operation: mounts.Operation, text: str) -> None:
    assert operation.describe() == text


def test_the_plan_in_words() -> None:
    described = mounts.describe(plan_on("1"))
    assert described == [
        "proc on /proc",
        "sysctl net.ipv4.ip_unprivileged_port_start = 0",
        "sysctl net.ipv4.ping_group_range = 0 65535",
        "tmpfs on /dev (mode=755,size=1m,nr_inodes=1k)",
        *(f"device /dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
        "/dev/fd -> /proc/self/fd",
        "/dev/stdin -> /proc/self/fd/0",
        "/dev/stdout -> /proc/self/fd/1",
        "/dev/stderr -> /proc/self/fd/2",
        "/dev/ptmx -> pts/ptmx",
        "folder /dev/shm 755",
        "folder /dev/pts 755",
        "tmpfs on /dev/shm (mode=1777,size=1048576)",
        "devpts on /dev/pts (newinstance,ptmxmode=0666,mode=0620,gid=5)",
        "pin /logs",
        "tmpfs on /tests (mode=755,size=4k,nr_inodes=2)",
        "tmpfs on /logs/verifier (mode=755,size=4k,nr_inodes=2)",
        "tmpfs on /logs/toolchain (mode=755,size=4k,nr_inodes=2)",
    ]


def test_the_pins_are_read_only_and_last() -> None:
    """`rmdir /tests` by the agent must be EBUSY; nothing may be mounted over the pins afterwards."""
    *_, logs, tests, verifier, toolchain = plan_on("1")
    assert logs == Pin("/logs")
    for pin, target in ((tests, "/tests"), (verifier, "/logs/verifier"), (toolchain, "/logs/toolchain")):
        assert isinstance(pin, Filesystem)
        assert pin.target == target
        assert pin.flags & sc.MS_RDONLY


def test_proc_sys_is_guarded_where_root_inside_is_root_outside() -> None:
    plan = plan_on("2")
    names = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
    guards = [path for path in (f"/proc/{name}" for name in names) if Path(path).exists()]
    assert "/proc/sys" in guards
    assert [step.target for step in plan if isinstance(step, ReadOnly)] == guards
    targets = [getattr(step, "target", "") for step in plan]
    assert targets.index("/proc") < targets.index("/proc/sys")


def test_a_single_id_has_no_tty_group() -> None:
    [pts] = [
        step for step in plan_on("E") if getattr(step, "target", "") == "/dev/pts" and isinstance(step, Filesystem)
    ]
    assert "gid" not in pts.options
    assert "newinstance" in pts.options


@as_root
def test_applied_below_a_prefix(tmp_path: Path) -> None:
    own_mounts()
    for name in ("dev", "pinned", "guarded"):
        (tmp_path / name).mkdir()
    (tmp_path / "guarded/file").write_text("x")
    plan: list[mounts.Operation] = [
        Filesystem("tmpfs", "/dev", "mode=711"),
        Folder("/dev/sticky", 0o1777),
        Node("null"),
        Link("null", "/dev/nothing"),
        Pin("/pinned"),
        ReadOnly("/guarded"),
    ]
    os.umask(0o077)  # modes do not depend on it
    carry_out(plan, tmp_path)
    assert stat.S_IMODE((tmp_path / "dev").stat().st_mode) == 0o711
    assert stat.S_IMODE((tmp_path / "dev/sticky").stat().st_mode) == 0o1777
    (tmp_path / "dev/nothing").write_text("gone")
    assert (tmp_path / "dev/nothing").read_text() == ""
    assert os.stat(tmp_path / "dev/null").st_rdev == os.makedev(1, 3)  # noqa: PTH116
    (tmp_path / "pinned/file").write_text("still writable")
    fails: dict[int, list[Callable[[], object]]] = {
        errno.EBUSY: [(tmp_path / "pinned").rmdir, lambda: (tmp_path / "pinned").rename(tmp_path / "other")],
        errno.EROFS: [(tmp_path / "guarded/file").unlink, lambda: (tmp_path / "guarded/file").write_text("y")],
    }
    (tmp_path / "pinned/file").unlink()
    for number, calls in fails.items():
        for call in calls:
            assert error_of(call) == number


def error_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


@as_root
def test_a_failure_names_the_call_and_the_path(tmp_path: Path) -> None:
    own_mounts()
    with pytest.raises(OSError, match=rf"mount\(proc, {tmp_path}/proc, proc"):
        carry_out([Filesystem("proc", "/proc")], tmp_path)
