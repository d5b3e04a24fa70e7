"""What this host can do: finds the best rung of the ladder and a scratch folder that really takes an overlay."""

import os
import shutil
from pathlib import Path

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import worktree
from tbench2_env.isolation.spec import RUNGS, Rung, SpawnerConfig


def candidate_rungs() -> list[str]:
    """Rungs worth trying here, best first: what the user namespace we are in allows at all."""
    lines = Path("/proc/self/uid_map").read_text().split("\n")
    ranges = [[int(field) for field in line.split()] for line in lines if line]
    if os.geteuid() != 0:
        return []
    if ranges == [[0, 0, 0xFFFF_FFFF]]:
        return ["1", "2"]
    return ["E"]


def choose_ground(config: SpawnerConfig) -> worktree.Ground:
    """Enter a mount namespace of our own and prepare the first ground that takes a worktree.

    Raises: OSError with a paragraph of what was tried and which call refused.
    """
    if not config.rungs:
        raise OSError(
            f"no rung of isolation fits user id {os.geteuid()}: start the server as root, or as root inside an "
            "unprivileged user namespace (enroot start --root, unshare --map-root-user)"
        )
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    refusals = []
    for rung in (RUNGS[name] for name in config.rungs):
        for scratch in config.scratch:
            try:
                return _try(rung, scratch, config.hide)
            except OSError as error:
                refusals.append(f"rung {rung.name} with scratch {scratch}: {error.strerror or error}")
    raise OSError("this host cannot isolate episodes. " + "; ".join(refusals))


def _try(rung: Rung, scratch: str, hide: tuple[str, ...]) -> worktree.Ground:
    folder = worktree.claim_folder(os.path.realpath(scratch))
    try:
        ground = worktree.prepare(folder, rung, (*hide, folder, os.path.dirname(folder)))
        os.close(worktree.create(ground, "trial", ()))
        worktree.discard("trial")
        shutil.rmtree("trash/trial", ignore_errors=True)
        return ground
    except OSError:
        worktree.demolish(folder)
        raise
