"""A stage of a Dockerfile and the config of what it is built on in, the steps that build it as data out."""

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict
from urllib.parse import urlsplit

from tbench2_env.server.images.dockerfile import COPY_FLAGS, Dockerfile, declared
from tbench2_env.server.images.dockerfile_syntax import (
    BLANK,
    CONTENT,
    HEREDOC,
    PLAIN,
    WORD,
    DockerfileError,
    Heredoc,
    Instruction,
    WrongError,
    arguments,
    expand,
    flags,
    json_words,
)
from tbench2_env.server.images.image import ImageConfig
from tbench2_env.server.images.steps import Copy, Download, Run, Step, Workdir

# What docker takes where neither the image nor the Dockerfile says.
DEFAULT_ENV: Mapping[str, str] = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
DEFAULT_SHELL = ("/bin/sh", "-c")
_ADD_FLAGS = frozenset({"chown", "chmod", "link", "exclude", "checksum", "keep-git-dir", "unpack"})
_RUN_FLAGS = frozenset({"mount", "network", "security", "device"})
_URL = re.compile(r"https?://")
_REMOTE = re.compile(r"(?:https?|git|ssh|ftp)://|[\w.-]+@[\w.-]+:")
_GIT = re.compile(r"https?://[^#?]*\.git(?:[#?].*)?")
_MODE = re.compile(r"[0-7]{1,4}|[ugoa]*(?:[-+=][rwxXst]*)+(?:,[ugoa]*(?:[-+=][rwxXst]*)+)*")
_CHECKSUM = re.compile(r"sha(?:256|384|512):[0-9a-f]{64,128}")
_SCRIPTS = "/dev/pipes"  # where docker has the script of a RUN <<EOF with a #! line


@dataclass(frozen=True)
class Unsupported:
    """An instruction that is right, but that no build here can do, for `reason`."""

    line: int
    text: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The `steps` of one stage, in order, without those of the stages or the image below it.

    `config` is what the stage leaves to commands and to stages built on it, `args` what ARG leaves to the latter.
    """

    steps: tuple[Step, ...] = ()
    config: ImageConfig = field(default_factory=ImageConfig)
    args: Mapping[str, str] = field(default_factory=dict)
    unsupported: tuple[Unsupported, ...] = ()


def plan(dockerfile: Dockerfile, index: int, below: ImageConfig | Plan) -> Plan:
    """The plan of stage `index`, over the image with the config `below` or the plan of its `base_stage`.

    Raises:
        DockerfileError: an instruction is wrong, or nothing here can do it; nothing else is ever raised.
    """
    planned = survey(dockerfile, index, below)
    for each in planned.unsupported:
        raise DockerfileError(each.line, f"{each.text.split(maxsplit=1)[0]}: {each.reason}")
    return planned


def survey(dockerfile: Dockerfile, index: int, below: ImageConfig | Plan) -> Plan:
    """As `plan`, but what nothing here can do is listed in `unsupported` and left out of the steps."""
    planner = _Planner(dockerfile, index, below if isinstance(below, Plan) else Plan(config=below))
    for instruction in dockerfile.stages[index].instructions:
        with instruction.blamed():
            try:
                planner.handlers[instruction.keyword](instruction)
            except _UnsupportedError as reason:
                planner.unsupported.append(Unsupported(instruction.line, instruction.text, str(reason)))
    return planner.result()


class _UnsupportedError(Exception):
    """Why no build here can do an instruction."""


class _Planner:
    """Applies the instructions of one stage, one by one."""

    def __init__(self, dockerfile: Dockerfile, index: int, below: Plan) -> None:
        self.dockerfile, self.index = dockerfile, index
        self.env, self.args = dict(below.config.env), dict(below.args)
        self.workdir, self.user, self.shell = below.config.workdir, below.config.user, below.config.shell
        self.steps: list[Step] = []
        self.unsupported: list[Unsupported] = []
        self.handlers: dict[str, Callable[[Instruction], None]] = {
            "ADD": self._add, "ARG": self._arg, "COPY": self._copy, "ENV": self._env, "ONBUILD": self._onbuild,
            "RUN": self._run, "SHELL": self._shell, "USER": self._user, "WORKDIR": self._workdir,
            **dict.fromkeys(("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL"), self._ignore),
            **dict.fromkeys(("MAINTAINER", "STOPSIGNAL", "VOLUME"), self._ignore),
        }  # fmt: skip

    def result(self) -> Plan:
        config = ImageConfig(self.env, self.workdir, self.user, self.shell)
        return Plan(tuple(self.steps), config, self.args, tuple(self.unsupported))

    @property
    def variables(self) -> dict[str, str]:
        return {**DEFAULT_ENV, **self.env, **self.args}

    def _expand(self, text: str, syntax: re.Pattern[str] = PLAIN) -> str:
        return expand(text, self.variables, syntax)

    def _ignore(self, instruction: Instruction) -> None:
        """It says how a container is started or described, and an episode is neither started nor published by it."""

    def _onbuild(self, instruction: Instruction) -> None:
        raise _UnsupportedError("nothing is built on this image: remove it")

    def _arg(self, instruction: Instruction) -> None:
        # The later of an ENV and an ARG of one name counts, as in BuildKit (dockerfile2llb/convert.go, dispatchArg).
        self.args |= declared(instruction, self.variables, self.dockerfile.stages[self.index].global_args)

    def _env(self, instruction: Instruction) -> None:
        words = WORD.findall(instruction.rest)
        if "=" not in words[0]:  # the legacy form: ENV name everything else
            words = ["=".join(BLANK.split(instruction.rest, maxsplit=1))]
        new: dict[str, str] = {}  # all values of one ENV see the variables as they were before it
        for word in words:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise WrongError(f"{word!r} is no name=value: write it so, in quotes if the value has blanks")
            new[self._expand(name)] = self._expand(value)
        self.env |= new
        self.args = {name: value for name, value in self.args.items() if name not in new}

    def _user(self, instruction: Instruction) -> None:
        self.user = self._expand(instruction.rest)

    def _shell(self, instruction: Instruction) -> None:
        words = json_words(instruction.rest)
        if not words:
            raise WrongError('takes a JSON list: write SHELL ["/bin/bash", "-c"]')
        self.shell = tuple(words)

    def _workdir(self, instruction: Instruction) -> None:
        self.workdir = self._absolute(self._expand(instruction.rest))
        self.steps.append(Workdir(self.workdir, instruction.line, f"WORKDIR {self.workdir}", self.user))

    def _absolute(self, path: str) -> str:
        return posixpath.normpath("/" + posixpath.join(self.workdir or "/", path).lstrip("/"))

    def _run(self, instruction: Instruction) -> None:
        found, rest = flags(instruction, _RUN_FLAGS)
        if not rest:
            raise WrongError("has no command after its flags")
        scratch: list[str] = []
        for name, value in found:
            if name == "mount":
                scratch.append(self._absolute(_scratch(self._expand(value))))
            elif (name, value) not in (("network", "none"), ("network", "default"), ("security", "sandbox")):
                raise _UnsupportedError(f"--{name}={value} is not supported: remove it")
        argv, script = self._command(instruction, rest)
        self.steps.append(
            Run(
                argv=argv,
                env=self.variables,
                workdir=self.workdir or "/",
                user=self.user,
                line=instruction.line,
                text=instruction.text,
                script=script,
                scratch=tuple(scratch),
                network="none" if dict(found).get("network") == "none" else "default",
            )
        )

    def _command(self, instruction: Instruction, rest: str) -> tuple[tuple[str, ...], tuple[str, str] | None]:
        """(argv, script) as `Run` has them."""
        words, script = json_words(rest), None
        if words is not None:
            if not words or instruction.heredocs:
                raise WrongError("the JSON form takes a command and no heredoc")
            return tuple(words), None
        command = rest + "".join(f"\n{each.content}{each.name}" for each in instruction.heredocs)
        if len(WORD.findall(rest)) == 1 and HEREDOC.fullmatch(rest) and instruction.heredocs:
            (heredoc,) = instruction.heredocs
            command = heredoc.chomped
            if command.startswith("#!"):
                path = posixpath.join(_SCRIPTS, heredoc.name)
                command, script = path, (path, heredoc.chomped)
        return (*(self.shell or DEFAULT_SHELL), command), script

    def _copy(self, instruction: Instruction) -> None:
        found, rest = flags(instruction, COPY_FLAGS)
        sources, dest = self._sources(instruction, rest)
        if remote := next(filter(_REMOTE.match, sources), None):
            raise WrongError(f"{remote} is not in the build context: use ADD for downloads")
        origin = dict(found).get("from")
        stage = self.dockerfile.find(origin, self.index) if origin else None
        self.steps.append(
            Copy(
                sources=sources,
                dest=dest,
                **self._common(instruction, found),
                is_add=False,
                inline=tuple(self._inline(heredoc) for heredoc in instruction.heredocs),
                from_stage=stage,
                from_image=origin if stage is None else None,
                exclude=tuple(self._expand(value) for name, value in found if name == "exclude"),
                parents=_is_on(dict(found), "parents"),
            )
        )

    def _add(self, instruction: Instruction) -> None:
        found, rest = flags(instruction, _ADD_FLAGS)
        sources, dest = self._sources(instruction, rest)
        common, checksum = self._common(instruction, found), self._expand(dict(found).get("checksum", "")) or None
        local = tuple(source for source in sources if not _REMOTE.match(source))
        remote = [source for source in sources if _REMOTE.match(source)]
        for url in remote:
            _check_url(url)
        if checksum and (local or len(remote) != 1 or not _CHECKSUM.fullmatch(checksum)):
            raise WrongError("--checksum is for a single URL: write --checksum=sha256:<hex>, or remove it")
        if len(sources) + len(instruction.heredocs) > 1 and not dest.endswith("/"):
            dest += "/"
        if local or instruction.heredocs:
            self.steps.append(
                Copy(
                    sources=local,
                    dest=dest,
                    **common,
                    is_add=_is_on(dict(found), "unpack", default=True),
                    inline=tuple(self._inline(heredoc) for heredoc in instruction.heredocs),
                    exclude=tuple(self._expand(value) for name, value in found if name == "exclude"),
                )
            )
        unpack = _is_on(dict(found), "unpack")
        self.steps += [Download(url=url, dest=dest, **common, checksum=checksum, unpack=unpack) for url in remote]

    def _sources(self, instruction: Instruction, rest: str) -> tuple[tuple[str, ...], str]:
        """The sources but heredocs, and the destination."""
        words = arguments(rest)
        if len(words) < 2:
            raise WrongError(f"needs a source and a destination: {instruction.keyword} <source>... <destination>")
        return tuple(self._expand(word) for word in words[:-1] if not HEREDOC.fullmatch(word)), self._expand(words[-1])

    def _common(self, instruction: Instruction, found: list[tuple[str, str]]) -> "_Common":
        values = {name: self._expand(value) for name, value in found if name in ("chown", "chmod")}
        chmod = values.get("chmod")
        if chmod is not None and not _MODE.fullmatch(chmod):
            raise WrongError(f"--chmod={chmod} is no mode: use an octal one, 0 to 7777, or one like u+x,go-w")
        words = [instruction.keyword, *(f"--{name}={value}" if value else f"--{name}" for name, value in found)]
        words += arguments(flags(instruction, COPY_FLAGS | _ADD_FLAGS)[1])
        documents = (f"\n{self._inline(each)[1]}{each.name}" for each in instruction.heredocs)
        return {
            "chown": values.get("chown"),
            "chmod": chmod,
            "workdir": self.workdir or "/",
            "line": instruction.line,
            "text": " ".join(map(self._expand, words)) + "".join(documents),
        }

    def _inline(self, heredoc: Heredoc) -> tuple[str, str]:
        name = posixpath.basename(heredoc.name)
        if name in ("", ".", ".."):
            raise WrongError(f"a heredoc called {heredoc.name!r} cannot name a file: rename it")
        return name, self._expand(heredoc.chomped, CONTENT) if heredoc.expand else heredoc.chomped


class _Common(TypedDict):
    chown: str | None
    chmod: str | None
    workdir: str
    line: int
    text: str


def _check_url(url: str) -> None:
    if not _URL.match(url) or _GIT.fullmatch(url):
        raise _UnsupportedError("only files are downloaded, by http(s): clone a repository with RUN git clone")
    try:
        urlsplit(url)
    except ValueError as error:
        raise WrongError(f"{url} is no URL: {error}") from None


def _is_on(values: Mapping[str, str], name: str, default: bool = False) -> bool:
    """A switch: `--link` or `--link=true`."""
    return values[name].lower() not in ("false", "0", "f") if name in values else default


def _scratch(mount: str) -> str:
    """The target of a cache or tmpfs mount: what docker keeps of neither is a promise, so it may start as it is."""
    fields = {name.lower(): value for name, _, value in (part.partition("=") for part in mount.split(","))}
    kind = fields.get("type", "bind")
    if kind not in ("cache", "tmpfs"):
        raise _UnsupportedError(f"--mount=type={kind} is not supported: COPY what it needs, or remove it")
    target = next((fields[name] for name in ("target", "dst", "destination") if fields.get(name)), None)
    if target is None:
        raise WrongError(f"--mount={mount} has no target: write --mount=type={kind},target=<folder>")
    return target
