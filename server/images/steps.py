"""What an instruction of a Dockerfile does, as data: every variable substituted, all there that a build needs."""

import dataclasses
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Workdir:
    """Create the directory `path` (absolute, normalised) unless it exists, for `user` (`name[:group]`, None: root)."""

    path: str
    line: int = 0
    text: str = field(default="", compare=False)
    user: str | None = None


@dataclass(frozen=True)
class Copy:
    """One COPY or ADD of local content.

    `sources` are paths or globs in the build context, or in the root of `from_stage` (an index of `Dockerfile.stages`)
    or `from_image` (an image reference); `inline` the heredocs as (file name, content). `dest` may be relative to
    `workdir`, and its trailing slash counts. `chmod` is octal digits or like `u+x,go-w`, `chown` is `user[:group]`.
    `is_add`: unpack tar archives. `exclude` are patterns as in .dockerignore; `parents`: keep the sources' folders.
    """

    sources: tuple[str, ...]
    dest: str
    chown: str | None
    chmod: str | None
    workdir: str
    is_add: bool
    line: int
    inline: tuple[tuple[str, str], ...] = ()
    text: str = field(default="", compare=False)
    from_stage: int | None = None
    from_image: str | None = None
    exclude: tuple[str, ...] = ()
    parents: bool = False


@dataclass(frozen=True)
class Download:
    """ADD of an http(s) `url`: fetch it into an empty folder as the file `name`, of mode 0600, then do `copy`.

    `checksum` is `sha256:<hex>`, `unpack` asks for an archive to be unpacked. The other fields are those of `Copy`.
    """

    url: str
    dest: str
    checksum: str | None
    chown: str | None
    chmod: str | None
    workdir: str
    line: int
    text: str = field(default="", compare=False)
    unpack: bool = False

    @property
    def name(self) -> str:
        name = posixpath.basename(unquote(urlsplit(self.url).path)).replace("\0", "")
        # As BuildKit (dockerfile2llb/convert_copy.go) calls what has none.
        return name if name not in ("", ".", "..") else "__unnamed__"

    @property
    def copy(self) -> Copy:
        source = re.sub(r"([*?\[\\])", r"\\\1", self.name) if re.search(r"[*?\[]", self.name) else self.name
        return Copy((source,), self.dest, self.chown, self.chmod, self.workdir, self.unpack, self.line, text=self.text)


@dataclass(frozen=True)
class Run:
    """One RUN. `argv` is what to execute; in the shell form the shell is in it.

    `env` is all that the command sees. `script`, (absolute path, content), is an executable file that must be there
    while the command runs: the script of a `RUN <<EOF` with a #! line. `scratch` are the absolute targets of cache and
    tmpfs mounts: folders to have while the command runs, of whose content nothing may stay in the layer.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str | None
    line: int
    text: str = field(default="", compare=False)
    script: tuple[str, str] | None = None
    scratch: tuple[str, ...] = ()
    network: Literal["default", "none"] = "default"


Step = Workdir | Copy | Download | Run


def identity(step: Step) -> str:
    """All that decides what `step` does to its base, for hashing: equal for equal steps, on whatever line."""
    fields = {name: value for name, value in dataclasses.asdict(step).items() if name not in ("line", "text")}
    return json.dumps([type(step).__name__, fields], sort_keys=True)
