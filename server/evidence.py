"""What a verifier leaves besides its reward, kept and read on the server's side: its log, its files, its CTRF report.

CTRF (https://ctrf.io) is the JSON that pytest-json-ctrf writes: `results.summary` counts, `results.tests` is a list.
Nothing here fails a verdict: what is too large, malformed or not a regular file is left out.
"""

import contextlib
import errno
import json
import math
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tbench2_env.server.shell import Result

LOG, REPORT = "test-stdout.txt", "ctrf.json"
#: The folder of both in a run's folder.
FOLDER = "verifier"
FILE_MAX_BYTES = 16 << 20
TESTS_MAX = 500
NAME_MAX, MESSAGE_MAX = 300, 500
#: JSON values of a report. Parsed, each takes up to 80 bytes, however few it has in the file; a report has 10 per test.
_VALUES_MAX = 1_000_000
_COUNT_MAX = 1_000_000_000
_STATUSES = ("passed", "failed", "skipped", "pending", "other")
_REWARD_FILES = ("reward.txt", "reward.json")
#: For the memory, not for the order.
_parsing = threading.Lock()


@dataclass(frozen=True)
class Evidence:
    """How a verifier's run went. `alive` names the agent's processes at its beginning; `tests` is `info.tests`.

    `reports` are the names of the CTRF files that were asked for and are there, `toolchain` what was given of the kit
    or of the uv cache.
    """

    exit_code: int
    seconds: float
    alive: list[str]
    reports: frozenset[str]
    tests: dict[str, Any] | None
    toolchain: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """`tests` and `verifier` of an evaluation's `info`; `log` is relative to the run's folder."""
        verifier = {
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 6),
            "log": f"{FOLDER}/{LOG}",
            "alive": self.alive,
            **({"toolchain": dict(self.toolchain)} if self.toolchain else {}),
        }
        return {"verifier": verifier} if self.tests is None else {"tests": self.tests, "verifier": verifier}


def collect(folder: Path, reports: Sequence[str], result: Result, alive: list[str], kept: Path) -> Evidence:
    """Keep what a verifier printed and wrote to `folder` in `kept`, in place of what an earlier one left there.

    `reports` are the names of the CTRF files that its test.sh asks for. Blocks: call it in a thread.
    """
    there = [name for name in reports if os.path.lexists(folder / name)]
    try:
        kept.mkdir()
    except FileExistsError:
        forget(kept)
    except OSError:  # nothing can be kept
        pass
    # Its bound is TB2_OUTPUT_LIMIT_BYTES; the text says where something was cut.
    with contextlib.suppress(OSError):
        replace(kept / LOG, result.output.encode(errors="replace"))
    for name in _REWARD_FILES:
        _keep(folder / name, kept / name)
    has_report = _keep(folder / (there or [REPORT])[0], kept / REPORT)
    tests = read_report(kept / REPORT) if has_report else None
    return Evidence(result.exit_code, result.seconds, alive, frozenset(there), tests)


def forget(kept: Path) -> None:
    """Remove what an earlier verifier left; whoever reads it at the moment still has it."""
    for name in (LOG, REPORT, *_REWARD_FILES):
        with contextlib.suppress(OSError):
            (kept / name).unlink()


def replace(path: Path, data: bytes) -> None:
    """Have the file as a whole; who reads the old one goes on with that. Raises: OSError."""
    fresh = Path(f"{path}.new")
    fresh.write_bytes(data)
    fresh.rename(path)


def _keep(source: Path, target: Path) -> bool:
    """Whether it is there."""
    with contextlib.suppress(OSError, ValueError):
        file = open_regular(source, FILE_MAX_BYTES)
        if file is not None:
            with file:
                # A buffer of its size, not of the most that it may have.
                replace(target, file.read(os.fstat(file.fileno()).st_size))
            return True
    return False


def open_regular(path: Path, max_bytes: int) -> BinaryIO | None:
    """The file opened, if there is one; nothing is followed or waited for. Raises: ValueError saying what is wrong."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        kind = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(f"{path.name} is {kind}") from None
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_size <= max_bytes:
        return os.fdopen(fd, "rb")
    os.close(fd)
    wrong = f"has {info.st_size} bytes, {max_bytes} at most" if stat.S_ISREG(info.st_mode) else "is not a regular file"
    raise ValueError(f"{path.name} {wrong}")


# ---------------------------------------------------------------- CTRF
def read_report(path: Path) -> dict[str, Any] | None:
    """A CTRF report as {total, passed, failed, skipped, tests: [{name, status, duration, message}], truncated}.

    `duration` is the report's number (CTRF: milliseconds) or None. At most TESTS_MAX tests are listed, the first ones;
    the counts are of all. None when there is no report, or what is there is none.
    """
    with _parsing, contextlib.suppress(OSError, ValueError, RecursionError):
        data = path.read_bytes()
        if sum(map(data.count, (b"[", b"{", b","))) <= _VALUES_MAX:
            return _summary(json.loads(data))
    return None


def _summary(report: Any) -> dict[str, Any] | None:
    results = _table(_table(report).get("results"))
    found, counts = results.get("tests"), _table(results.get("summary"))
    tests = [test for test in found if isinstance(test, dict)] if isinstance(found, list) else []
    if not tests and not counts:
        return None
    statuses = [_status(test) for test in tests]
    return {
        "total": _count(counts.get("tests"), len(tests)),
        **{name: _count(counts.get(name), statuses.count(name)) for name in ("passed", "failed", "skipped")},
        "tests": [_test(test) for test in tests[:TESTS_MAX]],
        "truncated": len(tests) > TESTS_MAX,
    }


def _test(test: dict[str, Any]) -> dict[str, Any]:
    message = _text(test.get("message"), MESSAGE_MAX) or _text(test.get("trace"), MESSAGE_MAX)
    return {
        "name": _text(test.get("name"), NAME_MAX),
        "status": _status(test),
        "duration": _duration(test.get("duration")),
        "message": message,
    }


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any, otherwise: int) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MAX
    return value if good else otherwise


def _status(test: dict[str, Any]) -> str:
    status = test.get("status")
    return status if isinstance(status, str) and status in _STATUSES else "other"


def _duration(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _COUNT_MAX
    return value if good and math.isfinite(value) else None


def _text(value: Any, most: int) -> str:
    """Of at most so many characters. JSON can say lone surrogates, which no other encoding can."""
    return value[:most].encode(errors="replace").decode() if isinstance(value, str) else ""
