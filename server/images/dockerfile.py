"""The text of a Dockerfile in, a plan as data out. Nothing here touches the build context or runs anything.

The format is that of the Dockerfile reference (https://docs.docker.com/reference/dockerfile/); where that is silent,
BuildKit's parser (frontend/dockerfile/{parser,shell,instructions}) decides. The plan holds the last stage; what would
need a build (RUN, COPY --from, downloads) is listed in `BuildPlan.unmet`, in words for a person.
"""

import difflib
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

# What docker sets for an image that sets none.
DEFAULT_ENV: Mapping[str, str] = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


class DockerfileError(ValueError):
    """The task's Dockerfile or build context is wrong: its author's fault, not the server's.

    `line` counts from 1; `message` names the instruction and what to change.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(line, message)
        self.line, self.message = line, message

    def __str__(self) -> str:
        return f"Dockerfile line {self.line}: {self.message}"


@dataclass(frozen=True)
class Workdir:
    """Create the directory `path` (absolute, normalised) unless it exists."""

    path: str
    line: int = 0


@dataclass(frozen=True)
class Copy:
    """One COPY or ADD of local content, all variables substituted.

    `sources` are paths or globs in the build context, `inline` the heredocs as (file name, content). `dest` may be
    relative to `workdir`, and its trailing slash counts. `chmod` is octal digits, `chown` is `user[:group]`.
    `is_add`: unpack tar archives.
    """

    sources: tuple[str, ...]
    dest: str
    chown: str | None
    chmod: str | None
    workdir: str
    is_add: bool
    line: int
    inline: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class BuildPlan:
    """The last stage, with what it inherits from earlier ones by `FROM <stage>`.

    `workdir` is None without a WORKDIR; `env` holds what ENV set and nothing else; `user` is the last USER as written.
    """

    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    steps: tuple[Workdir | Copy, ...] = ()
    unmet: tuple[str, ...] = ()
    user: str | None = None


def load(path: Path, base_env: Mapping[str, str] = DEFAULT_ENV) -> BuildPlan:
    """`parse` the file at `path`. Raises: DockerfileError, or OSError when it cannot be read."""
    return parse(path.read_bytes().decode(errors="surrogateescape"), base_env)


def parse(text: str, base_env: Mapping[str, str] = DEFAULT_ENV) -> BuildPlan:
    """Turn a Dockerfile into a plan.

    A text without any FROM is taken as one stage on the node's root. `base_env` answers for variables (`$PATH`) that
    neither ENV nor ARG has set; what nothing has set is empty, as in docker.

    Raises:
        DockerfileError: the Dockerfile is wrong; nothing else is ever raised.
    """
    if bad := _NOT_TEXT.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise DockerfileError(line, "not UTF-8 text, or a NUL byte in it: save the file as UTF-8")
    builder = _Builder(base_env)
    for instruction in _instructions(text):
        try:
            builder.add(instruction)
        except _WrongError as error:
            raise DockerfileError(instruction.line, f"{instruction.keyword}: {error}") from None
    return builder.result()


class _WrongError(Exception):
    """What is wrong with one instruction; `parse` adds which and where."""


# Our own tokeniser, not dockerfile-parse: that cannot cut heredocs out while it joins lines, ends a continuation at an
# empty line, drops one that ends the file, does not know `${X:-default}` and takes an unclosed quote in silence.
_NOT_TEXT = re.compile(r"[\0\ud800-\udfff]")  # as `load` decodes what is not UTF-8
_BLANK = re.compile(r"[\t\v\f\r ]+")
_CONTINUED = re.compile(r"(?<!\\)\\[ \t]*\Z")
_WORD = re.compile(r"""(?:<<[ \t]*|\\.|\\\Z|'[^']*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)|[^\s'"\\])+""", re.DOTALL)
_HEREDOC = re.compile(r"\d*<<(-?)\s*+([^<]++)", re.DOTALL)


@dataclass(frozen=True)
class _Heredoc:
    name: str
    content: str
    expand: bool  # a quoted name keeps the content as it is


@dataclass(frozen=True)
class _Instruction:
    """`keyword` in capitals, `rest` with continuation lines joined, `line` where it starts."""

    keyword: str
    rest: str
    line: int
    heredocs: tuple[_Heredoc, ...] = ()

    def described(self) -> str:
        """For `unmet`: at most 200 characters of it on one line, and where it is."""
        text = f"{self.keyword} {' '.join(self.rest.split())}"
        return f"{text if len(text) <= 200 else text[:199] + '…'} (line {self.line})"


def _instructions(text: str) -> Iterator[_Instruction]:
    lines = text.removeprefix("\ufeff").split("\n")
    cursor = 0
    while cursor < len(lines):
        start = cursor + 1
        joined, cursor = _join(lines, cursor)
        keyword, *rest = _BLANK.split(joined.strip(), maxsplit=1)
        if keyword:
            instruction = _Instruction(keyword.upper(), "".join(rest), start)
            heredocs, cursor = _heredocs(instruction, lines, cursor)
            yield replace(instruction, heredocs=heredocs)


def _join(lines: list[str], cursor: int) -> tuple[str, int]:
    """One logical line, and where the next starts. Comments and empty lines do not end a continuation."""
    parts: list[str] = []
    more = True
    while more and cursor < len(lines):
        raw = lines[cursor].rstrip("\r")
        cursor += 1
        if raw.lstrip().startswith("#"):
            more = bool(parts)
        elif raw.strip() or not parts:
            parts.append(_CONTINUED.sub("", raw))
            more = parts[-1] != raw
    return "".join(parts), cursor


def _heredocs(instruction: _Instruction, lines: list[str], cursor: int) -> tuple[tuple[_Heredoc, ...], int]:
    """The heredocs that `instruction` opens, and where the line after the last one is."""
    keyword, rest = instruction.keyword, instruction.rest
    if keyword == "ONBUILD":
        keyword = rest.partition(" ")[0].upper()
    words = _WORD.findall(rest) if keyword in ("ADD", "COPY", "RUN") else []
    found: list[_Heredoc] = []
    for match in filter(None, map(_HEREDOC.fullmatch, words)):
        name = re.sub("['\"]", "", match[2])
        content: list[str] = []
        for line in lines[cursor:]:
            cursor += 1
            content.append((line.lstrip("\t") if match[1] else line) + "\n")
            if content[-1].rstrip("\r\n") == name:
                break
        else:
            raise DockerfileError(instruction.line, f"{keyword}: heredoc not closed: add a line that is only {name!r}")
        found.append(_Heredoc(name, "".join(content[:-1]), expand=name == match[2]))
    return tuple(found), cursor


def _flags(instruction: _Instruction, known: frozenset[str]) -> tuple[dict[str, str], str]:
    """The leading `--name[=value]` words, and the text after them."""
    flags: dict[str, str] = {}
    rest = instruction.rest
    while match := re.match(r"--(\S*)\s*", rest):
        rest = rest[match.end() :]
        name, _, value = match[1].partition("=")
        if name not in known:
            raise _WrongError(f"unknown flag --{name}: use one of --{', --'.join(sorted(known))}")
        if not value and name not in _SWITCHES:
            raise _WrongError(f"--{name} has no value: write --{name}=<value>")
        flags[name] = value
    return flags, rest


def _arguments(rest: str) -> list[str]:
    """The words of a COPY or ADD: a JSON list, or text between blanks (quotes do not hold words together here)."""
    try:
        words = json.loads(rest) if rest.startswith("[") else None
    except (ValueError, RecursionError):
        words = None
    if words is None:
        return [word for word in _BLANK.split(rest) if word]
    if not all(isinstance(word, str) and not _NOT_TEXT.search(word) for word in words):
        raise _WrongError('the JSON form takes strings only: write ["source", "/destination"]')
    return list(words)


_NAME = r"(?:[0-9]+|[@*#?$!-]|[^\W\d]\w*)"
_INNER = r"[^{}]*+"
for _ in range(3):  # `${A:-${B:-${C}}}`: deeper is refused
    _INNER = rf"(?:[^{{}}]|\{{{_INNER}\}})*+"
_VARIABLE = rf"\$(?P<name>{_NAME})|\$\{{(?P<braced>{_NAME})(?:(?P<op>:?[-+?])(?P<word>{_INNER}))?\}}|(?P<bad>\$\{{)"
_DOUBLE_QUOTED = re.compile(rf'{_VARIABLE}|\\(?P<hidden>["$\\])')
_CONTENT = re.compile(rf"{_VARIABLE}|\\(?P<hidden>.?)", re.DOTALL)
_PLAIN = re.compile(
    rf"""{_CONTENT.pattern}|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<open>['"])""", re.DOTALL
)


def _expand(text: str, env: Mapping[str, str], syntax: re.Pattern[str] = _PLAIN) -> str:
    """Substitute variables, take off quotes and backslashes. Heredocs (`_CONTENT`) keep their quotes."""

    def value(match: re.Match[str]) -> str:
        part = match.groupdict()
        if part["bad"]:
            raise _WrongError(f"bad substitution in {text!r}: use ${{name}}, ${{name:-default}} or ${{name:+other}}")
        if part.get("open"):
            raise _WrongError(
                f"the quote {match[0]} in {text!r} is never closed: close it, or put a backslash before it"
            )
        if part["op"]:
            word = _expand(part["word"], env, _CONTENT if syntax is _CONTENT else _PLAIN)
            return _choose(part["braced"], part["op"], word, env)
        if name := part["name"] or part["braced"]:
            return env.get(name, "")
        if part.get("double"):
            return _expand(part["double"], env, _DOUBLE_QUOTED)
        return part["hidden"] or part.get("single") or ""

    return syntax.sub(value, text)


def _choose(name: str, operator: str, word: str, env: Mapping[str, str]) -> str:
    value = env.get(name, "")
    is_set = bool(value) if operator[0] == ":" else name in env
    if operator[-1] == "+":
        return word if is_set else ""
    if operator[-1] == "?" and not is_set:
        raise _WrongError(f"{name} is not set: {word or 'give it a default with ARG'}")
    return value if is_set else word


_COPY_FLAGS = frozenset({"from", "chown", "chmod", "link", "parents", "exclude"})
_ADD_FLAGS = frozenset({"chown", "chmod", "link", "exclude", "checksum", "keep-git-dir", "unpack"})
_SWITCHES = frozenset({"link", "parents", "keep-git-dir", "unpack"})
_REMOTE = re.compile(r"(?:https?|git|ssh|ftp)://|[\w.-]+@[\w.-]+:")


class _Builder:
    """Applies instructions one by one. `stage` is the current one, in the end the last."""

    def __init__(self, base_env: Mapping[str, str]) -> None:
        self.base_env = base_env
        self.name, self.stage = "", BuildPlan()
        self.finished: dict[str, BuildPlan] = {}  # by name, in lower case
        self.args: dict[str, str] = {}
        self.global_args: dict[str, str] | None = None  # what ARG set before the first FROM
        self.handlers: dict[str, Callable[[_Instruction], None]] = {
            "ADD": self._copy, "ARG": self._arg, "COPY": self._copy, "ENV": self._env, "FROM": self._from,
            "USER": self._user, "WORKDIR": self._workdir,
            **dict.fromkeys(("CMD", "ENTRYPOINT", "EXPOSE", "LABEL"), self._ignore),
            **dict.fromkeys(("MAINTAINER", "SHELL", "STOPSIGNAL", "VOLUME"), self._ignore),
            **dict.fromkeys(("HEALTHCHECK", "ONBUILD", "RUN"), self._cannot),
        }  # fmt: skip

    def add(self, instruction: _Instruction) -> None:
        if instruction.keyword not in self.handlers:
            close = difflib.get_close_matches(instruction.keyword, self.handlers, 1) or ["one of the reference"]
            raise _WrongError(f"unknown instruction: use {close[0]}, or end the line before with a backslash")
        if not instruction.rest:
            raise _WrongError("has no arguments: add them or remove the line")
        self.handlers[instruction.keyword](instruction)

    def result(self) -> BuildPlan:
        if (self.stage.user or "root").partition(":")[0] not in ("root", "0"):
            self._unmet(f"USER {self.stage.user}: commands run as root")
        return self.stage

    def _unmet(self, text: str) -> None:
        self.stage = replace(self.stage, unmet=(*self.stage.unmet, text))

    def _expand(self, text: str, syntax: re.Pattern[str] = _PLAIN) -> str:
        # Reference: "Environment variables defined using ENV always override an ARG instruction of the same name."
        return _expand(text, {**self.base_env, **self.args, **self.stage.env}, syntax)

    def _ignore(self, instruction: _Instruction) -> None:
        """It says how a container is started or described, and an episode is neither started nor published by it."""

    def _cannot(self, instruction: _Instruction) -> None:
        self._unmet(instruction.described())

    def _from(self, instruction: _Instruction) -> None:
        if self.global_args is None:
            if self.stage != BuildPlan():
                raise _WrongError("comes after other instructions: only ARG may stand before the first FROM")
            self.global_args = self.args
        words = _flags(instruction, frozenset({"platform"}))[1].split()
        if len(words) != 1 and not (len(words) == 3 and words[1].upper() == "AS"):
            raise _WrongError("write FROM <image> or FROM <image> AS <name>")
        image = _expand(words[0], self.global_args)
        if not image:
            raise _WrongError(f"{words[0]} is empty: give it a default with ARG before FROM")
        self.finished[self.name] = self.stage
        fresh = BuildPlan(unmet=(f"base image {image}: the node's own root stands in for it",))
        self.stage, self.args = self.finished.get(image.lower(), fresh), {}
        self.name = words[-1].lower() if len(words) == 3 else ""

    def _arg(self, instruction: _Instruction) -> None:
        for word in _WORD.findall(instruction.rest):
            name, equals, value = word.partition("=")
            if equals:
                self.args[name] = self._expand(value)
            elif self.global_args and name in self.global_args:
                self.args[name] = self.global_args[name]

    def _env(self, instruction: _Instruction) -> None:
        words = _WORD.findall(instruction.rest)
        if "=" not in words[0]:  # the legacy form: ENV name everything else
            words = ["=".join(_BLANK.split(instruction.rest, maxsplit=1))]
        new: dict[str, str] = {}  # all values of one ENV see the variables as they were before it
        for word in words:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise _WrongError(f"{word!r} is no name=value: write it so, in quotes if the value has blanks")
            new[self._expand(name)] = self._expand(value)
        self.stage = replace(self.stage, env={**self.stage.env, **new})

    def _user(self, instruction: _Instruction) -> None:
        self.stage = replace(self.stage, user=self._expand(instruction.rest))

    def _workdir(self, instruction: _Instruction) -> None:
        path = posixpath.join(self.stage.workdir or "/", self._expand(instruction.rest))
        path = posixpath.normpath("/" + path.lstrip("/"))
        self.stage = replace(self.stage, workdir=path, steps=(*self.stage.steps, Workdir(path, instruction.line)))

    def _copy(self, instruction: _Instruction) -> None:
        is_add = instruction.keyword == "ADD"
        flags, rest = _flags(instruction, _ADD_FLAGS if is_add else _COPY_FLAGS)
        words = _arguments(rest)
        if len(words) < 2:
            raise _WrongError(f"needs a source and a destination: {instruction.keyword} <source>... <destination>")
        sources = tuple(self._expand(word) for word in words[:-1] if not _HEREDOC.fullmatch(word))
        if reason := _beyond(flags, sources, is_add):
            self._unmet(f"{instruction.described()}: {reason}")
            return
        copy = Copy(
            sources=sources,
            dest=self._expand(words[-1]),
            chown=self._expand(flags["chown"]) if "chown" in flags else None,
            chmod=self._chmod(flags, instruction),
            workdir=self.stage.workdir or "/",
            is_add=is_add and flags.get("unpack") != "false",
            line=instruction.line,
            inline=tuple(self._inline(heredoc) for heredoc in instruction.heredocs),
        )
        self.stage = replace(self.stage, steps=(*self.stage.steps, copy))

    def _chmod(self, flags: dict[str, str], instruction: _Instruction) -> str | None:
        mode = self._expand(flags.get("chmod", ""))
        if re.fullmatch("[0-7]{1,4}", mode):
            return mode
        if mode[:1].isdigit():
            raise _WrongError(f"--chmod={mode} is no octal mode: use 0 to 7777")
        if mode:
            self._unmet(f"{instruction.described()}: only an octal --chmod is applied")
        return None

    def _inline(self, heredoc: _Heredoc) -> tuple[str, str]:
        name = posixpath.basename(heredoc.name)
        if name in ("", ".", ".."):
            raise _WrongError(f"a heredoc called {heredoc.name!r} cannot name a file: rename it")
        return name, self._expand(heredoc.content, _CONTENT) if heredoc.expand else heredoc.content


def _beyond(flags: dict[str, str], sources: tuple[str, ...], is_add: bool) -> str | None:
    """Why this COPY or ADD cannot be done here, if so."""
    if "from" in flags:
        return "not available without a build"
    if remote := next(filter(_REMOTE.match, sources), None):
        if is_add:
            return "nothing is downloaded"
        raise _WrongError(f"{remote} is not in the build context: use ADD for downloads")
    return next((f"--{name} is not supported" for name in ("parents", "exclude") if name in flags), None)
