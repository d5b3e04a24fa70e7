"""Bodies and answers of the HTTP API, as models, so that they are in the OpenAPI document; OpenEnv's answer shape."""

import datetime
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from tbench2_env.isolation.changes import Kind
from tbench2_env.models import Tbench2Action, Tbench2Observation
from tbench2_env.server.ending import End
from tbench2_env.server.session import ResetRequest

#: Seconds that one command may be given.
TIMEOUT_MAX_S = 86_400
EpisodeId = Annotated[str, Path(min_length=1, max_length=255)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepRequest(_Body):
    """OpenEnv's step, with the episode it is for."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "examples": [{"episode_id": "0123abcd", "action": {"action_type": "exec", "command": "ls"}}]
        },
    )

    action: Tbench2Action
    episode_id: str = Field(min_length=1, max_length=255, description="As in reset's observation.metadata.episode_id")
    timeout_s: float | None = Field(None, gt=0, le=TIMEOUT_MAX_S, description="Replaces TB2_COMMAND_TIMEOUT_S")


class StepAnswer(BaseModel):
    """OpenEnv's answer to reset and step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


def serialize(observation: Tbench2Observation) -> dict[str, Any]:
    """OpenEnv's shape of an answer: reward and done beside the observation."""
    fields = observation.model_dump(mode="json", exclude={"reward", "done"})
    return {"observation": fields, "reward": observation.reward, "done": observation.done}


class CreateRequest(ResetRequest):
    """What to begin an episode of."""


class EpisodeCreated(BaseModel):
    episode_id: str
    task_id: str
    instruction: str
    info: dict[str, Any] = Field(description="isolation, workdir, timeouts, unmet needs")


class EpisodeInfo(BaseModel):
    """One episode. `end` and `message` are set once it has ended."""

    episode_id: str
    task_id: str
    state: Literal["live", "ended"]
    busy: bool
    begun: datetime.datetime
    reward: float | None
    end: End | None = None
    message: str = ""


class EpisodePage(BaseModel):
    episodes: list[EpisodeInfo]
    total: int = Field(description="Episodes that match, on all pages")
    next_offset: int | None = Field(description="Where the next page begins; null on the last")


class ExecRequest(_Body):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"command": "ls -la", "timeout_s": 60}]})

    command: str
    timeout_s: float | None = Field(None, gt=0, le=TIMEOUT_MAX_S, description="Default: TB2_COMMAND_TIMEOUT_S")


class ExecAnswer(BaseModel):
    """`success`: the command was carried out; its own exit code may still be anything."""

    output: str
    success: bool
    error: str
    exit_code: int | None
    timed_out: bool


class EvaluateAnswer(BaseModel):
    """`reward` is null when there is no verdict, which is never a 0; `error` then says why."""

    reward: float | None
    done: bool
    output: str
    error: str
    info: dict[str, Any]


class VerdictAnswer(EvaluateAnswer):
    """An evaluation's answer, as it was given."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "episode_id": "0123abcd", "task_id": "hello-note", "evaluated": "2026-11-29T22:00:00.000+00:00",
                    "reward": 0.0, "done": True, "error": "",
                    "output": "FAILED test_outputs.py::test_note - AssertionError\n1 failed, 1 passed in 0.03s\n",
                    "info": {
                        "harness": "tests/test.sh", "tests_passed": False, "exit_code": 0, "seconds": 1.5,
                        "tests": {
                            "total": 2, "passed": 1, "failed": 1, "skipped": 0, "truncated": False,
                            "tests": [
                                {"name": "test_file", "status": "passed", "duration": 1, "message": ""},
                                {"name": "test_note", "status": "failed", "duration": 2, "message": "AssertionError"},
                            ],
                        },
                        "verifier": {
                            "exit_code": 0, "seconds": 1.5, "log": "verifier/test-stdout.txt", "alive": ["nginx"],
                        },
                    },
                },
            ]
        }
    )  # fmt: skip

    episode_id: str
    task_id: str
    evaluated: datetime.datetime


class CtrfReport(BaseModel):
    """A report in the Common Test Report Format, https://ctrf.io, as a task's harness wrote it."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "results": {
                        "tool": {"name": "pytest"},
                        "summary": {"tests": 1, "passed": 1, "failed": 0, "skipped": 0, "pending": 0, "other": 0},
                        "tests": [{"name": "test_outputs.py::test_note", "status": "passed", "duration": 1}],
                    }
                }
            ]
        },
    )

    results: dict[str, Any]


class OperationStarted(BaseModel):
    """With wait=0: where to ask for the answer."""

    handle: str
    url: str


class OperationAnswer(BaseModel):
    """`answer` is what the request would have answered had it waited; null while `done` is false."""

    handle: str
    done: bool
    answer: ExecAnswer | EvaluateAnswer | None = None


class ChangedEntry(BaseModel):
    """`size` in bytes and `mode` are as they are now, of what is deleted as they were."""

    path: str = Field(description="Absolute; bytes that are no UTF-8 are shown as U+FFFD")
    type: Literal["file", "folder", "link", "other"]
    size: int
    mode: str = Field(description="Permissions, octal", examples=["644"])
    kind: Kind = Field(description="In `modified`, `metadata` is a change of mode or owner only")
    origin: str | None = Field(None, description="Where a renamed folder was; all that was in it came along")
    quoted: str | None = Field(None, description="The path's bytes, percent-encoded, where they are no UTF-8")


class EpisodeDiff(BaseModel):
    """What an episode changed. A deleted folder is one entry, whatever was in it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "added": [
                        {"path": "/app/out.txt", "type": "file", "size": 3, "mode": "644", "kind": "added"},
                    ],
                    "modified": [
                        {"path": "/etc/hosts", "type": "file", "size": 90, "mode": "644", "kind": "modified"},
                    ],
                    "deleted": [], "unreadable": [], "truncated": False,
                }
            ]
        }
    )  # fmt: skip

    added: list[ChangedEntry]
    modified: list[ChangedEntry]
    deleted: list[ChangedEntry]
    unreadable: list[str] = Field(description="Folders that the server may not look into, or whose path is too long")
    truncated: bool = Field(description="There is more than the server lists")
