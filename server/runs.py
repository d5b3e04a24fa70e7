"""Results on disk: one folder per episode under TB2_OUTPUT_DIR, on the server's side only.

<task>.<episode>/commands.jsonl   one line per action: what, when, how long, exit code, head of the output
<task>.<episode>/verifier/        test-stdout.txt, the reward file, ctrf.json of the last evaluation
<task>.<episode>/verdict.json     what the last evaluation answered
<task>.<episode>/result.json      the outcome, once the episode has ended
"""

import concurrent.futures
import contextlib
import datetime
import heapq
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from tbench2_env.models import Tbench2Action, Tbench2Observation
from tbench2_env.server import evidence

#: Characters of a command and of its output that commands.jsonl keeps.
_HEAD = 2000
_COMMANDS, _RESULT, VERDICT = "commands.jsonl", "result.json", "verdict.json"
#: Seconds that the list of ended runs is taken for true: others, too, may add to the folder, or remove from it.
_LISTED_S = 10.0


class Run:
    """The folder of one episode, and its commands.jsonl, open until `close`. Raises, made: OSError."""

    def __init__(self, folder: Path, task_id: str, episode_id: str) -> None:
        self.folder, self.task_id, self.episode_id = folder, task_id, episode_id
        self.verifier_folder = folder / evidence.FOLDER
        self._commands = os.open(folder / _COMMANDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def record(self, entry: dict[str, Any]) -> None:
        """Append one action. Texts are shortened. A full disk loses the line, not the episode."""
        short = {key: value[:_HEAD] if isinstance(value, str) else value for key, value in entry.items()}
        with contextlib.suppress(OSError):
            os.write(self._commands, f"{json.dumps(short)}\n".encode())

    def close(self) -> int:
        """Record nothing more; answers with when the last line was written, in nanoseconds since the epoch."""
        fd, self._commands = self._commands, -1
        written = os.fstat(fd).st_mtime_ns
        os.close(fd)
        return written

    def write_verdict(self, verdict: dict[str, Any]) -> None:
        _write(self.folder / VERDICT, verdict)

    def forget_evidence(self) -> None:
        """An evaluation without any must not show that of the one before."""
        evidence.forget(self.verifier_folder)


def entry(action: Tbench2Action, observation: Tbench2Observation, begun: float) -> dict[str, Any]:
    """An action that began at `begun` and has just been answered, as a line of commands.jsonl."""
    return {
        "action_type": action.action_type,
        "command": action.command or action.file_path,
        "session_id": action.session_id,
        "begun": iso(begun),
        "seconds": round(time.time() - begun, 6),
        "success": observation.success,
        "error": observation.error,
        "exit_code": observation.info.get("exit_code"),
        "reward": observation.reward,
        "output_head": observation.output,
    }


def iso(seconds: float) -> str:
    """A time since the epoch as these files have it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file as a whole; a full disk leaves the old one."""
    with contextlib.suppress(OSError):
        evidence.replace(path, f"{json.dumps(content, indent=1)}\n".encode())


class Runs:
    """All runs of one output folder. `keep` bounds how many ended ones stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._live: set[str] = set()
        #: When the ended ones were last active, and their names: a heap, the oldest first.
        self._ended: list[tuple[int, str]] = []
        self._listed_at = -_LISTED_S
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "results")

    def begin(self, task_id: str, episode_id: str) -> Run:
        """A fresh folder; an episode id that was used before gets a number. Raises: OSError."""
        for suffix in itertools.chain([""], (f".{n}" for n in itertools.count(2))):
            folder = self._folder / f"{task_id}.{episode_id}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            self._live.add(folder.name)
            return Run(folder, task_id, episode_id)
        raise AssertionError("itertools.count ended")

    def end(self, run: Run, result: dict[str, Any] | None) -> None:
        """The run will have its result, and may then be removed, as the oldest beyond the bound are."""
        self._writer.submit(self._end, run, result)

    def close(self) -> None:
        """Finish what was begun. Blocks."""
        self._writer.shutdown()

    def _end(self, run: Run, result: dict[str, Any] | None) -> None:
        if result is not None:
            _write(run.folder / _RESULT, result)
        heapq.heappush(self._ended, (run.close(), run.folder.name))
        self._live.discard(run.folder.name)
        if len(self._ended) > self._keep or self._listed_at < 0:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        if time.monotonic() - self._listed_at >= _LISTED_S:
            self._ended, self._listed_at = self._list_ended(), time.monotonic()
        while len(self._ended) > self._keep:
            shutil.rmtree(self._folder / heapq.heappop(self._ended)[1], ignore_errors=True)

    def find(self, episode_id: str) -> Path | None:
        """The folder of the last ended episode with this id, also of one before this server's start. Blocks."""
        is_named = re.compile(rf".*\.{re.escape(episode_id)}(\.\d+)?", re.DOTALL).fullmatch
        for _, name in reversed(self._list_ended()):
            if is_named(name):
                # Task ids and episode ids may both have dots.
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                    if json.loads((self._folder / name / _RESULT).read_bytes())["episode_id"] == episode_id:
                        return self._folder / name
        return None

    def _list_ended(self) -> list[tuple[int, str]]:
        """Oldest first. Only what this module made counts: the output folder also holds the cache."""
        found = []
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if folder.name not in self._live:
                    found.append(((folder / _COMMANDS).stat().st_mtime_ns, folder.name))
        return sorted(found)
