"""`python3 -m tbench2_env.server.app doctor [--json]`: what this host can do for episodes, and what frees the rest.

It starts the isolation as the server would, with the same variables, lets the trial episode run, and ends it again.
"""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import RUNGS, Rung
from tbench2_env.server import networks
from tbench2_env.server.engine import Engine, configs, start_engine
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.settings import Settings
from tbench2_env.server.toolchain.kit import Kit


@dataclass
class Report:
    """What `--json` prints. `rungs` says of each rung of the ladder what came of it here."""

    works: bool = False
    host: dict[str, str] = field(default_factory=dict)
    rung: str | None = None
    rungs: dict[str, str] = field(default_factory=dict)
    scratch: str = ""
    mount_plan: list[str] = field(default_factory=list)
    network: str = ""
    ways_out: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    environments: dict[str, str] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    error: str = ""


async def examine(settings: Settings) -> Report:
    """Start the isolation, look, and end it."""
    report = Report(host=_host(), rungs={name: _not_tried(rung, settings) for name, rung in RUNGS.items()})
    report.rungs |= {config.rung: "not needed" for config in configs(settings)}
    try:
        engine, refusals = await start_engine(settings, EgressProxy())
    except SandboxError as error:
        report.error = str(error)
        report.rungs |= {config.rung: "refused" for config in configs(settings)}
        return report
    spawner, host = engine.spawner, engine.spawner.host
    await engine.stop()
    report.works, report.rung = spawner.rung.isolated, spawner.rung.name
    report.rungs |= {name: f"refused: {reason}" for name, reason in refusals.items()}
    report.rungs[spawner.rung.name] = f"chosen: {spawner.rung.title}"
    report.scratch = f"{spawner.folder.parent} ({'memory: worktrees are bounded tmpfs' if host.in_memory else 'disk'})"
    report.mount_plan, report.limits = host.plan, host.enforcement
    report.network = networks.describe(settings, host)
    report.ways_out = _ways_out(settings, host.egress, host.egress_refusals)
    report.environments = engine.environments.describe() | {"verifier's toolchain": _toolchain(engine)}
    report.lacks = engine.lacks() + ([host.no_cgroups] if host.no_cgroups else [])
    return report


def _toolchain(engine: Engine) -> str:
    kit, uv_cache = Kit.open(engine.settings.cache_dir), engine.uv_cache
    if kit is not None:
        return f"{kit.folder}: uv {kit.manifest.uv}, Python {', '.join(kit.manifest.pythons)}"
    advice = "`tbench2 toolchain prepare` makes one, so that test.sh needs no network"
    if uv_cache is None:
        return f"none: {advice}"
    if uv_cache.exists():
        return f"the warm uv cache {uv_cache.path}, no kit: {advice}"
    return f"none: {advice}; else verifiers have a uv cache that you fill, UV_CACHE_DIR={uv_cache.path} uvx ..."


def _not_tried(rung: Rung, settings: Settings) -> str:
    if not rung.isolated:
        return "not isolated; only with TB2_ISOLATION=none and MAX_CONCURRENT_ENVS=1"
    if settings.isolation != "auto":
        return f"not tried: TB2_ISOLATION={settings.isolation}"
    return "does not fit this user and namespace"


def _host() -> dict[str, str]:
    id_map = "; ".join(" ".join(line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return {
        "kernel": f"{platform.release()} on {platform.machine()}",
        "user": str(os.geteuid()),
        "uid_map (inside, outside, count)": id_map,
    }


def _ways_out(settings: Settings, chosen: str | None, refusals: dict[str, str]) -> dict[str, str]:
    if settings.network in ("host", "private"):
        return {}
    found = {name: f"refused: {reason}" for name, reason in refusals.items()}
    if chosen is not None:
        found[chosen] = "chosen"
    return found | {"proxy": "for tasks with an allowlist" if chosen else "chosen: HTTP and HTTPS only"}


def print_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")
        return
    table = Table("what", "here", title="tbench2_env doctor", show_lines=True)
    rows = {
        "concurrent isolation": "works, proven by a trial episode" if report.works else "DOES NOT WORK",
        "host": _lines(report.host),
        "isolation ladder": _lines(report.rungs),
        "scratch": report.scratch,
        "network": report.network,
        "ways out of it": _lines(report.ways_out),
        "limits": _lines(report.limits),
        "task environments": _lines(report.environments),
        "lacks": "\n".join(report.lacks) or ("nothing" if report.works else ""),
        "mount plan": "\n".join(report.mount_plan),
        "why": report.error,
    }
    for what, here in rows.items():
        if here:
            table.add_row(what, here)
    # As wide as a terminal, or wide enough for a log: nothing is cut off either way.
    Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False).print(table)


def _lines(pairs: dict[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in pairs.items())
