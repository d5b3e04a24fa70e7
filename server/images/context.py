"""What COPY and ADD read: a build context without what its .dockerignore hides, or the root of another image."""

import errno
import hashlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tbench2_env.server.images.layer import BaseView, is_dir, lstat, resolve
from tbench2_env.server.images.steps import Copy


class Rules:
    """Patterns of what is left out, as in a .dockerignore; the last that matches decides (moby/patternmatcher)."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = list(_rules(patterns))

    def hide(self, path: str) -> bool:
        """`path` is relative."""
        hidden = False
        for hides, pattern in self._rules:
            hidden = hides if pattern.fullmatch("/" + path) else hidden
        return hidden


def _rules(patterns: Iterable[str]) -> Iterator[tuple[bool, re.Pattern[str]]]:
    for line in map(str.strip, patterns):
        if line and not line.startswith("#"):
            pattern = posixpath.normpath("/" + line.removeprefix("!").strip().lstrip("/"))
            yield not line.startswith("!"), re.compile(_regex(pattern, deep=True) + "(?:/.*)?", re.DOTALL)


class _Source:
    """A folder to copy from. Links are followed inside it only."""

    _noun = "stage or image that is copied from"

    def __init__(self, folder: Path) -> None:
        # Not resolved: the folder may be reached by a descriptor of another mount namespace, whose paths lead nowhere.
        self.root = folder.absolute()

    def shows(self, entry: Path) -> bool:
        return True

    def find(self, sources: tuple[str, ...], parents: bool = False) -> list[tuple[str, Path]]:
        """(name, file) of every match, links followed; with `parents` the name is a path, of all or what follows /./.

        Raises:
            OSError: ENOENT for a path that is not there, or if no source matches. A glob may match nothing beside
                others that do: authors write `COPY a.txt b.tx[t] /` for an optional file.
        """
        found = [(source, list(self._matches(source, parents))) for source in sources]
        for source, matches in found:
            if not matches and not (_WILD.search(source) and any(others for _, others in found)):
                raise FileNotFoundError(errno.ENOENT, f"not in the {self._noun}: add it there", source)
        return [pair for _, matches in found for pair in matches]

    def _matches(self, source: str, parents: bool) -> Iterator[tuple[str, Path]]:
        tree = BaseView(self.root)
        path = posixpath.normpath("/" + source.lstrip("/"))
        pivot = posixpath.normpath("/" + source.partition("/./")[0].lstrip("/")) if "/./" in source else "/"
        for each in self._glob(tree, path, deep=parents):
            file = tree.host(resolve(tree, each))
            if self.shows(tree.host(each)) and self.shows(file):
                name = posixpath.relpath(each, pivot) if parents else posixpath.basename(each)
                yield posixpath.normpath("/" + name)[1:], file

    def _glob(self, tree: BaseView, path: str, deep: bool) -> list[str]:
        """The paths that match; links are followed in what comes before the first wild part."""
        wild = _WILD.search(path)
        if wild is None:
            return [path] if tree.lstat(resolve(tree, path)) else []
        fixed = posixpath.dirname(path[: wild.start()])
        folder, pattern = tree.host(resolve(tree, fixed)), re.compile(_regex(path, deep), re.DOTALL)
        every = (posixpath.join(fixed, entry.relative_to(folder)) for entry in sorted(folder.rglob("*")))
        return [each for each in every if pattern.fullmatch(each)]


class Context(_Source):
    """The build context without what its .dockerignore hides. Copies of it are root's."""

    _noun = "build context, or ignored"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = folder / ".dockerignore"
        self._rules = Rules(file.read_text(errors="replace").split("\n") if file.is_file() else ())

    def shows(self, entry: Path) -> bool:
        """Whether `entry` is not ignored; an ignored directory is shown for what a later `!` brings back in it."""
        if entry == self.root or not self._rules.hide(str(entry.relative_to(self.root))):
            return True
        return is_dir(lstat(entry)) and any(map(self.shows, entry.iterdir()))

    def digest(self, step: Copy) -> str:
        """SHA-256 of what `step` copies of it: names, permissions and contents. Raises: OSError, as `find`."""
        digest = hashlib.sha256()
        for name, top in self.find(step.sources, step.parents):
            for file in (top, *sorted(top.rglob("*"))):
                if self.shows(file):
                    where = posixpath.join(name, file.relative_to(top))
                    digest.update(f"\n{where}\0{file.lstat().st_mode:o}\0".encode(errors="surrogateescape"))
                    digest.update(_content(file))
        return digest.hexdigest()


def _content(file: Path) -> bytes:
    if file.is_symlink():
        return os.fsencode(os.readlink(file))  # noqa: PTH115 - Path would drop its "./"
    if not file.is_file():
        return b""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


class View(_Source):
    """The root of another stage or image. Copies keep their owners, which in the folder are `shift` higher.

    That is what BuildKit does (solver/llbsolver/file, mapUserToChowner); the reference says root's of the context only.
    """

    def __init__(self, folder: Path, shift: int) -> None:
        super().__init__(folder)
        self.shift = shift


_WILD = re.compile(r"[*?\[]")
_CHAR = r"(?:\\.|[^\\\]\-])"
_RANGE = re.compile(rf"({_CHAR})(?:-({_CHAR}))?")
_TOKEN = re.compile(rf"\*\*+/?|\[\^?+(?:{_CHAR}(?:-{_CHAR})?)+\]|\\.|.", re.DOTALL)


def _regex(glob: str, deep: bool = False) -> str:
    """Go's path.Match as a regular expression. `deep`: `**` crosses directories, as in .dockerignore."""
    out = ""
    for token in _TOKEN.findall(glob):
        if token.startswith("**") and deep:
            out += "(?:.*/)?" if token.endswith("/") else ".*"
        elif token[0] == "*":
            out += "[^/]*" + token.lstrip("*")
        elif token in ("?", "[", "\\"):  # the last two are malformed, and match nothing
            out += "[^/]" if token == "?" else "(?!)"
        else:
            out += _class(token) if token[0] == "[" else re.escape(token[-1])
    return out


def _class(token: str) -> str:
    ranges = [(low[-1], (high or low)[-1]) for low, high in _RANGE.findall(token[1:-1].removeprefix("^"))]
    body = "".join(f"{re.escape(low)}-{re.escape(high)}" for low, high in ranges if low <= high)
    return f"[{'^' if token[1] == '^' else ''}\\0{body}]"  # NUL is in no name, and keeps it from being empty
