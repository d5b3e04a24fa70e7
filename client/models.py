"""What travels on the wire, as data: actions, observations and state. Nothing here does I/O.

Names, types and defaults are those of upstream's `tbench2_env.models` and of OpenEnv's `Action`, `Observation` and
`State`, written out so that a client needs neither. Works with any pydantic 2.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

ObsT = TypeVar("ObsT")


class Tbench2Action(BaseModel):
    """One thing to do in the episode. Unknown fields are refused, here and by the server."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    # A plain string: which types exist is the server's to say, it answers an unknown one with success=False.
    action_type: str = Field(default="exec", description="exec, write, view, wait, kill, write_file, evaluate or close")
    command: str = Field(default="", description="shell text of exec, or the input of write")
    session_id: str | None = Field(default=None, description="a named terminal; none: the episode's own shell")
    block: bool = Field(default=True, description="exec: wait for the command to end")
    wait_seconds: float | None = Field(default=None, description="wait: how long, in seconds")
    file_path: str = Field(default="", description="write_file: path inside the sandbox")
    content: str = Field(default="", description="write_file: the file's text")
    metadata: dict[str, Any] = Field(default_factory=dict, description="evaluate: keep=true; free otherwise")


class Tbench2Observation(BaseModel):
    """What an action or a reset led to. Fields a newer server adds are ignored."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    instruction: str = Field(default="", description="the task's text, on reset")
    output: str = Field(default="", description="standard output and error of the command, as one text")
    success: bool = Field(default=True, description="the action was carried out; a non-zero exit status still is")
    error: str = Field(default="", description="why it was not, or why there is no verdict")
    task_id: str = ""
    task_path: str = ""
    session_id: str | None = Field(default=None, description="the named terminal, if one was used")
    action_type: str = Field(default="", description="the action this answers")
    info: dict[str, Any] = Field(default_factory=dict, description="exit_code, harness, tests_passed, timeouts, ...")
    reward: bool | int | float | None = Field(default=None, description="the verdict; None is no verdict, never zero")
    done: bool = Field(default=False, description="the episode is over")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Tbench2State(BaseModel):
    """The server's view of the episode. Further fields are kept as attributes."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    episode_id: str | None = None
    step_count: int = Field(default=0, ge=0, description="actions since reset")
    task_id: str = ""
    task_path: str = ""
    session_id: str = ""
    terminal_ready: bool = False
    last_action_type: str = ""
    last_command: str = ""
    last_output: str = ""


@dataclass(frozen=True)
class StepResult(Generic[ObsT]):
    """OpenEnv's triple: an observation with its reward (None: no verdict) and whether the episode is over."""

    observation: ObsT
    reward: bool | int | float | None = None
    done: bool = False
