"""The syntax of a Dockerfile: its instructions, with their heredocs and flags, and the substitution of variables.

The format is that of the Dockerfile reference (https://docs.docker.com/reference/dockerfile/); where that is silent,
BuildKit's parser (frontend/dockerfile/{parser,shell}) decides.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace


class DockerfileError(ValueError):
    """The task's Dockerfile or build context is wrong: its author's fault, not the server's.

    `line` counts from 1; `message` names the instruction and what to change.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(line, message)
        self.line, self.message = line, message

    def __str__(self) -> str:
        return f"Dockerfile line {self.line}: {self.message}"


class WrongError(Exception):
    """What is wrong with one instruction; `Instruction.blamed` adds which and where."""


# Our own tokeniser, not dockerfile-parse: that cannot cut heredocs out while it joins lines, ends a continuation at an
# empty line, drops one that ends the file, does not know `${X:-default}` and takes an unclosed quote in silence.
_NOT_TEXT = re.compile(r"[\0\ud800-\udfff]")  # as `load` decodes what is not UTF-8
BLANK = re.compile(r"[\t\v\f\r ]+")
_DIRECTIVE = re.compile(r"#[ \t]*([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*(.+?)\s*")
_CONTINUED = re.compile(r"(?<!\\)\\[ \t]*\Z")
WORD = re.compile(r"""(?:<<[ \t]*|\\.|\\\Z|'[^']*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)|[^\s'"\\])+""", re.DOTALL)
HEREDOC = re.compile(r"\d*<<(-?)\s*+([^<]++)", re.DOTALL)


@dataclass(frozen=True)
class Heredoc:
    """`content` as written, with its last newline. `expand` false: the name is quoted; `chomp`: it opened with <<-."""

    name: str
    content: str
    expand: bool
    chomp: bool

    @property
    def chomped(self) -> str:
        return re.sub(r"^\t+", "", self.content, flags=re.MULTILINE) if self.chomp else self.content


@dataclass(frozen=True)
class Instruction:
    """`keyword` in capitals, `rest` with continuation lines joined, `line` where it starts."""

    keyword: str
    rest: str
    line: int
    heredocs: tuple[Heredoc, ...] = ()

    @property
    def text(self) -> str:
        """All of it as written, its heredocs too."""
        documents = (f"\n{each.content}{each.name}" for each in self.heredocs)
        return f"{self.keyword} {self.rest}{''.join(documents)}"

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """A WrongError raised within is this instruction's. Raises: DockerfileError."""
        try:
            yield
        except WrongError as error:
            raise DockerfileError(self.line, f"{self.keyword}: {error}") from None


def instructions(text: str) -> Iterator[Instruction]:
    """Raises: DockerfileError."""
    if bad := _NOT_TEXT.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise DockerfileError(line, "not UTF-8 text, or a NUL byte in it: save the file as UTF-8")
    lines = text.removeprefix("\ufeff").split("\n")
    _check_directives(lines)
    cursor = 0
    while cursor < len(lines):
        start = cursor + 1
        joined, cursor = _join(lines, cursor)
        keyword, *rest = BLANK.split(joined.strip(), maxsplit=1)
        if keyword:
            instruction = Instruction(keyword.upper(), "".join(rest), start)
            heredocs, cursor = _heredocs(instruction, lines, cursor)
            yield replace(instruction, heredocs=heredocs)


def _check_directives(lines: list[str]) -> None:
    """`# name=value` before anything else. `syntax` and `check` choose and tune a parser, and this is the only one."""
    for number, line in enumerate(lines, 1):
        directive = _DIRECTIVE.fullmatch(line)
        if directive is None:
            break
        if directive[1].lower() == "escape" and directive[2] != "\\":
            raise DockerfileError(number, "only the backslash escapes here: remove the directive and write \\ instead")


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


def _heredocs(instruction: Instruction, lines: list[str], cursor: int) -> tuple[tuple[Heredoc, ...], int]:
    """The heredocs that `instruction` opens, and where the line after the last one is."""
    keyword, rest = instruction.keyword, instruction.rest
    if keyword == "ONBUILD":
        keyword = rest.partition(" ")[0].upper()
    words = WORD.findall(rest) if keyword in ("ADD", "COPY", "RUN") else []
    found: list[Heredoc] = []
    for match in filter(None, map(HEREDOC.fullmatch, words)):
        name = re.sub("['\"]", "", match[2])
        content: list[str] = []
        for line in lines[cursor:]:
            cursor += 1
            content.append(line + "\n")
            if (line.lstrip("\t") if match[1] else line).rstrip("\r") == name:
                break
        else:
            raise DockerfileError(instruction.line, f"{keyword}: heredoc not closed: add a line that is only {name!r}")
        found.append(Heredoc(name, "".join(content[:-1]), expand=name == match[2], chomp=bool(match[1])))
    return tuple(found), cursor


_SWITCHES = frozenset({"link", "parents", "keep-git-dir", "unpack"})


def flags(instruction: Instruction, known: frozenset[str]) -> tuple[list[tuple[str, str]], str]:
    """The leading `--name[=value]` words, and the text after them."""
    found: list[tuple[str, str]] = []
    rest = instruction.rest
    while match := re.match(r"--(\S*)\s*", rest):
        rest = rest[match.end() :]
        name, _, value = match[1].partition("=")
        if name not in known:
            raise WrongError(f"unknown flag --{name}: use one of --{', --'.join(sorted(known))}")
        if not value and name not in _SWITCHES:
            raise WrongError(f"--{name} has no value: write --{name}=<value>")
        found.append((name, value))
    return found, rest


def arguments(rest: str) -> list[str]:
    """The words of a COPY or ADD: a JSON list, or text between blanks (quotes do not hold words together here)."""
    words = json_words(rest)
    return [word for word in BLANK.split(rest) if word] if words is None else words


def json_words(rest: str) -> list[str] | None:
    """The strings of a JSON list; None if it is no JSON, and so, as in docker, text like any other."""
    try:
        words = json.loads(rest) if rest.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    if words is not None and not all(isinstance(word, str) and not _NOT_TEXT.search(word) for word in words):
        raise WrongError('the JSON form takes strings only: write ["first", "second"]')
    return words


_NAME = r"(?:[0-9]+|[@*#?$!-]|[^\W\d]\w*)"
_INNER = r"[^{}]*+"
for _ in range(3):  # `${A:-${B:-${C}}}`: deeper is refused
    _INNER = rf"(?:[^{{}}]|\{{{_INNER}\}})*+"
_VARIABLE = rf"\$(?P<name>{_NAME})|\$\{{(?P<braced>{_NAME})(?:(?P<op>:?[-+?])(?P<word>{_INNER}))?\}}|(?P<bad>\$\{{)"
_DOUBLE_QUOTED = re.compile(rf'{_VARIABLE}|\\(?P<hidden>["$\\])')
CONTENT = re.compile(rf"{_VARIABLE}|\\(?P<hidden>.?)", re.DOTALL)
PLAIN = re.compile(
    rf"""{CONTENT.pattern}|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<open>['"])""", re.DOTALL
)


def expand(text: str, env: Mapping[str, str], syntax: re.Pattern[str] = PLAIN) -> str:
    """Substitute variables, take off quotes and backslashes. Heredocs (`CONTENT`) keep their quotes."""

    def value(match: re.Match[str]) -> str:
        part = match.groupdict()
        if part["bad"]:
            raise WrongError(f"bad substitution in {text!r}: use ${{name}}, ${{name:-default}} or ${{name:+other}}")
        if part.get("open"):
            raise WrongError(
                f"the quote {match[0]} in {text!r} is never closed: close it, or put a backslash before it"
            )
        if part["op"]:
            word = expand(part["word"], env, CONTENT if syntax is CONTENT else PLAIN)
            return _choose(part["braced"], part["op"], word, env)
        if name := part["name"] or part["braced"]:
            return env.get(name, "")
        if part.get("double"):
            return expand(part["double"], env, _DOUBLE_QUOTED)
        return part["hidden"] or part.get("single") or ""

    return syntax.sub(value, text)


def _choose(name: str, operator: str, word: str, env: Mapping[str, str]) -> str:
    value = env.get(name, "")
    is_set = bool(value) if operator[0] == ":" else name in env
    if operator[-1] == "+":
        return word if is_set else ""
    if operator[-1] == "?" and not is_set:
        raise WrongError(f"{name} is not set: {word or 'give it a default with ARG'}")
    return value if is_set else word
