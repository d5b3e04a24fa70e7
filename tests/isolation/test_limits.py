"""Cgroup leaves on the real hierarchies of this machine, and who gets which CPU."""

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tbench2_env.isolation import limits
from tbench2_env.isolation.limits import Affinity, Cgroups, Hierarchy, Leaf, delegated, hierarchies
from tbench2_env.isolation.spec import Limits

from .child import in_own_process, own_mounts
from .rig import CGROUPS_ARE_OURS

_MIB = 1 << 20
_NAME = f"tbench2-test{os.getpid()}"

_DOCKER_V1 = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory
34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""


def _own() -> list[Hierarchy]:
    return hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def _unified() -> Hierarchy:
    [unified] = [one for one in _own() if one.version == 2]
    return unified


def _folders() -> list[Path]:
    return [path for one in _own() for path in Path(one.own).glob(f"*{_NAME}*")]


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    found, why = Cgroups.find(_NAME)
    assert found is not None, why
    yield found
    found.close()
    assert _folders() == []


@pytest.fixture
def leaf(cgroups: Cgroups, request: pytest.FixtureRequest) -> Iterator[Leaf]:
    made = cgroups.create("one", request.param)
    yield made
    assert made.remove()


def where_cgroups_are_ours(test: Callable[..., None]) -> Callable[..., None]:
    """The test; where cgroups are read-only or somebody else's, that this is said, for each control."""
    return test if CGROUPS_ARE_OURS else _no_cgroups


def _no_cgroups() -> None:
    found, why = Cgroups.find(_NAME)
    assert found is None
    for control in limits.CONTROLS:
        assert f"no cgroup limits {control}: " in why
    assert "Permission denied" in why or "Read-only file system" in why


def run(leaf: Leaf, code: str, timeout_s: float = 20) -> "subprocess.CompletedProcess[str]":
    """Run Python code in the leaf."""
    joined = f"import os\nfor fd in {leaf.join_fds}: os.write(fd, b'0')\n{code}"
    argv = [sys.executable, "-I", "-S", "-c", joined]
    return subprocess.run(argv, pass_fds=leaf.join_fds, capture_output=True, text=True, timeout=timeout_s, check=False)


# ---------------------------------------------------------------- finding them
def test_hierarchies_of_a_docker_container_with_version_1() -> None:
    cgroup = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n3:pids:/docker/abc\n1:name=systemd:/docker/abc\n0::/x\n"
    assert {(one.version, one.own) for one in hierarchies(cgroup, _DOCKER_V1)} == {
        (2, "/sys/fs/cgroup/unified/x"),
        (1, "/sys/fs/cgroup/cpu,cpuacct"),
        (1, "/sys/fs/cgroup/memory"),
        (1, "/sys/fs/cgroup/systemd/docker/abc"),
    }


def test_a_cgroup_outside_of_what_is_mounted_is_not_used() -> None:
    mountinfo = "33 31 0:30 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert hierarchies("4:memory:/docker/other\n", mountinfo) == []


def test_version_2_of_a_user_session() -> None:
    mountinfo = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    [found] = hierarchies("0::/user.slice/user-1.slice/app.scope\n", mountinfo)
    assert found == Hierarchy(2, frozenset(), "/sys/fs/cgroup/user.slice/user-1.slice/app.scope")


@where_cgroups_are_ours
def test_this_machine_has_every_control(cgroups: Cgroups) -> None:
    assert cgroups.controls == {"memory", "pids", "cpu"}
    assert len(_folders()) == 4, "and cpuacct"


@where_cgroups_are_ours
@in_own_process
def test_read_only_cgroups_are_named() -> None:
    own_mounts()
    for hierarchy in _own():
        mount_point = hierarchy.own if os.path.ismount(hierarchy.own) else str(Path(hierarchy.own).parents[1])
        subprocess.run(["mount", "-o", "remount,bind,ro", mount_point], check=True)
    found, why = Cgroups.find(_NAME)
    assert found is None
    for control in ("memory", "pids", "cpu"):
        assert f"no cgroup limits {control}: /sys/fs/cgroup/{control}" in why
    assert why.count("Read-only file system") == 3


@where_cgroups_are_ours
@in_own_process
def test_a_part_of_the_controls_is_better_than_none() -> None:
    own_mounts()
    subprocess.run(["umount", "/sys/fs/cgroup/cpu"], check=True)
    found, why = Cgroups.find(_NAME)
    assert found is not None
    assert found.controls == {"memory", "pids"}
    assert why.startswith("no cgroup limits cpu: ")
    found.close()


# ---------------------------------------------------------------- what a leaf holds to
@where_cgroups_are_ours
@pytest.mark.parametrize("leaf", [Limits(memory_bytes=64 * _MIB)], indirect=True)
def test_memory(leaf: Leaf) -> None:
    hog = "data = []\nwhile len(data) < 512: data.append(b'x' * (1 << 20))"
    assert run(leaf, hog).returncode == -signal.SIGKILL
    assert leaf.hits() == {"memory": 1, "processes": 0}
    assert 60 * _MIB < leaf.usage()["memory_peak_bytes"] <= 64 * _MIB


@where_cgroups_are_ours
@pytest.mark.parametrize("leaf", [Limits(processes_max=10)], indirect=True)
def test_processes(leaf: Leaf) -> None:
    bomb = """
import time
made = []
try:
    while True:
        pid = os.fork()
        if pid == 0: time.sleep(10)
        made.append(pid)
except BlockingIOError:
    for pid in made: os.kill(pid, 9), os.waitpid(pid, 0)
print(len(made))
"""
    assert run(leaf, bomb).stdout == "9\n"
    assert leaf.hits() == {"memory": 0, "processes": 1}
    assert leaf.usage()["processes_peak"] == 10


@where_cgroups_are_ours
@pytest.mark.parametrize("leaf", [Limits(cpus=0.2)], indirect=True)
def test_cpus(leaf: Leaf) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert run(leaf, "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass").returncode == 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert 0.1 < used < 0.8, "2 s of wall time at a fifth of a CPU"
    assert leaf.usage()["cpu_s"] == pytest.approx(used, abs=0.2)


@where_cgroups_are_ours
def test_each_episode_weighs_as_one_process_of_its_niceness() -> None:
    """The kernel shares out the CPU level by level, so a leaf must be where our other processes are."""
    [own] = [one.own for one in _own() if "cpu" in one.controllers]
    with contextlib.closing(_found(_NAME, nice=10)) as cgroups:
        leaf = cgroups.create("one", Limits())
        [shares] = Path(own).glob(f"episode.{_NAME}.one/cpu.shares")
        assert shares.read_text() == "110\n"
        assert leaf.remove()


@where_cgroups_are_ours
@pytest.mark.parametrize("leaf", [Limits()], indirect=True)
def test_no_limits(leaf: Leaf) -> None:
    assert run(leaf, "print(len(b'x' * (64 << 20)))").stdout == f"{64 * _MIB}\n"
    assert leaf.hits() == {"memory": 0, "processes": 0}
    assert leaf.usage()["memory_peak_bytes"] > 64 * _MIB


@where_cgroups_are_ours
def test_a_leaf_with_a_process_in_it_is_removed_later(cgroups: Cgroups) -> None:
    leaf = cgroups.create("one", Limits(memory_bytes=64 * _MIB))
    fds = leaf.join_fds
    joined = f"import os, time\nfor fd in {fds}: os.write(fd, b'0')\nprint('in', flush=True)\ntime.sleep(60)"
    argv = [sys.executable, "-I", "-S", "-c", joined]
    with subprocess.Popen(argv, pass_fds=fds, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        assert not leaf.remove()
        process.kill()
    assert leaf.remove()
    assert leaf.remove(), "asked again, it is still gone"


@where_cgroups_are_ours
def test_join_descriptors_are_not_inherited(cgroups: Cgroups) -> None:
    leaf = cgroups.create("one", Limits())
    assert len(leaf.join_fds) == 4
    assert not any(os.get_inheritable(fd) for fd in leaf.join_fds)
    assert leaf.remove()
    assert leaf.join_fds == []


@where_cgroups_are_ours
def test_two_episodes_of_one_name(cgroups: Cgroups) -> None:
    leaf = cgroups.create("one", Limits())
    with pytest.raises(FileExistsError):
        cgroups.create("one", Limits())
    leaf.remove()


# ---------------------------------------------------------------- whose folder it is
def _in_a_child(server: str) -> Callable[[], None]:
    """A neighbour's server, with one empty leaf; the function ends it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        found, _ = Cgroups.find(server)
        if found is not None:
            found.create("quiet", Limits())
        os.write(write_end, b"up")
        signal.pause()
    os.read(read_end, 2)
    os.close(read_end)
    os.close(write_end)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return end


@where_cgroups_are_ours
def test_a_dead_servers_leaves_are_swept_and_a_live_neighbours_are_not() -> None:
    end_alive, end_dead = _in_a_child(_NAME + "alive"), _in_a_child(_NAME + "dead")
    assert len(_folders()) == 16, "a server's folder and its leaf, twice in four hierarchies"
    end_dead()
    with contextlib.closing(_found(_NAME)):
        assert {path.name for path in _folders()} == {_NAME, _NAME + "alive", f"episode.{_NAME}alive.quiet"}
    end_alive()
    _found(_NAME).close()
    assert _folders() == []


def _found(server: str, nice: int = 0) -> Cgroups:
    found, why = Cgroups.find(server, nice)
    assert found is not None, why
    return found


@where_cgroups_are_ours
def test_a_folder_is_locked_while_its_server_lives(cgroups: Cgroups) -> None:
    for folder in _folders():
        fd = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


# ---------------------------------------------------------------- version 2, of which this machine gives no controls
@where_cgroups_are_ours
def test_a_cgroup_of_version_2_without_controllers_says_so() -> None:
    with pytest.raises(OSError, match="it was given none of cpu, memory"):
        delegated(_unified().own, frozenset({"cpu", "memory"}))


@where_cgroups_are_ours
def test_processes_in_our_own_cgroup_of_version_2_keep_it_from_handing_down() -> None:
    """hugetlb is the one controller that version 2 has here."""
    outer = Path(_unified().own, _NAME)
    outer.mkdir()
    (outer.parent / "cgroup.subtree_control").write_text("+hugetlb")
    process = subprocess.Popen(["sleep", "60"])
    try:
        (outer / "cgroup.procs").write_text(str(process.pid))
        with pytest.raises(OSError, match="processes live in it, the server's among them"):
            delegated(str(outer), frozenset({"hugetlb"}))
        process.kill()
        process.wait()
        assert delegated(str(outer), frozenset({"hugetlb", "memory"})).controllers == {"hugetlb"}
    finally:
        process.kill()
        process.wait()
        outer.rmdir()
        (outer.parent / "cgroup.subtree_control").write_text("-hugetlb")


@where_cgroups_are_ours
def test_a_leaf_of_version_2_is_joined_counts_and_goes() -> None:
    folder = f"{_unified().own}/{_NAME}"
    leaf = Leaf({folder: Hierarchy(2, frozenset(), _unified().own)})
    leaf.make(Limits(memory_bytes=64 * _MIB, processes_max=10, cpus=1))
    assert run(leaf, "sum(range(3_000_000)); print(open('/proc/self/cgroup').read())").stdout.count(_NAME) == 1
    assert 0 < leaf.usage()["cpu_s"] < 5
    assert leaf.hits() == {"memory": 0, "processes": 0}
    assert leaf.remove()


@pytest.mark.parametrize(
    ("version", "written"),
    [
        (
            2,
            {
                "memory.max": "1024",
                "memory.swap.max": "0",
                "pids.max": "7",
                "cpu.max": "150000 100000",
                "cpu.weight.nice": "5",
            },
        ),
        (
            1,
            {
                "memory.limit_in_bytes": "1024",
                "memory.memsw.limit_in_bytes": "1024",
                "pids.max": "7",
                "cpu.cfs_period_us": "100000",
                "cpu.cfs_quota_us": "150000",
                "cpu.shares": "335",
            },
        ),
    ],
)
def test_what_is_written_to_a_leaf(version: int, written: dict[str, str]) -> None:
    hierarchy = Hierarchy(version, frozenset(limits.CONTROLS), "/")
    wanted = Limits(memory_bytes=1024, processes_max=7, cpus=1.5)
    assert dict(limits._settings(wanted, 5, hierarchy)) == written


# ---------------------------------------------------------------- CPUs
@in_own_process
def test_affinity_takes_the_least_used_cpus() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert len(cpus) >= 2
    affinity = Affinity()
    first = affinity.choose(1)
    second = affinity.choose(0.5)
    assert (first, second) == ({cpus[0]}, {cpus[1]})
    affinity.release(second)
    assert affinity.choose(1) == second
    assert affinity.choose(len(cpus) + 5) == set(cpus)
    os.sched_setaffinity(0, first)
    assert Affinity().choose(2) == first, "no more than we have ourselves"


def test_affinity_of_many_episodes_is_even() -> None:
    affinity = Affinity()
    begun = time.monotonic()
    chosen = [affinity.choose(1) for _ in range(4 * len(os.sched_getaffinity(0)))]
    assert all(chosen.count({cpu}) == 4 for cpu in os.sched_getaffinity(0))
    assert time.monotonic() - begun < 1
