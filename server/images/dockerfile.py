"""A Dockerfile's stages: what each is built on, and which of them the last, the one that is wanted, needs.

Nothing here touches the build context, an image or a sandbox. What a stage's instructions do is `planning.plan`: that
wants the environment of the image below, which is known only when that is there.
"""

import difflib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tbench2_env.server.images.dockerfile_syntax import (
    WORD,
    DockerfileError,
    Instruction,
    WrongError,
    expand,
    flags,
    instructions,
)

__all__ = ["COPY_FLAGS", "Dockerfile", "DockerfileError", "Stage", "load", "parse"]

COPY_FLAGS = frozenset({"from", "chown", "chmod", "link", "parents", "exclude"})
_KEYWORDS = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
)
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
# What docker sets before the first FROM; a stage sees them after an ARG of the name.
_PLATFORM_ARGS: Mapping[str, str] = {
    f"{side}{name}": value
    for side in ("BUILD", "TARGET")
    for name, value in {
        "PLATFORM": f"linux/{_ARCHITECTURE}", "OS": "linux", "ARCH": _ARCHITECTURE, "VARIANT": "",
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage. `base` is the image reference of its FROM, or `scratch`; "" over the node or a `base_stage`.

    `name` is in lower case, "" if it has none. `platform` is the flag of its FROM. `global_args` are what ARG set
    before the first FROM.
    """

    name: str = ""
    base: str = ""
    base_stage: int | None = None
    platform: str | None = None
    instructions: tuple[Instruction, ...] = ()
    global_args: Mapping[str, str] = field(default_factory=dict)
    line: int = 1


@dataclass(frozen=True)
class Dockerfile:
    """`stages` in their order; the last, `target`, is what is wanted. A text without FROM is one stage on the node."""

    stages: tuple[Stage, ...]

    @property
    def target(self) -> int:
        return len(self.stages) - 1

    @property
    def needed_stages(self) -> tuple[int, ...]:
        """The stages to build, in order: the target and what it takes from, directly or not."""
        needed = {self.target}
        for index in reversed(range(len(self.stages))):
            if index in needed:
                needed |= self._uses(index)
        return tuple(sorted(needed))

    @property
    def needed_images(self) -> tuple[str, ...]:
        """References of the images that the needed stages are built on or copy from, each once."""
        found: dict[str, None] = {}
        for index in self.needed_stages:
            stage = self.stages[index]
            copied = [origins for each in stage.instructions for origins in self.origins(each, index).items()]
            names = [stage.base, *(name for name, of_stage in copied if of_stage is None)]
            found |= dict.fromkeys(filter(None, names))
        return tuple(found)

    def _uses(self, index: int) -> set[int]:
        stage = self.stages[index]
        uses = {stage.base_stage}.union(*(self.origins(each, index).values() for each in stage.instructions))
        return {use for use in uses if use is not None}

    def origins(self, instruction: Instruction, index: int) -> dict[str, int | None]:
        """What an instruction of stage `index` copies from, and which stage that is; None: an image.

        Raises: WrongError.
        """
        found = flags(instruction, COPY_FLAGS)[0] if instruction.keyword == "COPY" else []
        return {value: self.find(value, index) for name, value in found if name == "from"}

    def find(self, name: str, before: int) -> int | None:
        """The stage that `--from=name` means in stage `before`; None if it is an image's name.

        Raises: WrongError.
        """
        if "$" in name:
            raise WrongError(f"--from={name}: docker puts no variables in here: give FROM {name} AS <name> a stage")
        if name.isdecimal():
            if int(name) >= before:
                raise WrongError(f"--from={name}: there are {before} stages before this one: use 0 or its name")
            return int(name)
        return next((i for i in reversed(range(before)) if self.stages[i].name == name.lower()), None)


def load(path: Path) -> Dockerfile:
    """`parse` the file at `path`. Raises: DockerfileError, or OSError when it cannot be read."""
    return parse(path.read_bytes().decode(errors="surrogateescape"))


def parse(text: str) -> Dockerfile:
    """Split a Dockerfile into its stages.

    Raises:
        DockerfileError: the Dockerfile is wrong; nothing else is ever raised.
    """
    done: list[Stage] = []
    stage: Stage | None = None
    args = dict(_PLATFORM_ARGS)
    before: list[Instruction] = []
    for instruction in instructions(text):
        with instruction.blamed():
            _check(instruction)
            if instruction.keyword == "FROM":
                if any(each.keyword != "ARG" for each in before):
                    raise WrongError("comes after other instructions: only ARG may stand before the first FROM")
                done += [stage] if stage else []
                stage = _from(instruction, args, done)
            elif stage:
                stage = replace(stage, instructions=(*stage.instructions, instruction))
            else:
                before.append(instruction)
                if instruction.keyword == "ARG":
                    args.update(declared(instruction, args, {}))
    whole = Dockerfile((*done, stage or Stage(instructions=tuple(before))))
    for index, each in enumerate(whole.stages):
        for instruction in each.instructions:
            with instruction.blamed():
                whole.origins(instruction, index)  # so that needed_stages cannot fail
    return whole


def declared(instruction: Instruction, variables: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """What an ARG sets: names with a default, and those that `inherited` has. Raises: WrongError."""
    found: dict[str, str] = {}
    for word in WORD.findall(instruction.rest):
        name, equals, value = word.partition("=")
        if equals:
            found[name] = expand(value, {**variables, **found})
        elif name in inherited:
            found[name] = inherited[name]
    return found


def _check(instruction: Instruction) -> None:
    if instruction.keyword not in _KEYWORDS:
        close = difflib.get_close_matches(instruction.keyword, _KEYWORDS, 1) or ["one of the reference"]
        raise WrongError(f"unknown instruction: use {close[0]}, or end the line before with a backslash")
    if not instruction.rest:
        raise WrongError("has no arguments: add them or remove the line")


def _from(instruction: Instruction, args: Mapping[str, str], done: list[Stage]) -> Stage:
    options, rest = flags(instruction, frozenset({"platform"}))
    words = rest.split()
    if len(words) != 1 and not (len(words) == 3 and words[1].upper() == "AS"):
        raise WrongError("write FROM <image> or FROM <image> AS <name>")
    image = expand(words[0], args)
    if not image:
        raise WrongError(f"{words[0]} is empty: give it a default with ARG before FROM")
    base_stage = next((index for index, stage in reversed([*enumerate(done)]) if stage.name == image.lower()), None)
    return Stage(
        name=words[2].lower() if len(words) == 3 else "",
        base=image if base_stage is None else "",
        base_stage=base_stage,
        platform=expand(dict(options)["platform"], args) if options else None,
        global_args=dict(args),
        line=instruction.line,
    )
