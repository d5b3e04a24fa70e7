"""What a test.sh installs, read from its text: uv, Python versions and the requirements of each environment it makes.

Nothing is executed. Of bash it understands continued lines, comments, here-documents, `;`, `&&`, `|` and variables set
to plain text; of uv and pip the commands that test scripts have (TASKS.md, "tests/test.sh"). What it does not
understand it says (`Pins.unclear`) and does not guess.
"""

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

#: Where uv's own installer is fetched from ends so, with a version or without.
_INSTALLER = re.compile(r"/uv/(?:(\d+\.\d+\.\d+)/)?install\.sh\b")
_VERSION = re.compile(r"^(?:python|cpython[-@]?)?(\d+\.\d+)(?:\.\d+)?$")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_CONCERNS = re.compile(r"\b(?:uvx?|pip3?)\b")
_OPERATORS = frozenset(";&|()<>")
#: Words of bash, and programs that run the command after them.
_BEFORE_COMMANDS = frozenset({
    "if", "then", "elif", "else", "while", "until", "do", "!", "{", "time", "exec", "command", "sudo", "nohup", "env",
})  # fmt: skip
_PIP = re.compile(r"^(?:\S*/)?pip(?:3(?:\.\d+)?)?$")
_PYTHON = re.compile(r"^(?:\S*/)?python(\d(?:\.\d+)?)?$")

#: Options of uv's and pip's commands that no value follows.
_FLAGS: Final = frozenset({
    "-q", "--quiet", "-v", "--verbose", "-n", "--no-cache", "--no-cache-dir", "--isolated", "--offline", "--native-tls",
    "--no-progress", "--no-config", "-U", "--upgrade", "--system", "--break-system-packages", "--user", "--pre",
    "--no-project", "--no-sync", "--frozen", "--locked", "--active", "--seed", "--clear", "--allow-existing",
    "--managed-python", "--no-managed-python", "--no-python-downloads", "--force-reinstall", "--reinstall",
    "--ignore-installed", "-I", "--no-input", "--disable-pip-version-check", "--dev", "--bare", "--no-readme",
    "--refresh", "--no-warn-script-location", "--prefer-binary", "--no-build-isolation",
})  # fmt: skip
#: Options with a value that does not say what is installed.
_VALUES: Final = frozenset({
    "--index-strategy", "--link-mode", "--cache-dir", "--prompt", "--timeout", "--retries", "--root-user-action",
    "--python-preference", "--color", "--name", "--directory", "--project", "--default-timeout", "--resolution",
    "--prerelease", "--trusted-host",
})  # fmt: skip
_INDEXES: Final = frozenset({
    "--index", "--default-index", "--index-url", "-i", "--extra-index-url", "-f", "--find-links",
})  # fmt: skip
_PYTHONS: Final = frozenset({"-p", "--python"})
_WITH: Final = frozenset({"-w", "--with", "--from"})
_FILES: Final = frozenset({
    "-r", "--requirement", "--with-requirements", "-c", "--constraint", "-e", "--editable", "--with-editable",
})  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """Requirements that one command wants installed together. `python` is "3.13", or None: one that is there.

    `tool` is "uv" or "pip"; `indexes` are package indexes that the command names besides the usual one.
    """

    tool: str
    python: str | None
    requirements: tuple[str, ...]
    indexes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pins:
    """All that a test.sh installs. `uv` is the version it fetches, "" if any will do, None if it fetches none.

    `pythons` are the versions that it gives uv by name; `unclear` has a sentence for each command not understood.
    """

    uv: str | None = None
    uses_uv: bool = False
    pythons: tuple[str, ...] = ()
    environments: tuple[Environment, ...] = ()
    unclear: tuple[str, ...] = ()

    @property
    def uses_pip(self) -> bool:
        return any(each.tool == "pip" for each in self.environments)

    @property
    def uses_any(self) -> bool:
        return self.uses_uv or self.uses_pip


@functools.lru_cache(maxsize=256)
def read(text: str) -> Pins:
    """What a test.sh with this text installs."""
    reader = _Reader()
    for number, line in _logical_lines(text):
        reader.read(number, line)
    return reader.pins()


# ---------------------------------------------------------------- bash
def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, and the number of their first; here-documents are left out."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, first in lines:
        line = first
        while line.endswith("\\") and (more := next(lines, None)) is not None:
            line = f"{line[:-1]} {more[1].lstrip()}"
        if (heredoc := _HEREDOC.search(line)) is not None:
            for _, inside in lines:
                if inside.strip() == heredoc[2]:
                    break
        yield number, line


def _commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a line. Raises: ValueError for quotes that do not end on it."""
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    for word in lexer:
        if word and set(word) <= _OPERATORS:
            yield words
            words = []
        else:
            words.append(word)
    yield words


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), word)


# ---------------------------------------------------------------- uv and pip
@dataclass
class _Words:
    """A command's words, sorted out."""

    plain: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    python: str | None = None


class _Unclear(Exception):
    """A command that is not understood; the text says what of it."""


class _Reader:
    """Reads the commands of one script, in order."""

    def __init__(self) -> None:
        self._variables: dict[str, str] = {}
        self._uv: str | None = None
        self._uses_uv = False
        self._venv: str | None = None
        self._pythons: list[str] = []
        self._environments: list[Environment] = []
        self._unclear: list[str] = []

    def pins(self) -> Pins:
        once = dict.fromkeys
        return Pins(
            self._uv, self._uses_uv, tuple(once(self._pythons)), tuple(once(self._environments)), tuple(self._unclear)
        )

    def read(self, number: int, line: str) -> None:
        try:
            for words in _commands(line):
                self._command([_expanded(word, self._variables) for word in words])
        except _Unclear as unclear:
            self._unclear.append(f"line {number}: {unclear}")
        except ValueError as error:
            if _CONCERNS.search(line):
                self._unclear.append(f"line {number}: {error}")

    def _command(self, words: list[str]) -> None:
        for word in words:
            if (installer := _INSTALLER.search(word)) is not None:
                self._uv, self._uses_uv = installer[1] or "", True
        while words and (words[0] in _BEFORE_COMMANDS or self._assigns(words[0])):
            words = words[1:]
        match words:
            case ["uvx", *rest] | ["uv", "tool", "run", *rest]:
                self._run_tool(rest)
            case ["uv", *rest]:
                self._uses_uv = True
                self._uv_command(rest)
            case [python, "-m", "pip", "install", *rest] if _PYTHON.match(python):
                version = _PYTHON.match(python)
                self._pip_install(rest, version[1] if version and "." in (version[1] or "") else None)
            case [pip, "install", *rest] if _PIP.match(pip):
                self._pip_install(rest, None)

    def _assigns(self, word: str) -> bool:
        assignment = _ASSIGNMENT.match(word)
        if assignment is not None:
            self._variables[assignment[1]] = assignment[2]
        return assignment is not None

    def _run_tool(self, rest: list[str]) -> None:
        self._uses_uv = True
        words = _sorted_out(rest, stop_at_plain=True)
        if not words.plain:
            raise _Unclear("uvx runs no tool")
        tool = words.plain[0].replace("@latest", "").replace("@", "==", 1)
        # With --from it is a program's name, which need not be its package's.
        named = [] if any(word.partition("=")[0] == "--from" for word in rest) else [tool]
        self._add("uv", words.python, [*named, *words.extra], words.indexes)

    def _uv_command(self, rest: list[str]) -> None:
        match rest:
            case ["pip", "install", *more]:
                words = _sorted_out(more)
                self._add("uv", words.python or self._venv, words.plain, words.indexes)
            case ["venv", *more]:
                self._venv = _sorted_out(more).python
                self._add("uv", self._venv, [], [])
            case ["run", *more]:
                words = _sorted_out(more, stop_at_plain=True)
                self._add("uv", words.python or self._venv, words.extra, words.indexes)
            case ["init", *more]:
                self._venv = _sorted_out(more).python
            case ["add", *more]:
                words = _sorted_out(more)
                self._add("uv", words.python or self._venv, words.plain, words.indexes)
            case ["python", "install" | "pin", *more]:
                for version in _sorted_out(more).plain:
                    self._add("uv", _python(version), [], [])
            case ["--version" | "-V" | "self" | "cache", *_]:
                pass
            case _:
                raise _Unclear(f"uv {' '.join(rest[:2])}: what that installs is not in the script")

    def _pip_install(self, rest: list[str], python: str | None) -> None:
        words = _sorted_out(rest)
        self._add("pip", python, words.plain, words.indexes)

    def _add(self, tool: str, python: str | None, requirements: Sequence[str], indexes: Sequence[str]) -> None:
        """What can be had is noted even if the command also wants what cannot. Raises: _Unclear."""
        if python is not None and tool == "uv":
            self._pythons.append(python)
        good: list[str] = []
        bad: list[str] = []
        for word in requirements:
            (good if _is_plain(word) else bad).append(word)
        pinned = _without_repeats(good)
        if pinned:
            self._environments.append(Environment(tool, python, pinned, tuple(indexes)))
        if bad:
            raise _Unclear(f"{', '.join(bad)}: not a requirement that a package index serves")


def _sorted_out(rest: list[str], *, stop_at_plain: bool = False) -> _Words:
    """Raises: _Unclear for an option of which it is not known whether a value follows."""
    words, left = _Words(), list(rest)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            words.plain.append(word)
            if stop_at_plain:
                break
            continue
        option, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:].lstrip("="))
        if word in _FLAGS or (option in _FLAGS and not value):
            continue
        known = next((kind for kind in (_PYTHONS, _WITH, _INDEXES, _VALUES) if option in kind), None)
        if known is None:
            what = "names a file" if option in _FILES else "is not known here"
            raise _Unclear(f"{word}: this option {what}")
        if not value:
            if not left:
                raise _Unclear(f"{word}: no value follows")
            value = left.pop(0)
        if known is _PYTHONS:
            words.python = _python(value)
        elif known is _WITH:
            words.extra.extend(value.split(",") if option != "--from" else [value])
        elif known is _INDEXES:
            words.indexes.append(value.rpartition("=")[2] if option in ("--index", "--default-index") else value)
    return words


def _python(text: str) -> str:
    """Raises: _Unclear."""
    match = _VERSION.match(text)
    if match is None:
        raise _Unclear(f"{text}: not the version of a Python")
    return match[1]


def _is_plain(word: str) -> bool:
    try:
        return Requirement(word).url is None and "$" not in word
    except InvalidRequirement:
        return False


def _without_repeats(words: Sequence[str]) -> tuple[str, ...]:
    """Without those that another one of the same package pins more narrowly: `uvx -w pytest==8.4.1 pytest`."""
    pinned = {canonicalize_name(Requirement(word).name) for word in words if Requirement(word).specifier}
    kept = (word for word in words if Requirement(word).specifier or canonicalize_name(word) not in pinned)
    return tuple(dict.fromkeys(kept))
