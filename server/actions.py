"""The flat wire action, parsed once into a typed one, and what carrying it out comes to."""

from dataclasses import dataclass, field
from typing import Any

from tbench2_env.models import Tbench2Action

_PATH_MAX = 4096
_NAME_MAX = 255
WAIT_MAX_S = 3600.0
DEFAULT_TERMINAL = "tb2-session"


class BadAction(Exception):
    """The client's action cannot be carried out as it is; the text names the field and the fix."""


@dataclass(frozen=True)
class Exec:
    command: str


@dataclass(frozen=True)
class Start:
    """exec with block=false: a program in a terminal; an interactive shell when there is no command."""

    terminal: str
    command: str


@dataclass(frozen=True)
class Write:
    terminal: str
    text: str


@dataclass(frozen=True)
class View:
    terminal: str


@dataclass(frozen=True)
class Wait:
    terminal: str
    seconds: float


@dataclass(frozen=True)
class Kill:
    terminal: str


@dataclass(frozen=True)
class WriteFile:
    path: str
    content: str


@dataclass(frozen=True)
class Evaluate:
    """`keep`: the client will go on, so the answer is not done."""

    keep: bool


@dataclass(frozen=True)
class Close:
    pass


@dataclass(frozen=True)
class Answer:
    """What an observation says of its action, in the observation's words."""

    output: str = ""
    success: bool = True
    error: str = ""
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


Action = Exec | Start | Write | View | Wait | Kill | WriteFile | Evaluate | Close


def parse(action: Tbench2Action) -> Action:
    """Raises: BadAction."""
    match action.action_type:
        case "exec":
            return Exec(action.command) if action.block else Start(_name(action, DEFAULT_TERMINAL), action.command)
        case "write":
            return Write(_name(action), _typed(action.command))
        case "view":
            return View(_name(action))
        case "wait":
            return Wait(_name(action), _seconds(action))
        case "kill":
            return Kill(_name(action))
        case "write_file":
            return WriteFile(_path(action), action.content)
        case "evaluate":
            return Evaluate(_keep(action))
        case "close":
            return Close()
    raise BadAction(
        f"action_type {action.action_type[:80]!r} is unknown: use exec, write, view, wait, kill, write_file, evaluate "
        "or close"
    )


def _name(action: Tbench2Action, default: str | None = None) -> str:
    name = action.session_id or default
    if not name:
        raise BadAction(f"session_id is required for action_type={action.action_type!r}: name the terminal")
    if len(name) > _NAME_MAX:
        raise BadAction(f"session_id has {len(name)} characters, {_NAME_MAX} at most")
    return name


def _typed(text: str) -> str:
    """What a line needs to be sent off, unless control characters say that the client knows its keys."""
    return text if any(ord(char) < 32 for char in text) else text + "\n"


def _seconds(action: Tbench2Action) -> float:
    seconds = 0.0 if action.wait_seconds is None else action.wait_seconds
    if not 0 <= seconds <= WAIT_MAX_S:
        raise BadAction(f"wait_seconds is {seconds}: give a number from 0 to {WAIT_MAX_S:g}")
    return seconds


def _keep(action: Tbench2Action) -> bool:
    keep = action.metadata.get("keep", False)
    if not isinstance(keep, bool):
        raise BadAction(f"metadata.keep is {repr(keep)[:80]}: give true or false")
    return keep


def _path(action: Tbench2Action) -> str:
    path = action.file_path
    if not path or "\0" in path or len(path) > _PATH_MAX:
        raise BadAction(f"file_path must be 1 to {_PATH_MAX} characters without NUL")
    if path.endswith("/"):
        raise BadAction(f"file_path {path[:80]!r} names a folder: give the file's own name")
    return path
