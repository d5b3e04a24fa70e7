"""What of a Dockerfile can be done without running anything: COPY, ADD and WORKDIR over the node's root."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tbench2_env.server.images import dockerfile
from tbench2_env.server.images.dockerfile import Dockerfile, Stage
from tbench2_env.server.images.image import ImageConfig
from tbench2_env.server.images.planning import Plan, survey
from tbench2_env.server.images.steps import Copy, Download, Run, Step, Workdir


@dataclass(frozen=True)
class BuildPlan:
    """The last stage, with what it inherits from earlier ones by `FROM <stage>`.

    `workdir` is None without a WORKDIR; `env` holds what ENV set and nothing else; `user` is the last USER as written;
    `unmet` is what would need a build (RUN, COPY --from, downloads), in words for a person.
    """

    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    steps: tuple[Workdir | Copy, ...] = ()
    unmet: tuple[str, ...] = ()
    user: str | None = None


def load(path: Path) -> BuildPlan:
    """The plan of the Dockerfile at `path`. Raises: DockerfileError, or OSError when it cannot be read."""
    return emulate(dockerfile.load(path))


def emulate(whole: Dockerfile) -> BuildPlan:
    """What the node's root, standing in for the base image, can have of the target stage. Raises: DockerfileError."""
    plans: list[Plan] = []
    for index, stage in enumerate(whole.stages):
        plans.append(survey(whole, index, ImageConfig() if stage.base_stage is None else plans[stage.base_stage]))
    lineage: list[int] = []
    below: int | None = whole.target
    while below is not None:
        lineage.insert(0, below)
        below = whole.stages[below].base_stage
    config = plans[-1].config
    unmet = [text for index in lineage for _, text in sorted(_unmet(whole.stages[index], plans[index]))]
    if (config.user or "root").partition(":")[0] not in ("root", "0"):
        unmet.append(f"USER {config.user}: commands run as root")
    steps = tuple(done for index in lineage for step in plans[index].steps if (done := _done(step)))
    return BuildPlan(config.workdir, dict(config.env), steps, tuple(unmet), config.user)


def _done(step: Step) -> Workdir | Copy | None:
    match step:
        case Workdir():
            return replace(step, user=None)  # the node may not have it, and every command is root's
        case Copy(from_stage=None, from_image=None):
            return step
    return None


def _unmet(stage: Stage, plan: Plan) -> Iterator[tuple[int, str]]:
    """(line, what is missing) for all that `stage` wants beyond its parent."""
    if stage.base:
        yield stage.line, f"base image {stage.base}: the node's own root stands in for it"
    for step in plan.steps:
        match step:
            case Run():
                yield step.line, _described(step.text, step.line)
            case Download():
                yield step.line, f"{_described(step.text, step.line)}: nothing is downloaded"
            case Copy() if not _done(step):
                yield step.line, f"{_described(step.text, step.line)}: not available without a build"
    for each in plan.unsupported:
        yield each.line, f"{_described(each.text, each.line)}: {each.reason}"
    for instruction in stage.instructions:
        if instruction.keyword == "HEALTHCHECK":
            yield instruction.line, _described(instruction.text, instruction.line)


def _described(text: str, line: int) -> str:
    """An instruction without its heredocs, on one line of at most 200 characters, and where it is."""
    text = " ".join(text.partition("\n")[0].split())
    return f"{text if len(text) <= 200 else text[:199] + '…'} (line {line})"
