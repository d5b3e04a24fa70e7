"""The steps into an episode, each in a real process that then says what became of it."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tbench2_env.isolation import capabilities, entering
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.start import Starter

from .child import as_root, in_own_process, own_mounts, own_user_namespace
from .inside import execute
from .rig import AS_ANOTHER_USER, IDS_ARE_FAKED, USER_NAMESPACES


def outcome(program: Program, passed: Sequence[int], *argv: str) -> str:
    """What the command `argv` prints after the program's steps. Raises: OSError for one of them that failed."""
    read_end, write_end = os.pipe()
    starter = Starter()
    program.call("dup3", write_end, 1, 0)
    started = starter.start(execute(program, *argv), [*passed, write_end])
    os.close(write_end)
    with open(read_end, encoding="utf-8") as output:
        text = output.read()
    error = starter.ended(started, os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]))
    if error is not None:
        raise error
    return text


def status(program: Program, passed: Sequence[int] = ()) -> dict[str, str]:
    """The fields of /proc/self/status (proc_pid_status(5)) after the program's steps."""
    lines = outcome(program, passed, "/bin/cat", "/proc/self/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# ---------------------------------------------------------------- its place
@in_own_process
def test_it_joins_each_cgroup_and_takes_its_cpus_and_niceness(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    fds = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) for file in files]
    os.nice(2)
    cpu = max(os.sched_getaffinity(0))
    program = Program()
    entering.take_place(program, fds, [cpu], 3)
    text = outcome(program, fds, "/bin/cat", "/proc/self/status", "/proc/self/stat")
    assert f"Cpus_allowed_list:\t{cpu}\n" in text
    assert text.rpartition(")")[2].split()[16] == "5"
    assert [file.read_text() for file in files] == ["0", "0"]


@in_own_process
def test_by_default_it_is_as_nice_as_we_are_and_cpus_that_are_gone_are_no_failure() -> None:
    program = Program()
    entering.take_place(program, [], [], 0)
    assert not program.steps
    entering.take_place(program, [], [1000], 0)
    assert status(program)["Cpus_allowed_list"] == status(Program())["Cpus_allowed_list"]


@in_own_process
def test_a_cgroup_that_cannot_be_joined(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    program = Program()
    entering.take_place(program, [fd], [], 0)
    with pytest.raises(OSError, match="cannot join the episode's cgroup: Bad file descriptor"):
        outcome(program, [fd], "/bin/true")


@in_own_process
def test_the_oom_killer_takes_it_first() -> None:
    program = Program()
    entering.prefer_for_oom_killer(program)
    assert outcome(program, [], "/bin/cat", "/proc/self/oom_score_adj") == "1000\n"
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


# ---------------------------------------------------------------- namespaces and mounts
@as_root
def test_it_joins_the_namespaces_that_there_are() -> None:
    kinds = ["ipc", "uts", *(["user"] if USER_NAMESPACES else [])]
    pid, _ = sc.clone(sum(entering.KINDS[kind] for kind in kinds))
    if pid == 0:
        signal.pause()
    paths = [f"/proc/{pid}/ns/{kind}" for kind in kinds]
    namespaces = {kind: os.open(path, os.O_RDONLY) for kind, path in zip(kinds, paths, strict=True)}
    program = Program()
    entering.join(program, {**namespaces, "proc": 999})
    links = [f"/proc/self/ns/{kind}" for kind in (*kinds, "net")]
    theirs = [str(Path(path).readlink()) for path in (*paths, "/proc/self/ns/net")]
    assert outcome(program, [*namespaces.values()], "/bin/readlink", *links).split() == theirs
    program = Program()
    entering.join(program, {"uts": namespaces["ipc"]})
    with pytest.raises(OSError, match="setns uts: Invalid argument"):
        outcome(program, [*namespaces.values()], "/bin/true")
    os.kill(pid, signal.SIGKILL)


@as_root
def test_a_mount_is_attached_to_its_place(tmp_path: Path) -> None:
    own_mounts()
    source, place = tmp_path / "source", tmp_path / os.fsdecode(b"pl\xffce")
    for folder in (source, place):
        folder.mkdir()
    (source / "file").write_text("here\n")
    fd = sc.open_tree(str(source))
    program = Program()
    entering.attach(program, fd, str(place))
    assert outcome(program, [fd], "/bin/bash", "-c", f"cat {tmp_path}/pl*/file") == "here\n"
    program = Program()
    entering.attach(program, fd, f"{tmp_path}/nowhere")
    with pytest.raises(OSError, match=f"mount {tmp_path}/nowhere: No such file or directory"):
        outcome(program, [fd], "/bin/true")


# ---------------------------------------------------------------- ids and capabilities
@pytest.mark.skipif(not AS_ANOTHER_USER or IDS_ARE_FAKED, reason="there is one id here")
@in_own_process
def test_it_becomes_somebody_with_his_groups_and_no_capabilities() -> None:
    for groups in ([100, 65535], []):
        program = Program()
        entering.become(program, 33, 34, groups)
        found = status(program)
        assert found["Uid"].split() == ["33"] * 4
        assert found["Gid"].split() == ["34"] * 4
        assert found["Groups"].split() == [str(group) for group in groups]
        assert int(found["CapEff"], 16) == int(found["CapPrm"], 16) == 0
    os.setgroups([7])
    program = Program()
    entering.become(program, 0, 0, None)
    assert status(program)["Groups"] == "7", "they are left alone"


@pytest.mark.skipif(not USER_NAMESPACES, reason="no user namespace can be made here")
@as_root
def test_it_becomes_root_where_groups_cannot_be_set() -> None:
    own_user_namespace()
    program = Program()
    entering.become(program, 0, 0, None)
    assert status(program)["Uid"].split() == ["0"] * 4
    if not IDS_ARE_FAKED:
        program = Program()
        entering.become(program, 0, 0, ())
        with pytest.raises(OSError, match="setgroups: Operation not permitted"):
            outcome(program, [], "/bin/true")


@as_root
def test_it_keeps_only_the_capabilities_that_it_may() -> None:
    before = status(Program())
    for kept in (capabilities.CONTAINER, capabilities.VERIFIER, frozenset[int]()):
        program = Program()
        entering.confine(program, kept)
        mask = sum(1 << capability for capability in kept) & int(before["CapBnd"], 16)
        found = status(program)
        assert [int(found[name], 16) for name in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb")] == [mask] * 3 + [
            0,
            0,
        ]
    assert capabilities.everything() >= {*range(38)}
