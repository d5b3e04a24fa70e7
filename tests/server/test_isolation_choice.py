"""Which rung of the ladder a server takes, where its worktrees go, and what doctor says of both (CASES.md 22, 23)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.server import MakeServer, free_port
from support.tasks import make_task

pytestmark = pytest.mark.usefixtures("real_root")
_APP = (sys.executable, "-m", "tbench2_env.server.app")
#: Root that may neither mount nor make a user namespace: the first needs CAP_SYS_ADMIN, the second is filtered.
_REFUSE_USER_NAMESPACES = """
import os, signal, sys
from hosts import filters
from tbench2_env.isolation import syscalls as sc
listener = filters.refuse_user_namespaces()
if pid := os.fork():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    filters.answer_clone3(listener, os.pidfd_open(pid))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.close(listener)
sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
NO_USER_NAMESPACES = (sys.executable, "-c", _REFUSE_USER_NAMESPACES)
NO_SYS_ADMIN = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
#: An overlay, and a small tmpfs, on the folder $SCRATCH in a mount namespace of the server's own.
ON_OVERLAY = (
    *("unshare", "--mount", "sh", "-c"),
    'cd "$SCRATCH" && mkdir l t && mount -t tmpfs x t && mkdir t/u t/w && '
    'mount -t overlay x "$SCRATCH" -o lowerdir=l,upperdir=t/u,workdir=t/w && exec "$@"',
    "sh",
)
ON_TMPFS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4G x "$SCRATCH" && exec "$@"', "sh")


@pytest.fixture
def real_root() -> None:
    assert os.geteuid() == 0, "these tests imitate nodes, which takes root"


def environment(folder: Path, tasks: Path, **env: str) -> dict[str, str]:
    mine = {"TB2_TASKS_DIR": str(tasks), "TB2_OUTPUT_DIR": str(folder / "runs"), "TB2_SCRATCH_DIR": str(folder / "s")}
    tests = str(Path(__file__).parents[1])
    return {"PATH": os.environ["PATH"], "HOME": "/root", "PYTHONPATH": tests, "TB2_REGISTRY": "none", **mine, **env}


def run(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)


class Doctor:
    """`doctor` with these variables, on this host or as `wrap` makes it."""

    def __init__(self, folder: Path, tasks: Path) -> None:
        self.folder, self.tasks = folder, tasks

    def __call__(self, *wrap: str, expect: int = 0, **env: str) -> dict[str, Any]:
        done = run([*wrap, *_APP, "doctor", "--json"], environment(self.folder, self.tasks, **env))
        assert done.returncode == expect, done
        assert "Traceback" not in done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report


@pytest.fixture
def doctor(tmp_path: Path, tasks: Path) -> Iterator[Doctor]:
    yield Doctor(tmp_path, tasks)
    left = tmp_path / "s"
    assert not left.exists() or not list(left.iterdir()), "doctor left something behind"


@contextlib.contextmanager
def refused_start(folder: Path, tasks: Path, *wrap: str, **env: str) -> Iterator[str]:
    """What a server says that does not start."""
    done = run([*wrap, *_APP, "--port", str(free_port())], environment(folder, tasks, **env))
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr, done.stderr
    yield done.stderr.splitlines()[-1]


# ---------------------------------------------------------------- TB2_ISOLATION
@pytest.mark.parametrize("rung", ["auto", "1", "2", "3"])
async def test_the_rung_that_is_asked_for(make_server: MakeServer, rung: str) -> None:
    server = make_server({"TB2_ISOLATION": rung})
    async with server.client() as env:
        isolation = (await env.reset(task_id="ok")).observation.info["isolation"]
        assert isolation["rung"] == ("1" if rung == "auto" else rung)
        assert isolation["scratch"] == f"{server.scratch} (disk)"
        lacks = "; ".join(isolation["lacks"])
        assert ("RLIMIT_NPROC" in lacks) is (rung in "23")
        assert ("root inside is root outside" in lacks) is (rung == "3")
        assert (isolation["verifier"]["user_namespace"] is None) is (rung == "3")
        assert isolation["limits"].keys() == {"processes"}
        assert isolation["network"].startswith("private: ")
        await env.exec("echo ok >out.txt; echo x >/etc/passwd")
        assert (await env.evaluate()).reward == 1
    assert Path("/etc/passwd").read_text().startswith("root:")


@pytest.mark.parametrize("rung", ["4", "5"])
async def test_a_rung_for_the_unprivileged_works_or_says_what_it_needs(
    tmp_path: Path, tasks: Path, doctor: Doctor, rung: str
) -> None:
    """Root can stand on rung 4, too; 5 is for files of somebody else."""
    report = run([*_APP, "doctor", "--json"], environment(tmp_path, tasks, TB2_ISOLATION=rung))
    found = json.loads(report.stdout)
    assert found["works"] is (report.returncode == 0)
    assert found["rung"] == (rung if found["works"] else None)
    assert found["works"] or found["error"]


def test_a_rung_that_does_not_fit_names_the_call_and_the_cure(tmp_path: Path, tasks: Path) -> None:
    """Rung 1 where no user namespace is to be had."""
    with refused_start(tmp_path, tasks, *NO_USER_NAMESPACES, TB2_ISOLATION="1") as said:
        assert said.startswith("tbench2_env: this host cannot isolate episodes. Rung 1: ")
        assert "clone(" in said
        assert "No space left on device" in said
        assert "user.max_user_namespaces" in said


@pytest.mark.parametrize("rung", ["nonsense", "6", "0", "1,2", "AUTO", "e"])
def test_a_rung_that_there_is_not(tmp_path: Path, tasks: Path, rung: str) -> None:
    with refused_start(tmp_path, tasks, TB2_ISOLATION=rung) as said:
        assert "TB2_ISOLATION" in said
        assert "auto" in said
        assert "E" in said


def test_an_empty_variable_is_none(doctor: Doctor) -> None:
    assert doctor(TB2_ISOLATION="")["rung"] == "1"


# ---------------------------------------------------------------- doctor
def test_doctor_for_a_program(doctor: Doctor) -> None:
    report = doctor()
    assert (report["works"], report["rung"], report["error"]) == (True, "1", "")
    assert report["rungs"]["1"].startswith("chosen: ")
    assert report["rungs"]["2"] == "not needed"
    assert report["rungs"].keys() == {"1", "2", "3", "E", "4", "5", "none"}
    assert report["scratch"] == f"{doctor.folder}/s (disk)"
    assert report["mount_plan"][0].startswith("overlay on / (")
    assert "proc on /proc" in report["mount_plan"]
    assert report["limits"].keys() == {"memory", "processes", "cpus", "storage"}
    assert "chosen" in report["ways_out"].values()
    assert os.uname().release in report["host"]["kernel"]
    environments = report["environments"]
    assert (environments["TB2_ENVIRONMENT"], environments["registry (TB2_REGISTRY)"]) == ("auto", "none")
    assert environments["store"].endswith("0 layers, 0.0 GB")
    assert "tbench2 toolchain prepare" in environments["verifier's toolchain"]


def test_doctor_for_a_person(tmp_path: Path, tasks: Path) -> None:
    done = run([*_APP, "doctor"], environment(tmp_path, tasks))
    assert done.returncode == 0
    for word in ("concurrent isolation", "works", "isolation ladder", "chosen", "scratch", "mount plan", "limits"):
        assert word in done.stdout
    assert len({len(line) for line in done.stdout.splitlines()[1:]}) == 1, "a table"
    assert "\x1b" not in done.stdout


def test_doctor_tells_why_a_better_rung_is_not_to_be_had(doctor: Doctor) -> None:
    report = doctor(*NO_USER_NAMESPACES)
    assert (report["works"], report["rung"]) == (True, "3")
    for rung in ("1", "2"):
        assert report["rungs"][rung].startswith("refused: ")
        assert "user.max_user_namespaces" in report["rungs"][rung]
    assert any("root inside is root outside" in lack for lack in report["lacks"])


def test_doctor_where_nothing_works(doctor: Doctor) -> None:
    report = doctor(*NO_USER_NAMESPACES, *NO_SYS_ADMIN, expect=1)
    assert report["works"] is False
    assert report["rung"] is None
    assert report["error"].count("\n") == 0
    assert "unshare(" in report["error"]
    assert "user.max_user_namespaces" in report["error"]
    assert "CAP_SYS_ADMIN" in report["error"]


def test_a_server_where_nothing_works_does_not_start(tmp_path: Path, tasks: Path) -> None:
    with refused_start(tmp_path, tasks, *NO_USER_NAMESPACES, *NO_SYS_ADMIN) as said:
        assert said.startswith("tbench2_env: this host cannot isolate episodes. ")
        assert "user.max_user_namespaces" in said


def test_doctor_with_a_variable_that_cannot_be_served(tmp_path: Path, tasks: Path) -> None:
    done = run([*_APP, "doctor"], environment(tmp_path, tasks, TB2_NETWORK="both"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "TB2_NETWORK" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- two servers on one node
async def test_two_servers_on_one_node(make_server: MakeServer, tmp_path: Path) -> None:
    """With one scratch folder; the end of one is nothing to the other's episodes."""
    scratch = str(tmp_path / "shared-scratch")
    one, other = (make_server({"TB2_SCRATCH_DIR": scratch}) for _ in range(2))
    async with one.client() as a, other.client() as b:
        await a.reset(task_id="ok", episode_id="same")
        await b.reset(task_id="ok", episode_id="same")
        await a.exec("echo of a >f; python3 -m http.server 8080 >/dev/null 2>&1 &")
        await b.exec("echo of b >f; python3 -m http.server 8080 >/dev/null 2>&1 &")
        fetch = "curl -s --retry 20 --retry-connrefused --retry-delay 0 --noproxy '*' 127.0.0.1:8080/f"
        assert [(await env.exec(fetch)).output for env in (a, b)] == ["of a\n", "of b\n"]
        os.kill(one.pid, signal.SIGKILL)
        one.process.wait()
        third = make_server({"TB2_SCRATCH_DIR": scratch})  # sweeps what the first left
        assert (await b.exec(fetch)).output == "of b\n"
        async with third.client() as c:
            await c.reset(task_id="ok")
            assert (await c.exec("cat f 2>&1")).output != "of a\n"
    assert other.stop() == third.stop() == 0
    assert list(Path(scratch).iterdir()) == []


# ---------------------------------------------------------------- scratch
def test_scratch_on_an_overlay_is_refused_by_name(doctor: Doctor) -> None:
    (scratch := doctor.folder / "over").mkdir()
    report = doctor(*ON_OVERLAY, expect=1, SCRATCH=str(scratch), TB2_SCRATCH_DIR=str(scratch))
    assert f"scratch {scratch}: " in report["error"]
    assert "overlay" in report["error"]
    assert "TB2_SCRATCH_DIR" in report["error"]


async def test_scratch_in_memory_is_bounded_by_the_file_system(make_server: MakeServer, tmp_path: Path) -> None:
    """A full worktree is an error of whoever writes, as on a full disk; the episode lives on."""
    (scratch := tmp_path / "in-memory").mkdir()
    toml = "[environment]\nmemory = '2G'\nstorage = '256M'\n"
    make_task(tmp_path / "small-tasks", "small", toml=toml)
    env_vars = {"SCRATCH": str(scratch), "TB2_SCRATCH_DIR": str(scratch)}
    server = make_server(env_vars, tasks=tmp_path / "small-tasks", wrap=ON_TMPFS)
    async with server.client() as env:
        isolation = (await env.reset(task_id="small")).observation.info["isolation"]
        assert isolation["scratch"] == f"{scratch} (memory)"
        assert isolation["limits"]["storage"] == {"bytes": 256 << 20, "enforced_by": "the size of a tmpfs"}
        answer = await env.exec("dd if=/dev/zero of=endless bs=1M")
        assert "No space left on device" in answer.output
        assert answer.info["exit_code"] == 1
        assert int((await env.exec("stat -c %s endless")).output) in range(240 << 20, (256 << 20) + 1)
        assert (await env.exec("rm endless; echo room >f; cat f")).output == "room\n"
        many = await env.exec("mkdir d; cd d; for i in {1..40}; do touch $i-{1..500} || break; done 2>&1 | tail -1")
        assert "No space left on device" in many.output
        assert int((await env.exec("ls d | wc -l")).output) in range(15_000, 16_384)
        assert (await env.exec("rm -r d; echo ok >out.txt")).success
        evaluated = await env.evaluate()
        assert evaluated.reward == 1
        assert evaluated.observation.info["usage"]["storage_bytes"] < 1 << 20
