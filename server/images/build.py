"""Builds: a Dockerfile's stages carried out step by step in sandboxes, each step that changes files a stored layer.

A layer's id is the hash of all that decides what is in it: what is below, the step with its variables substituted, the
files it takes. So the store is the cache: what has the same id is not made again, by whichever server or process.
"""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tbench2_env.isolation.spec import Limits
from tbench2_env.server.images import copying, fetching, planning
from tbench2_env.server.images.context import Context, View
from tbench2_env.server.images.dockerfile import Dockerfile
from tbench2_env.server.images.image import ImageConfig
from tbench2_env.server.images.running import Below, BuildFailed, Command, Site, Time, view
from tbench2_env.server.images.steps import Copy, Download, Run, Step, Workdir, identity
from tbench2_env.server.images.store import MissingLayer
from tbench2_env.server.threads import finish, run

_DOWNLOADED = "downloaded"
#: Raised whenever the same step could come to another layer than before.
_FORMAT = 1
#: Seconds beyond a build's time that a step may take to end, which a command does by itself.
_GRACE_S = 10.0


@dataclass(frozen=True)
class Stack:
    """What a stage has come to so far: layers of the store, the topmost first, over the node's root or nothing.

    `chain` stands for all that is in them.
    """

    chain: str
    layers: tuple[str, ...] = ()
    over_node: bool = False
    config: ImageConfig = field(default_factory=ImageConfig)


class Builder:
    """One build: a Dockerfile, the folder that is its context, and what its bases are.

    `limits` bound each RUN. `progress` is told of each step, in words, before it is carried out.
    """

    def __init__(
        self, site: Site, dockerfile: Dockerfile, context: Path, bases: Mapping[str, Stack], limits: Limits
    ) -> None:
        self._site, self._dockerfile, self._bases = site, dockerfile, bases
        self._context, self._limits = Context(context), limits
        self._stages: dict[int, Stack] = {}
        self._plans: dict[int, planning.Plan] = {}
        self.progress: Callable[[str], None] = lambda text: None

    async def build(self, timeout_s: float, held: ExitStack) -> Stack:
        """Carry out the last stage and those that it needs, in `timeout_s` seconds; `held` gets leases on all layers.

        What no build here can do is told before anything is built.

        Raises: BuildFailed, DockerfileError, MissingLayer, SandboxError, OSError.
        """
        self._plan()
        clock = Time(timeout_s)
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                for index in self._dockerfile.needed_stages:
                    self._stages[index] = await self._build_stage(index, clock, held)
        except TimeoutError:
            raise BuildFailed(clock.is_over) from None
        return self._stages[self._dockerfile.needed_stages[-1]]

    def _plan(self) -> None:
        for index in self._dockerfile.needed_stages:
            stage = self._dockerfile.stages[index]
            below = self._bases[stage.base].config if stage.base_stage is None else self._plans[stage.base_stage]
            self._plans[index] = planning.plan(self._dockerfile, index, below)

    async def _build_stage(self, index: int, clock: Time, held: ExitStack) -> Stack:
        stage, plan = self._dockerfile.stages[index], self._plans[index]
        stack = self._bases[stage.base] if stage.base_stage is None else self._stages[stage.base_stage]
        for step in plan.steps:
            self.progress(step.text)
            stack = await self._carry_out(stack, step, clock, held)
        return replace(stack, config=plan.config)

    async def _carry_out(self, stack: Stack, step: Step, clock: Time, held: ExitStack) -> Stack:
        taken = await asyncio.to_thread(self._taken, step)
        new = _New(step, taken, lambda folder: self._fill(stack, step, clock, folder))
        return await _add_layer(self._site, stack, new, held)

    def _taken(self, step: Step) -> str:
        """What stands for the files that `step` copies. Raises: DockerfileError for what is not in the context."""
        if not isinstance(step, Copy):
            return ""
        source = self._source(step)
        with copying.blamed(step):
            return self._context.digest(step) if source is None else source.chain

    def _source(self, step: Copy) -> Stack | None:
        """What a COPY --from copies from; None: the context."""
        if step.from_stage is not None:
            return self._stages[step.from_stage]
        return None if step.from_image is None else self._bases[step.from_image]

    async def _fill(self, stack: Stack, step: Step, clock: Time, folder: Path) -> None:
        match step:
            case Run():
                await Command(self._site, step, self._limits, clock).run(below(self._site, stack), folder)
            case Copy():
                await self._copy(stack, step, folder)
            case Workdir():
                await lay(self._site, stack, step, self._context, folder)
            case Download():
                (folder / _DOWNLOADED).mkdir()
                async with asyncio.timeout(clock.left_s):
                    await run(lambda stop: fetching.fetch(step, folder / _DOWNLOADED, clock.left_s, stop))
                await lay(self._site, stack, step.copy, Context(folder / _DOWNLOADED), folder)
                await finish(lambda: shutil.rmtree(folder / _DOWNLOADED))

    async def _copy(self, stack: Stack, step: Copy, folder: Path) -> None:
        source = self._source(step)
        if source is None:
            await lay(self._site, stack, step, self._context, folder)
            return
        async with _sound(self._site, source), view(self._site, below(self._site, source)) as tree:
            await lay(self._site, stack, step, View(tree.root, tree.shift), folder)


@dataclass(frozen=True)
class _New:
    """A layer to be: of `step`, by `fill`; `taken` stands for the files that it takes."""

    step: Step
    taken: str
    fill: Callable[[Path], Awaitable[None]]


async def add_workdir(site: Site, stack: Stack, path: str, held: ExitStack) -> Stack:
    """The stack with a folder at the absolute `path`, if there was none. Raises: as `Builder.build`."""
    step, empty = Workdir(path, text=f"WORKDIR {path}"), Context(Path("/nonexistent"))
    return await _add_layer(site, stack, _New(step, "", lambda folder: lay(site, stack, step, empty, folder)), held)


async def _add_layer(site: Site, stack: Stack, new: _New, held: ExitStack) -> Stack:
    """The stack with the layer, made unless the store has it."""
    words = [_FORMAT, stack.chain, identity(new.step), new.taken]
    chain = hashlib.sha256(json.dumps(words).encode()).hexdigest()

    async def fill(folder: Path) -> None:
        async with _sound(site, stack):
            await new.fill(folder)

    await site.store.make(chain, fill, {"created_by": new.step.text})
    held.enter_context(site.store.lease([chain]))
    with os.scandir(site.store.root(chain)) as entries:
        changed = any(entries)
    return replace(stack, chain=chain, layers=(chain, *stack.layers) if changed else stack.layers)


@asynccontextmanager
async def _sound(site: Site, stack: Stack) -> AsyncIterator[None]:
    """Lease the layers, which are as they were made: nothing is to be made of damaged ones. Raises: MissingLayer."""
    with site.store.lease(stack.layers):
        if broken := await site.store.verify(stack.layers):
            raise MissingLayer(broken)
        yield


async def lay(site: Site, stack: Stack, step: Copy | Workdir, source: Context | View, folder: Path) -> None:
    """Make the layer of a step that runs nothing. Raises: DockerfileError, OSError."""
    root, owner = folder / "root", site.store.kind.owner
    root.mkdir()
    async with view(site, below(site, stack)) as base:
        await finish(lambda: copying.build_layer((step,), source, root, base, owner))


def below(site: Site, stack: Stack) -> Below:
    return Below(tuple(str(site.store.root(each)) for each in stack.layers), stack.over_node)
