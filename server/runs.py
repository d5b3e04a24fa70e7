"""Results on disk: one folder per episode under TB2_OUTPUT_DIR, on the server's side only.

<task>.<episode>/commands.jsonl   one line per action: what, when, how long, exit code, head of the output
<task>.<episode>/verifier/        test-stdout.txt, the reward file, ctrf.json of the last evaluation
<task>.<episode>/verdict.json     what the last evaluation answered
<task>.<episode>/result.json      the outcome, once the episode has ended
"""

import contextlib
import datetime
import itertools
import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from tbench2_env.models import Tbench2Action, Tbench2Observation
from tbench2_env.server import evidence

#: Characters of a command and of its output that commands.jsonl keeps.
_HEAD = 2000
_COMMANDS, _RESULT, VERDICT = "commands.jsonl", "result.json", "verdict.json"


class Run:
    """The folder of one episode."""

    def __init__(self, folder: Path, task_id: str, episode_id: str) -> None:
        self.folder, self.task_id, self.episode_id = folder, task_id, episode_id
        self.verifier_folder = folder / evidence.FOLDER

    def record(self, entry: dict[str, Any]) -> None:
        """Append one action. Texts are shortened. A full disk loses the line, not the episode."""
        short = {key: value[:_HEAD] if isinstance(value, str) else value for key, value in entry.items()}
        with contextlib.suppress(OSError), (self.folder / _COMMANDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(short) + "\n")

    def write_verdict(self, verdict: dict[str, Any]) -> None:
        _write(self.folder / VERDICT, verdict)

    def forget_evidence(self) -> None:
        """An evaluation without any must not show that of the one before."""
        evidence.forget(self.verifier_folder)

    def write_result(self, result: dict[str, Any]) -> None:
        _write(self.folder / _RESULT, result)


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
        self._live: set[Path] = set()
        self._lock = threading.Lock()

    def begin(self, task_id: str, episode_id: str) -> Run:
        """A fresh folder; an episode id that was used before gets a number. Raises: OSError."""
        for suffix in itertools.chain([""], (f".{n}" for n in itertools.count(2))):
            folder = self._folder / f"{task_id}.{episode_id}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            (folder / _COMMANDS).touch()
            self._live.add(folder)
            return Run(folder, task_id, episode_id)
        raise AssertionError("itertools.count ended")

    def end(self, run: Run) -> None:
        """The run may now be removed, and the oldest beyond the bound are. Blocks: call it in a thread."""
        with self._lock:
            self._live.discard(run.folder)
            for folder in self._ended()[: -self._keep or None]:
                shutil.rmtree(folder, ignore_errors=True)

    def find(self, episode_id: str) -> Path | None:
        """The folder of the last ended episode with this id, also of one before this server's start. Blocks."""
        name = re.compile(rf".*\.{re.escape(episode_id)}(\.\d+)?", re.DOTALL)
        for folder in reversed(self._ended()):
            if name.fullmatch(folder.name):
                # Task ids and episode ids may both have dots.
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                    if json.loads((folder / _RESULT).read_bytes())["episode_id"] == episode_id:
                        return folder
        return None

    def _ended(self) -> list[Path]:
        """Oldest first. Only what this module made counts: the output folder also holds the cache."""
        found = []
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if folder not in self._live:
                    found.append(((folder / _COMMANDS).stat().st_mtime_ns, folder))
        return [folder for _, folder in sorted(found)]
