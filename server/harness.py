"""What a task's tests/test.sh is about to do, read from its text, and whether a run of it shows that it was done.

A harness that could not be fetched writes 0 as one that found a wrong solution does (TASKS.md, "A silent false zero").
"""

import functools
import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

#: Where a verifier's files are.
FOLDER = "/logs/verifier"
#: Bytes of a test.sh that are read; real ones have 1 to 5 KB.
TEXT_MAX_BYTES = 1 << 20
_TAIL_LINES, _LINE_LENGTH = 12, 500
_EXPANSIONS_MAX = 8

_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_CONTINUATION = re.compile(r"\\\n[ \t]*")
#: A shell word that may be a path: plain text and quoted pieces.
_WORD = r"""((?:"[^"\s=]*"|'[^'\s=]*'|[^\s;&|()"'])+)"""
_ASSIGNMENT = re.compile(rf"(?:^|[\s;&|])([A-Za-z_]\w*)={_WORD}")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^}]*))?\})")
_CTRF = re.compile(rf"--ctrf(?:=|\s+){_WORD}")
_PYTEST = re.compile(r"\bpytest\b")

#: pytest says the first before it imports any test, the second when it is done (also with -q).
_SESSION = re.compile(r"=== test session starts ===|\b\d+ (?:passed|failed|skipped|errors?)\b.{0,200} in \d+\.\d+s")
#: bash does not find a tool of the harness. Only for these: any other program may be the one the agent was to make.
_NO_TOOL = re.compile(
    r"test\.sh: line (\d+): (?:\S*/)?(uvx?|pytest|pip3?|python[\d.]*): (?:command not found|No such file or directory)$"
)
#: What curl, apt-get, uv, pip and python say when pytest cannot be had.
_NOT_FETCHED = re.compile(
    r"^curl: \(6\) |^E: (?:Unable to locate package|Unable to fetch|Failed to fetch|Package .* has no installation)"
    r"|^error: (?:Failed to|No interpreter found|Could not|Request failed)|^\s*\u00d7 (?:Failed to|No solution found)"
    r"|^ERROR: (?:Could not find a version|No matching distribution|Could not install)|: No module named '?\"?pytest"
)


@dataclass(frozen=True)
class Script:
    """The text of a test.sh."""

    text: str

    @functools.cached_property
    def ctrf_names(self) -> tuple[str, ...]:
        """Names of the files in /logs/verifier that it asks for with `--ctrf`, one for each such option.

        Comments, continued lines and variables that it sets to plain text are taken into account; what is decided only
        when it runs is not, and then there is no name.
        """
        code = self._code
        variables = {match[1]: _unquoted(match[2]) for match in _ASSIGNMENT.finditer(code)}
        paths = (posixpath.normpath(_expanded(_unquoted(match[1]), variables)) for match in _CTRF.finditer(code))
        return tuple(dict.fromkeys(posixpath.basename(path) for path in paths if posixpath.dirname(path) == FOLDER))

    @property
    def _code(self) -> str:
        return _CONTINUATION.sub(" ", _COMMENT.sub("", self.text))

    def why_not_run(self, reward: float, output: str, files: Collection[str]) -> str | None:
        """Why `output` and the names of the `files` it wrote show that no test ran; None if they do not.

        Once pytest has begun its session it is the agent's work that decides: code of the agent's that a test imports
        can end pytest before it writes its report, and must not turn a 0 into no verdict. Nor into a 1: tests that
        passed have been reported.
        """
        names = self.ctrf_names
        if any(name in files for name in names) or (reward != 0 and not names):
            return None
        if reward == 0 and _SESSION.search(output):
            return None
        if names:
            return f"test.sh asks for {' and '.join(f'{FOLDER}/{name}' for name in names)}, which was not written"
        tail = [line[:_LINE_LENGTH] for line in output.splitlines() if line.strip()][-_TAIL_LINES:]
        line = next(self._failures(tail), None)
        return None if line is None else f"its tools are missing: {line.strip()[:200]}"

    def _failures(self, lines: list[str]) -> Iterator[str]:
        fetches = _PYTEST.search(self._code) is not None
        own = self.text.splitlines()
        for line in reversed(lines):
            tool = _NO_TOOL.search(line)
            # test.sh must use it on that line: a program under test may print such words, too.
            unfound = tool is not None and tool[2] in "".join(own[int(tool[1][:9]) - 1 :][:1])
            if unfound or (fetches and _NOT_FETCHED.search(line)):
                yield line


def _unquoted(word: str) -> str:
    return word.replace('"', "").replace("'", "")


def _expanded(word: str, variables: dict[str, str]) -> str:
    """With its variables replaced; one that nobody set becomes its default, or stays and makes no path of it."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[3] or match[0])

    for _ in range(_EXPANSIONS_MAX):
        word = _VARIABLE.sub(value, word)[:4096]
    return word
