"""Which environment a task gets: its prebuilt image, what its Dockerfile builds, or the node's own root in its place.

TB2_ENVIRONMENT   image                        build                         auto
docker_image      taken; if it is not to be    ignored                       taken if there is no Dockerfile
                  had, as `build`
Dockerfile        built                        built                         built, if its base is to be had
base not there    TB2_BASE_FALLBACK=node: built on the node's own root       node: COPY, ADD and WORKDIR only
                  refuse: the reset fails                                    refuse: the reset fails
"""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from tbench2_env.isolation.sandbox import Spawner
from tbench2_env.isolation.spec import Limits
from tbench2_env.server import limits, networks, shell
from tbench2_env.server.images import build, dockerfile, emulation, inventory, users
from tbench2_env.server.images.bases import Bases, BaseUnavailable, parse_bases
from tbench2_env.server.images.build import Builder, Stack
from tbench2_env.server.images.emulation import BuildPlan
from tbench2_env.server.images.image import Image
from tbench2_env.server.images.inventory import Use
from tbench2_env.server.images.layer import is_dir, resolve
from tbench2_env.server.images.registry import Registries
from tbench2_env.server.images.running import BuildFailed, Site, view
from tbench2_env.server.images.store import Kind, Lease, MissingLayer, Store, StoreError, StoreReadOnly
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import EnvironmentTable, TaskConfig, TaskError
from tbench2_env.server.tasks import Task
from tbench2_env.server.threads import finish

log = structlog.get_logger()

#: Times that an environment is made again because layers of it were broken or removed meanwhile.
_TRIES = 3
#: Builds at once; more would only share the CPUs and the network.
_BUILDS_MAX = max(2, len(os.sched_getaffinity(0)) // 2)
#: What tells one node's root from another's: which system, which packages.
_NODE_FILES = ("/etc/os-release", "/var/lib/dpkg/status", "/lib/apk/db/installed", "/var/lib/rpm/rpmdb.sqlite")

#: Told of a task's id and the step that begins, in words.
Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Environment:
    """What lies under a task's episodes. `layers` are ids in the store, the topmost first.

    With `over_node` the node's own root is below them. `plan` is what is to be laid over it where nothing is built;
    None: the task's own folder. `account` is who agents' commands run as. `source` says for people what it is.
    """

    source: str
    digest: str
    workdir: str | None
    env: Mapping[str, str]
    unmet: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    over_node: bool = True
    plan: BuildPlan | None = None
    account: users.Account = users.ROOT

    def describe(self) -> dict[str, object]:
        """`info.environment` of a reset."""
        return {"source": self.source, "layers": len(self.layers), "over_node": self.over_node}


class Environments:
    """The environments of one server life, over one spawner, in the store that they share with other servers."""

    def __init__(self, spawner: Spawner, settings: Settings, proxy: EgressProxy) -> None:
        self._settings, self._spawner = settings, spawner
        limit = None if settings.store_max_gb is None else int(settings.store_max_gb * 1e9)
        self.store = Store(settings.cache_dir / "store", Kind.of(spawner.rung), limit)
        self._registries = Registries.parse(settings.registry, settings.docker_config.expanduser() / "config.json")
        self._bases = Bases(parse_bases(settings.bases), self._registries, self.store)
        # A build has the network that a task has which asks for nothing: docker builds, too, whatever the task may do.
        network = networks.choose(settings, spawner.host, EnvironmentTable())
        self._site = Site(spawner, proxy, self.store, network)
        #: Builds that may be under way at once.
        self.building = asyncio.Semaphore(_BUILDS_MAX)
        self.progress: Progress = lambda task_id, step: log.info("building", task_id=task_id, step=_short(step))

    def lease(self, environment: Environment) -> Lease:
        """Keep its layers from being removed until the lease is closed. Raises: MissingLayer."""
        return self.store.lease(environment.layers)

    def folders(self, environment: Environment) -> tuple[str, ...]:
        """Its layers as `SandboxSpec.stored` takes them."""
        return tuple(str(self.store.root(each)) for each in environment.layers)

    def describe(self) -> dict[str, str]:
        """For `doctor`: where environments come from here. Blocks."""
        settings, layers = self._settings, self.store.usage() if self.store.folder.is_dir() else []
        stands_in = "the node's own root" if settings.base_fallback == "node" else "nothing"
        return {
            "TB2_ENVIRONMENT": settings.environment,
            "bases (TB2_BASES)": ", ".join(parse_bases(settings.bases)) or "none",
            "registry (TB2_REGISTRY)": self._registries.describe(),
            "where a base is missing (TB2_BASE_FALLBACK)": stands_in,
            "store": f"{self.store.folder}: {len(layers)} layers, {sum(each.bytes for each in layers) / 1e9:.1f} GB",
        }

    async def prepare(self, task: Task, context: Path, config: TaskConfig, workdir: str | None) -> Environment:
        """Have the environment of a task whose folder environment/ is `context`; takes minutes where it is built.

        `workdir`, if set, counts instead of what image or Dockerfile say.

        Raises: TaskError saying which base is not to be had or which step failed and how; DockerfileError,
        SandboxError.
        """
        for _ in range(_TRIES):
            try:
                with contextlib.ExitStack() as held:
                    environment = await self._choose(_Wanted(task, context, config, workdir, held))
                    if environment.layers:
                        await self._make_room()
                broken = await self.store.verify(environment.layers)
            except MissingLayer as missing:  # another server made room, or they turned out to be broken
                log.warning("layers of an environment were removed while it was made", layers=missing.ids)
                await self.store.verify(missing.ids)  # removes the broken ones, now that nothing here leases them
                continue
            except StoreError as error:
                raise TaskError(f"its environment cannot be stored: {error}") from None
            except OSError as error:
                raise TaskError(f"its environment cannot be made: {error}") from None
            if not broken:
                await asyncio.to_thread(self._remember, task, environment)
                return environment
            log.warning("layers of the store were broken, and are made again", layers=broken)
        raise TaskError("its environment's layers keep breaking or vanishing: see the disk of TB2_CACHE_DIR")

    def _remember(self, task: Task, environment: Environment) -> None:
        """For people who ask what the store holds, and for whom."""
        if environment.layers:
            with contextlib.suppress(StoreReadOnly):
                inventory.remember(self.store, Use(task.task_id, environment.source, environment.layers))

    async def _make_room(self) -> None:
        with contextlib.suppress(StoreReadOnly):
            await finish(self.store.trim)

    async def _choose(self, wanted: "_Wanted") -> Environment:
        image, unmet = wanted.config.environment.docker_image, list[str]()
        if not self._spawner.rung.isolated:
            return on_node(wanted.dockerfile()) if wanted.has_dockerfile else folder_of(wanted.task)
        if image and (self._settings.environment == "image" or not wanted.has_dockerfile):
            self.progress(wanted.task.task_id, f"docker_image {image}")
            try:
                found = await self._bases.resolve(image)
                return await self._finish(wanted, _stack(found), found.source, [])
            except BaseUnavailable as error:
                unmet.append(f"environment.docker_image = {image}: {error.reason}")
                self._check_fallback(unmet[0], may_build=wanted.has_dockerfile)
        if not wanted.has_dockerfile:
            return folder_of(wanted.task, unmet)
        return await self._of_dockerfile(wanted, unmet)

    def _check_fallback(self, reason: str, *, may_build: bool = False) -> None:
        """Raises: TaskError where nothing else may stand in."""
        if self._settings.base_fallback == "refuse" and not may_build:
            raise TaskError(f"{reason} (TB2_BASE_FALLBACK=refuse: the node's own root may not stand in for it)")

    async def _of_dockerfile(self, wanted: "_Wanted", unmet: list[str]) -> Environment:
        parsed = wanted.dockerfile()
        stacks: dict[str, Stack] = {"": _node()}
        for reference in parsed.needed_images:
            self.progress(wanted.task.task_id, f"FROM {reference}")
            try:
                stacks[reference] = _stack(await self._bases.resolve(reference))
                wanted.held.enter_context(self.store.lease(stacks[reference].layers))
            except BaseUnavailable as error:
                self._check_fallback(f"base image {reference}: {error.reason}")
                if self._settings.environment == "auto":
                    return on_node(parsed, unmet, error)
                stacks[reference] = _node()
                unmet.append(f"base image {reference}: the node's own root stands in for it ({error.reason})")
        stack = await self._build(wanted, parsed, stacks, unmet)
        source = f"environment/Dockerfile, built on {', '.join(parsed.needed_images) or 'the node'}"
        return await self._finish(wanted, stack, source, unmet)

    async def _build(
        self, wanted: "_Wanted", parsed: dockerfile.Dockerfile, stacks: dict[str, Stack], unmet: list[str]
    ) -> Stack:
        """Raises: TaskError, which also says what stood in for an image: that may be why."""
        builder = Builder(self._site, parsed, wanted.context, stacks, _limits(wanted.config))
        builder.progress = lambda step: self.progress(wanted.task.task_id, step)
        async with self.building:
            try:
                return await builder.build(wanted.config.environment.build_timeout_sec, wanted.held)
            except (BuildFailed, dockerfile.DockerfileError) as error:
                where = "environment/" if isinstance(error, dockerfile.DockerfileError) else ""
                raise TaskError("\n".join([f"{where}{error}", *unmet])) from None

    async def _finish(self, wanted: "_Wanted", stack: Stack, source: str, unmet: list[str]) -> Environment:
        """Check that the image can hold an episode, and look up who its commands run as. Raises: TaskError."""
        workdir = wanted.workdir or stack.config.workdir or "/"
        wanted.held.enter_context(self.store.lease(stack.layers))
        async with view(self._site, build.below(self._site, stack)) as tree:
            if tree.lstat(resolve(tree, shell.BASH)) is None:
                raise TaskError(f"{source}: there is no {shell.BASH} in it, which agents and test.sh need")
            has_workdir = is_dir(tree.lstat(resolve(tree, workdir)))
            try:
                account = users.look_up(stack.config.user, tree)
            except users.UnknownUser as error:
                raise TaskError(f"{source}: USER: {error}") from None
        if not has_workdir:
            stack = await build.add_workdir(self._site, stack, workdir, wanted.held)
        if account.ids and not self._spawner.rung.has_id_range:
            unmet = [*unmet, f"USER {stack.config.user}: this host has one user id only, so commands run as root"]
            account = replace(account, ids=())
        digest = hashlib.sha256(json.dumps([stack.chain, stack.layers, stack.over_node]).encode()).hexdigest()
        return Environment(
            source, digest, workdir, dict(stack.config.env), tuple(unmet), stack.layers, stack.over_node,
            account=account,
        )  # fmt: skip


@dataclass(frozen=True)
class _Wanted:
    """A task whose environment is wanted; `context` is its folder environment/, or where that would be.

    `held` has leases on all that was made for it so far.
    """

    task: Task
    context: Path
    config: TaskConfig
    workdir: str | None
    held: contextlib.ExitStack

    @property
    def has_dockerfile(self) -> bool:
        return (self.context / "Dockerfile").is_file()

    def dockerfile(self) -> dockerfile.Dockerfile:
        """Raises: DockerfileError."""
        return dockerfile.load(self.context / "Dockerfile")


def _stack(image: Image) -> Stack:
    return Stack(image.digest, image.layers, config=image.config)


def _node() -> Stack:
    """The node's own root as a base. Layers made over it are of use on nodes like it only."""
    digest = hashlib.sha256()
    for path in map(Path, _NODE_FILES):
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return Stack(f"node:{digest.hexdigest()}", over_node=True)


def folder_of(task: Task, unmet: Sequence[str] = ()) -> Environment:
    """A task with neither a Dockerfile nor an image that is to be had: its own folder, at its own path."""
    source = "the task's folder on the node's own root"
    return Environment(source, "folder", str(task.path), {}, tuple(unmet))


def on_node(
    parsed: dockerfile.Dockerfile, unmet: Sequence[str] = (), lacking: BaseUnavailable | None = None
) -> Environment:
    """What of a Dockerfile can be had without its base: the files that it copies, laid over the node's own root."""
    plan = emulation.emulate(parsed)
    source = "files of environment/Dockerfile on the node's own root"
    found = list(plan.unmet)
    if lacking is not None:
        missing = f"base image {lacking.reference}:"
        found = [f"{each} ({lacking.reason})" if each.startswith(missing) else each for each in found]
    return Environment(source, "node", plan.workdir, plan.env, (*unmet, *found), plan=plan)


def _limits(config: TaskConfig) -> Limits:
    """A build may use more memory and CPU than the task's episodes, as with docker, but is no fork bomb."""
    return replace(limits.of_task(config.environment, enforced=True), memory_bytes=None, cpus=None)


def _short(step: str) -> str:
    text = " ".join(step.split())
    return text if len(text) <= 120 else text[:119] + "…"
