"""What there is while nothing happens: memory, disk, and the time until a server is ready."""

import asyncio
from collections.abc import Callable

from bench import usage
from bench.latency import idle
from bench.report import Figure
from bench.sampling import figure
from bench.subject import Subject

READY, RSS, RSS_IDLE = "until ready", "server RSS", "server RSS without episodes"
PSS, FAMILY_PSS, SLAB = (
    "PSS of an idle episode",
    "growth of the server's family, PSS per idle episode",
    "slab per idle episode",
)
SCRATCH = "scratch of an idle episode"
#: For what a reset leaves to the background.
_SETTLE_S = 1.0


def ready(make: Callable[[], Subject], times: int) -> Figure:
    """Seconds from the start of the process."""
    seconds = []
    for _ in range(times):
        with make() as server:
            seconds.append(server.ready_s)
    return figure(READY, seconds, "s")


async def idle_episodes(server: Subject, count: int, times: int) -> list[Figure]:
    """`count` of them, `times` times, on a server that has had none. How much a slab grows depends on what is free in
    it, so the first time it may grow by more."""
    rss = server.rss_bytes()
    own, growths = [], []
    async with idle(server) as episodes:
        for _ in range(times):
            await episodes.grow(1)  # with the first, things come that stay: the snapshot of its task, the egress proxy
            await asyncio.sleep(_SETTLE_S)
            before = _shared(server)
            await episodes.grow(1 + count)
            await asyncio.sleep(_SETTLE_S)
            after = _shared(server)
            own.append(usage.pss_bytes(server.episodes()) / (1 + count))
            growths.append({name: (after[name] - before[name]) / count for name in before})
        full_rss = server.rss_bytes()
    return [
        figure(PSS, [each / 1e6 for each in own], "MB"),
        figure(FAMILY_PSS, [each["family"] / 1e6 for each in growths], "MB"),
        figure(SLAB, [each["slab"] / 1e6 for each in growths], "MB"),
        figure(SCRATCH, [each["scratch"] / 1e3 for each in growths], "kB"),
        figure(RSS_IDLE, [rss / 1e6], "MB"),
        figure(RSS, [full_rss / 1e6], "MB"),
    ]


def _shared(server: Subject) -> dict[str, int]:
    return {
        "family": usage.pss_bytes(server.family()),
        "slab": usage.slab_bytes(),
        "scratch": usage.disk_bytes(server.scratch),
    }
