"""What the oracle found, task by task: a JSON file that is written whole after each task, so that a run can go on."""

import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Result(BaseModel):
    """One task's end. Texts are the ends of what was printed, and only kept where the reward is not 1."""

    #: The verdict; None: there is none, for `reason`.
    reward: float | None = None
    #: The server's `info.no_verdict`; or `no_solution`, `server_lost`, and `_failed` and `_timeout` of reset, solve and
    #: evaluate. With a reward that is not 1: `solve_failed`, where the solution itself ended badly.
    reason: str = ""
    error: str = ""
    #: The server came to an answer: the next run need not ask again.
    final: bool = False
    #: By phase: reset, solve, evaluate.
    seconds: dict[str, float] = {}
    solve_exit_code: int | None = None
    solve_timed_out: bool = False
    solve_output: str = ""
    tests_output: str = ""
    #: `info.tests` of evaluate, with those tests only that did not pass.
    tests: dict[str, Any] | None = None
    #: `info.environment` and `info.unmet` of reset, `info.verifier.toolchain` of evaluate.
    environment: Any = None
    unmet: list[str] = []
    toolchain: Any = None

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class ResultsError(Exception):
    """The file cannot be used for this run; the text names it and the fix."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    #: Whether solutions were carried out, or nothing was done to the tasks.
    solved: bool
    results: dict[str, Result]


class Results:
    """The results in a file, by task id."""

    def __init__(self, path: Path, content: _File) -> None:
        self._path, self._content = path, content

    @classmethod
    def open(cls, path: Path, *, solved: bool) -> Self:
        """Those of an earlier run, if there was one. Raises: ResultsError."""
        try:
            content = _File.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            content = _File(solved=solved, results={})
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "not written by tbench2 oracle"
            raise ResultsError(f"--out {path}: {why}; name another file") from None
        if content.solved != solved:
            how = "with" if content.solved else "without"
            raise ResultsError(f"--out {path} is of a run {how} solutions; name another file")
        return cls(path, content)

    def get(self, task_id: str) -> Result | None:
        return self._content.results.get(task_id)

    def put(self, task_id: str, result: Result) -> None:
        """Keep one, on disk, too. Raises: OSError."""
        found = {**self._content.results, task_id: result}
        self._content.results = {name: found[name] for name in sorted(found)}
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            fresh.write_text(self._content.model_dump_json(indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._path)
        finally:
            fresh.unlink(missing_ok=True)
