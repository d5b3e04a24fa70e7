"""How much is measured: the whole report, or one that takes a minute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    live: tuple[int, ...]
    #: How often the most of them are made, for what they hold.
    growths: int
    #: At the same time; what one caller sees is in the rounds by live episodes.
    callers: tuple[int, ...]
    #: Of all operations, one caller's, at each number of live episodes; the first level gets them twice.
    rounds: int
    #: Seconds for them at each level, on a machine where they take longer.
    level_s: float
    #: Of each operation in all, shared by the callers.
    shared: int
    #: Of each server and each reference that a ratio of whole runs is made of, in turn.
    repeats: int
    episodes: int
    at_once: int
    shell_workers: tuple[int, ...]
    output_bytes: int
    execs_for_cpu: int
    #: At least, for upstream.
    peer_s: float


FULL = Plan(
    live=(1, 8, 32, 128, 256), growths=3, callers=(8, 32), rounds=60, level_s=30.0, shared=320, repeats=5, episodes=192,
    at_once=64, shell_workers=(2, 4, 8), output_bytes=1 << 30, execs_for_cpu=400, peer_s=40.0,
)  # fmt: skip
SMOKE = Plan(
    live=(1, 8, 32), growths=1, callers=(8, 32), rounds=8, level_s=5.0, shared=64, repeats=1, episodes=48, at_once=32,
    shell_workers=(4,), output_bytes=1 << 28, execs_for_cpu=100, peer_s=5.0,
)  # fmt: skip
