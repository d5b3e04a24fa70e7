"""Each imitated node is what it claims to be, and nothing of it outlives the command."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hosts import bookworm
from hosts.nodes import NOBODY
from support.processes import children, matching
from support.server import eventually

ON_HOST = Path(__file__).parents[1] / "on_host.py"
ENROOT = ("enroot-ext4", "enroot-overlay")
NODES = ("nobody", *ENROOT, "no-userns")
#: Says how each way to a user namespace is answered: none, or the error.
TRY_USER_NAMESPACES = """
import ctypes, errno, os, struct
from tbench2_env.isolation import syscalls as sc
def by_clone3():
    pid, _ = sc.clone(sc.CLONE_NEWUSER)
    os.waitpid(pid, 0) if pid else os._exit(0)
def by_clone():
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    pid = libc.syscall(ctypes.c_long(number), ctypes.c_long(sc.CLONE_NEWUSER | 17), None, None, None, None)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(pid, 0) if pid else os._exit(0)
for way in (by_clone3, by_clone, lambda: sc.unshare(sc.CLONE_NEWUSER)):
    try:
        way()
        print("none")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


Run = Callable[[str, str], list[str]]


def start(node: str, *command: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, str(ON_HOST), node, "--", *command]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def folders() -> set[Path]:
    """What nodes have on the disk while they are there."""
    assert "tbench2-host-" not in Path("/proc/self/mountinfo").read_text()
    return set(bookworm.kept_at().parent.glob("tbench2-host-*"))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """`run(node, script)`: what a bash on the node prints, in lines. There is one for all tests."""
    before = folders()
    with contextlib.ExitStack() as stack:
        started = functools.cache(lambda node: stack.enter_context(start(node, "bash")))
        yield lambda node, script: _run(started(node), script)
    assert folders() == before


def _run(shell: "subprocess.Popen[str]", script: str) -> list[str]:
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"( {script}\n) </dev/null; echo END $?\n")
    shell.stdin.flush()
    lines = []
    while not (line := shell.stdout.readline().rstrip("\n")).startswith("END "):
        assert shell.poll() is None, "the node ended"
        lines.append(line)
    assert line == "END 0", lines
    return lines


def status(run: Run, node: str, *names: str) -> list[str]:
    """Fields of /proc/self/status there."""
    lines = dict(line.split(":", 1) for line in run(node, "cat /proc/self/status"))
    return [" ".join(lines[name].split()) for name in names]


@pytest.mark.parametrize("node", NODES)
def test_the_checkout_and_its_interpreter_are_there(run: Run, node: str) -> None:
    script = f"pwd; stat -c %u . {sys.executable}; echo $TB2_TEST_NODE; touch $TMPDIR/x $HOME/.tbench2-x"
    show = f"{sys.executable} -c 'import tbench2_env.server.app, sys; print(sys.version)'; rm $HOME/.tbench2-x"
    uid = str(NOBODY) if node == "nobody" else "0"
    assert run(node, f"{script}; {show}") == [str(ON_HOST.parents[1]), uid, uid, node, sys.version]


def test_nobody_is_nobody(run: Run) -> None:
    none = "0000000000000000"
    ids = " ".join([str(NOBODY)] * 4)
    names = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapAmb", "Seccomp")
    assert status(run, "nobody", *names) == [ids, ids, "", none, none, none, none, "0"]
    assert run("nobody", f"{sys.executable} -c '{TRY_USER_NAMESPACES}'") == ["none"] * 3


@pytest.mark.parametrize("node", ENROOT)
def test_enroot_has_one_id_and_every_capability_there(run: Run, node: str) -> None:
    names = ("Uid", "Groups", "NoNewPrivs", "Seccomp")
    assert status(run, node, *names) == ["0 0 0 0", "", "1", "2"]
    [capabilities] = status(run, node, "CapEff")
    assert int(capabilities, 16) & 1 << 21, "CAP_SYS_ADMIN"
    maps = run(node, "cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups")
    assert [line.split() for line in maps] == [["0", str(bookworm.OWNER), "1"]] * 2 + [["deny"]]
    assert run(node, "find /usr /var /home ! -uid 0") == [], "everything in the image is the one user's"


@pytest.mark.parametrize("node", ENROOT)
def test_enroot_answers_success_to_changes_of_ids_and_does_nothing(run: Run, node: str) -> None:
    script = (
        "cd $TMPDIR; touch f; chown 33:1000 f && chgrp -h 7 f && stat -c '%u %g' f; su nobody -s /bin/sh -c 'id -u'"
    )
    calls = "os.setgroups([7]); os.setresuid(33, 33, 33); os.setregid(5, 5); print(os.getresuid(), os.getgid())"
    show = f"{sys.executable} -c 'import os; os.fchown(os.open(\"f\", 0), 33, 33); {calls}'"
    assert run(node, f"{script}; {show}") == ["0 0", "0", "(0, 0, 0) 0"]


@pytest.mark.parametrize("node", ENROOT)
def test_enroot_shares_all_namespaces_but_mounts_and_users(run: Run, node: str) -> None:
    names = ["pid", "net", "ipc", "uts", "cgroup", "mnt", "user"]
    theirs = run(node, f"cd /proc/self/ns; readlink {' '.join(names)}; echo /proc/{os.getpid()}")
    ours = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in names]
    assert theirs[:5] == ours[:5]
    assert not set(theirs[5:7]) & set(ours)
    assert run(node, f"cat /proc/{os.getpid()}/comm") == [Path("/proc/self/comm").read_text().strip()]


@pytest.mark.parametrize("node", ENROOT)
def test_enroots_mounts(run: Run, node: str) -> None:
    lines = [line.split() for line in run(node, "cat /proc/self/mountinfo")]
    mounts = {words[4]: (words[words.index("-") + 1], set(words[5].split(","))) for words in lines}
    on_disk = next(line.split()[2] for line in Path("/proc/mounts").read_text().splitlines() if " / " in line)
    fstype, options = mounts["/"]
    assert fstype == ("overlay" if node == "enroot-overlay" else on_disk)
    assert {"rw", "nosuid", "nodev"} <= options
    assert {"nosuid", "nodev", "noexec"} <= mounts["/proc"][1]
    assert all("ro" in options for target, (_, options) in mounts.items() if target.startswith("/sys"))
    assert [mounts[target][0] for target in ("/tmp", "/run", "/dev")] == ["tmpfs", "tmpfs", "devtmpfs"]
    assert {f"/etc/{name}" for name in ("hosts", "hostname", "resolv.conf")} <= mounts.keys()
    assert not [words for words in lines if any(word.startswith(("shared:", "master:")) for word in words)]
    assert run(node, ": 2>/dev/null </dev/net/tun || echo refused") == ["refused"]


@pytest.mark.parametrize("node", ENROOT)
def test_what_enroot_writes_is_its_own(run: Run, node: str) -> None:
    assert run(node, "echo x >/etc/tbench2-test; cat /etc/tbench2-test") == ["x"]
    assert not Path("/etc/tbench2-test").exists()
    assert not (bookworm.kept_at() / "etc/tbench2-test").exists()


def test_no_user_namespace_can_be_made_and_all_other_namespaces_can(run: Run) -> None:
    assert run("no-userns", f"{sys.executable} -c '{TRY_USER_NAMESPACES}'") == ["ENOSPC"] * 3
    script = "import os; from tbench2_env.isolation import syscalls as sc; sc.unshare(sc.CLONE_NEWNS)"
    fork = "pid, _ = sc.clone(sc.CLONE_NEWPID | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS)"
    end = "os._exit(3 * (os.getpid() == 1)) if pid == 0 else print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    assert run("no-userns", f"{sys.executable} -c '{script}; {fork}; {end}'") == ["3"]
    assert status(run, "no-userns", "Uid", "NoNewPrivs") == ["0 0 0 0", "0"]
    assert run("no-userns", "cat /proc/self/uid_map")[0].split() == ["0", "0", str(2**32 - 1)]


@pytest.mark.parametrize("node", NODES)
def test_the_commands_end_is_told(node: str) -> None:
    before = folders()
    for script, code in (("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)):
        with start(node, "bash", "-c", script) as process:
            assert process.wait() == code
    assert folders() == before


def test_orphans_are_reaped(run: Run) -> None:
    """As on a node with an init."""
    orphan = "sleep 0.1 >/dev/null & echo $!"
    assert run("nobody", f"pid=$(bash -c '{orphan}'); until [ ! -e /proc/$pid ]; do sleep 0.01; done") == []


@pytest.mark.parametrize("node", ["nobody", "enroot-overlay", "no-userns"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("guard", ["outer", "inner"])
def test_nothing_outlives_it_whoever_is_killed(node: str, number: signal.Signals, guard: str) -> None:
    before = folders()
    duration = f"{time.time():.6f}"
    daemon = f"setsid sleep {duration} & (setsid setsid sleep {duration} &)"
    with start(node, "bash", "-c", f"{daemon}; echo up; sleep {duration}") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        eventually(lambda: len(matching(f"sleep {duration}")) >= 3, 5)
        [inner] = children(process.pid)
        os.kill(process.pid if guard == "outer" else inner, number)
        process.wait()
    eventually(lambda: not matching(f"sleep {duration}"), 5, lambda: str(matching(f"sleep {duration}")))
    eventually(lambda: folders() == before, 5)


# ---------------------------------------------------------------- what the server says of one
def test_the_doctor_says_what_there_cannot_be_with_one_id() -> None:
    with start("enroot-ext4", sys.executable, "-m", "tbench2_env.server.app", "doctor", "--json") as doctor:
        report = json.loads(doctor.communicate(timeout=60)[0])
    assert doctor.returncode == 0
    assert report["rung"] == "E"
    [lack] = [lack for lack in report["lacks"] if "one user id only" in lack]
    assert all(word in lack for word in ("chown", "su", "sudo -u", "useradd", "sshd"))
