"""Finding and killing processes from outside: trees with every way of leaving them, and namespaces."""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tbench2_env.isolation import processes
from tbench2_env.isolation import syscalls as sc

from .child import as_root, in_own_process, stat_fields
from .inside import run_inside, start_namespace
from .rig import USER_NAMESPACES, inner_number

#: A tree with a child, a session of its own, a double fork, and a session with children below a double fork.
TREE = """
sleep 1000 &
setsid sleep 1000 &
(setsid sleep 1000 &)
(setsid bash -c '(sleep 1000 & sleep 1000); exit' &)
wait
"""
TREE_SIZES = {"bash": 3, "sleep": 5}


def open_proc() -> int:
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def start_tree(script: str = TREE) -> int:
    """Run `script` as commands run: a session leader and subreaper. We are a subreaper too and see who comes to us."""
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()
    if pid == 0:
        sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        os.execv("/bin/bash", ["bash", "-c", script])
    return pid


def tree_of(root: int) -> set[int]:
    return {root} | processes.descendants(open_proc(), root)


def wait_for_tree(root: int, sizes: Mapping[str, int] = TREE_SIZES) -> set[int]:
    """The tree, once it has so many processes of each name."""
    deadline = time.monotonic() + 10
    while Counter(map(comm, tree := tree_of(root))) != sizes:
        assert time.monotonic() < deadline, {pid: comm(pid) for pid in tree}
        time.sleep(0.005)
    return tree


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def reap_all() -> dict[int, int]:
    """Wait for every child, also adopted ones: pid -> exit code."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


@in_own_process
def test_a_tree_is_killed_with_all_that_escaped_from_it() -> None:
    tree = wait_for_tree(start_tree())
    [root] = [pid for pid in tree if int(stat_fields(pid)[1]) == os.getpid()]
    processes.kill_tree(open_proc(), root)
    ended = reap_all()
    assert ended == dict.fromkeys(ended, -signal.SIGKILL)
    assert root in ended
    # A parent that was sent the stop but had not come to it may have reaped a child of its own.
    assert not [pid for pid in tree if stat_fields(pid)]


@in_own_process
def test_stopped_processes_are_killed_too() -> None:
    root = start_tree("(kill -STOP $BASHPID; exit) & kill -STOP $$; exit")
    tree = wait_for_tree(root, {"bash": 2})
    os.waitid(os.P_PID, root, os.WSTOPPED)
    processes.kill_tree(open_proc(), root)
    assert reap_all() == dict.fromkeys(tree, -signal.SIGKILL)


@in_own_process
def test_a_tree_that_keeps_forking_is_killed() -> None:
    root = start_tree("while :; do (sleep 0.05 &) ; done")
    deadline = time.monotonic() + 10
    while len(tree_of(root)) < 5:
        assert time.monotonic() < deadline
    processes.kill_tree(open_proc(), root)
    assert reap_all()[root] == -signal.SIGKILL  # and so nothing is left to wait for


@in_own_process
def test_neighbours_and_ancestors_are_left_alone() -> None:
    neighbour = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    root = start_tree()
    wait_for_tree(root)
    processes.kill_tree(open_proc(), root)
    deadline = time.monotonic() + 10
    while len(tree_of(os.getpid())) > 2:
        assert time.monotonic() < deadline
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            os.wait()
    assert neighbour.poll() is None
    neighbour.kill()
    neighbour.wait()


@in_own_process
def test_a_tree_whose_root_is_gone_is_no_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    processes.kill_tree(open_proc(), pid)  # a zombie
    os.waitpid(pid, 0)
    processes.kill_tree(open_proc(), pid)  # nobody
    processes.send(open_proc(), pid, signal.SIGKILL)


# ---------------------------------------------------------------- in a PID namespace of its own
def proc_of(namespace: int) -> int:
    """The procfs of a PID namespace, as a descriptor."""
    read_end, write_end = os.pipe()
    mount = f"mount -t proc proc /proc; echo >&{write_end}; exec sleep 1000"
    pid = run_inside(namespace, f"exec unshare --mount bash -c '{mount}'", write_end)
    os.read(read_end, 1)
    proc = os.open(f"/proc/{pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return proc


@as_root
def test_a_tree_in_another_namespace_is_killed_by_its_own_numbering() -> None:
    first, namespace = start_namespace()
    proc = proc_of(namespace)
    root = run_inside(namespace, TREE)
    tree = wait_for_tree(root)
    assert processes.inner_pid(root) == inner_number(root) < root
    processes.kill_tree(proc, processes.inner_pid(root))
    os.waitpid(root, 0)
    deadline = time.monotonic() + 10
    while {pid for pid in tree if stat_fields(pid)}:  # orphans go to the namespace's first process, which reaps them
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert stat_fields(first)[0] == "S"


@as_root
def test_kill_where_spares_the_first_process_and_the_unwanted() -> None:
    first, namespace = start_namespace()
    proc = proc_of(namespace)
    spared = run_inside(namespace, "exec sleep 1000")
    doomed = [run_inside(namespace, "exec sleep 1000") for _ in range(3)]
    kept = processes.inner_pid(spared)
    processes.kill_where(proc, lambda pid: pid != kept)
    assert [os.waitpid(pid, 0)[1] for pid in doomed] == [signal.SIGKILL] * 3
    assert stat_fields(spared)[0] in "RS"
    assert stat_fields(first)[0] == "S"
    processes.kill_where(proc, lambda pid: True)
    assert os.waitpid(spared, 0)[1] == signal.SIGKILL
    assert stat_fields(first)[0] == "S"


@in_own_process
def test_processes_of_a_user_namespace() -> None:
    if not USER_NAMESPACES:
        with pytest.raises(OSError, match="user namespaces are switched off"):
            sc.clone(sc.CLONE_NEWUSER)
        return
    inside, _ = sc.clone(sc.CLONE_NEWUSER)
    if inside == 0:
        signal.pause()
    proc = open_proc()
    inode = Path(f"/proc/{inside}/ns/user").stat().st_ino
    ours = Path("/proc/self/ns/user").stat().st_ino
    wanted = processes.in_user_namespace(proc, inode, but_not=0)
    assert wanted(inside)
    assert not wanted(os.getpid())
    assert not processes.in_user_namespace(proc, ours, but_not=inode)(inside)
    os.kill(inside, signal.SIGKILL)
    os.waitpid(inside, 0)
    assert not wanted(inside)


def test_the_inner_number_of_a_process_that_is_gone() -> None:
    gone = int(Path("/proc/sys/kernel/pid_max").read_text())  # the first number that is never given
    with pytest.raises(OSError, match="No such file"):
        processes.inner_pid(gone)
