"""What a verifier is offered of the kit, or else of the warm uv cache: folders that it alone sees, and variables of its
environment."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tbench2_env.isolation.spec import Provided
from tbench2_env.server.toolchain import launchers, pins
from tbench2_env.server.toolchain.kit import PLACE, Kit
from tbench2_env.server.toolchain.pins import Pins
from tbench2_env.server.toolchain.uv_cache import UvCache, Warm

_UV_CACHE_DIR = "UV_CACHE_DIR"
_NO_KIT = "there is no kit: make one with `tbench2 toolchain prepare`"


@dataclass(frozen=True)
class Offer:
    """`describe` is `info.verifier.toolchain`. `refuse`: why the test script cannot run here, known beforehand."""

    provided: tuple[Provided, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    describe: Mapping[str, Any] = field(default_factory=dict)
    refuse: str | None = None


@contextlib.asynccontextmanager
async def held(
    kit: Kit | None, uv_cache: UvCache | None, script: str, env: Mapping[str, str], *, network: bool
) -> AsyncIterator[Offer]:
    """What `make` says, of a uv cache that stays while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        warm = None
        if kit is None and uv_cache is not None and pins.read(script).uses_uv:
            warm = await stack.enter_async_context(uv_cache.held())
        yield make(kit, script, env, network=network, warm=warm)


def make(kit: Kit | None, script: str, env: Mapping[str, str], *, network: bool, warm: Warm | None = None) -> Offer:
    """What the verifier that runs this script with this environment gets; `network`: its episode has a way out.

    Without a network all must come from the kit. With one, the kit gives what it has; it cuts nothing off. Variables
    that `env` has already stay as they are, but for PATH. `warm` is for where there is no kit.
    """
    wanted = pins.read(script)
    if not wanted.uses_any:
        return Offer()
    if kit is None:
        return _without_kit(warm, env) if wanted.uses_uv else _nothing(_NO_KIT)
    missing = _Missing.of(kit, wanted)
    refuse = None if network else missing.refusal()
    mode = missing.mode(network=network)
    describe = {**kit.describe(), "used": mode, "missing": missing.sentences(), "unclear": list(wanted.unclear)}
    variables = {} if network else {"APT_CONFIG": launchers.APT_CONFIG}
    if wanted.uses_uv:
        variables |= _for_uv(env, mode)
    if wanted.uses_pip and not missing.by_pip:
        variables |= _for_pip(network=network)
    added = {name: value for name, value in variables.items() if name == "PATH" or name not in env}
    return Offer((Provided(str(kit.folder), PLACE),), added, describe, refuse)


def _without_kit(warm: Warm | None, env: Mapping[str, str]) -> Offer:
    """The uv cache cuts nothing off: what is not in it, uv fetches as ever."""
    if warm is None:
        return _nothing(_NO_KIT)
    if _UV_CACHE_DIR in env:
        return _nothing(f"{_NO_KIT}; the uv cache {warm.path} is not offered: the task sets {_UV_CACHE_DIR}")
    if warm.copy is None:
        return _nothing(f"{_NO_KIT}; the uv cache {warm.path} cannot be used: {warm.why}")
    provided = Provided(str(warm.copy), PLACE, writable=True)
    return Offer((provided,), {_UV_CACHE_DIR: PLACE}, {"used": "uv cache", "cache": str(warm.path)})


def _nothing(why: str) -> Offer:
    return Offer(describe={"used": "nothing", "why": why})


@dataclass(frozen=True)
class _Missing:
    """What a script pins and a kit has not."""

    pythons: tuple[str, ...]
    by_uv: tuple[str, ...]
    by_pip: tuple[str, ...]

    @classmethod
    def of(cls, kit: Kit, wanted: Pins) -> "_Missing":
        lacking: dict[str, list[str]] = {"uv": [], "pip": []}
        for environment in wanted.environments:
            lacking[environment.tool] += kit.missing(environment)
        return cls(tuple(kit.missing_pythons(wanted)), *(tuple(dict.fromkeys(each)) for each in lacking.values()))

    def sentences(self) -> list[str]:
        return [*(f"Python {version}" for version in self.pythons), *self.by_uv, *self.by_pip]

    def refusal(self) -> str | None:
        """What pip is to install may be in the image already; uv makes an environment of its own each time."""
        if not self.pythons and not self.by_uv:
            return None
        what = " and ".join([*(f"Python {version}" for version in self.pythons), *self.by_uv])
        return (
            f"test.sh needs {what}, which the toolchain has not, and the episode has no network: "
            "make it with `tbench2 toolchain prepare` (--python gives it an interpreter)"
        )

    def mode(self, *, network: bool) -> str:
        if not self.pythons and not self.by_uv:
            return launchers.OFFLINE
        return launchers.PLAIN if self.pythons and network else launchers.ONLINE


def _for_uv(env: Mapping[str, str], mode: str) -> dict[str, str]:
    """The kit's uv is found by PATH, and nothing is laid into HOME, which is the agent's: its ~/.local/bin stays as it
    is, and on the PATH, where the installer's `env`, which there is none of now, would have put it."""
    found = [launchers.BIN, env.get("PATH", ""), f"{env['HOME'].rstrip('/')}/.local/bin" if env.get("HOME") else ""]
    return {
        launchers.MODE: mode,
        "PATH": ":".join(filter(None, found)),
        # Of uv's installer, should it be within reach: there is nothing to download any more.
        "UV_DOWNLOAD_URL": f"file://{launchers.NOTHING}",
    }


def _for_pip(*, network: bool) -> dict[str, str]:
    """Debian's Pythons, where they stand in for an image's own, want to be told that pip may install into them."""
    index = {"PIP_FIND_LINKS": f"{PLACE}/wheels"} if network else {"PIP_INDEX_URL": f"file://{launchers.INDEX}"}
    return {**index, "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
