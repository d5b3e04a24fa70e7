"""What this host allows: the rungs worth trying, a scratch folder that really takes an overlay, what is not seen."""

import os
from dataclasses import replace
from pathlib import Path

from tbench2_env.isolation import capabilities, mask, userns, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import RUNGS, Rung, SandboxSpec, SpawnerConfig
from tbench2_env.isolation.stack import Ground

_EVERY_ID = [[0, 0, 0xFFFF_FFFF]]


def candidate_rungs() -> list[str]:
    """Rungs worth trying here, best first: what our user and our user namespace allow at all."""
    own = "4" if os.stat("/usr").st_uid == os.geteuid() else "5"
    if os.geteuid() != 0 or not capabilities.has(capabilities.SYS_ADMIN):
        return [own]
    return ["1", "2", "3"] if id_map() == _EVERY_ID else ["E"]


def id_map() -> list[list[int]]:
    """The user namespace that we are in: first id inside, first id outside and count, of each range."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [[int(field) for field in line.split()] for line in lines]


def resolve(name: str) -> Rung:
    """The rung as it is here: root of a namespace that is root of the host, too, must not write to the host's /proc."""
    rung = RUNGS[name]
    is_host_root = rung.id_map[1] == 0 and any(line[:2] == [0, 0] for line in id_map())
    return replace(rung, protect_proc_sys=rung.protect_proc_sys or is_host_root)


def hidden_mounts() -> list[str]:
    """Mount points below the system folders. Worktrees have what lies below them instead, so this is to be told."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = {line.split()[4].encode().decode("unicode_escape") for line in lines}
    # The mask has files of its own for what containers bind into /etc.
    return sorted(p for p in points if p != "/" and not mask.is_hidden_already(p) and not p.startswith("/etc/"))


def choose_ground(config: SpawnerConfig) -> Ground:
    """Enter a mount namespace of our own and prepare the first scratch folder that takes a worktree.

    Raises: OSError with a paragraph of what was tried and which call refused.
    """
    rung = resolve(config.rung)
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    refusals = []
    for scratch in config.scratch:
        try:
            return _try(rung, scratch, config.hide)
        except OSError as error:
            refusals.append(f"scratch {scratch}: {error.strerror or error}")
    raise OSError("; ".join(refusals))


def enter_own_user_namespace() -> None:
    """Become root of a user namespace of our own, in which only our own user exists.

    Before anything makes the process undumpable: its /proc files would then belong to the host's root.
    """
    uid, gid = os.geteuid(), os.getegid()
    sc.unshare(sc.CLONE_NEWUSER)
    userns.write_own_maps(uid, gid)


def _try(rung: Rung, scratch: str, hide: tuple[str, ...]) -> Ground:
    folder = worktree.claim_folder(os.path.realpath(scratch))
    try:
        ground = worktree.prepare(folder, rung, (*hide, folder, os.path.dirname(folder)))
        for fd, _ in worktree.create(ground, SandboxSpec("first")):
            os.close(fd)
        worktree.discard(ground, "first")
        worktree.delete("trash/first")
        return ground
    except OSError:
        worktree.demolish(folder)
        raise
