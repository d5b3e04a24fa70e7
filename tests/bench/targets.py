"""The targets of issue 7, measured by what a report found. `/ bash` is a ratio to `bash -c true` in the same run."""

from collections.abc import Iterator

from bench import footprint, throughput
from bench.latency import CLOSE, EVALUATE, EXEC, RESET, RESET_COLD
from bench.report import BASH, SERVER, Report, Target

_EXEC, _RESET_COLD, _RESET_WARM, _EVALUATE, _CLOSE = 2.5, 6.0, 3.0, 6.0, 2.0
_GROWTH, _TAIL, _OF_SHELL = 1.3, 5.0, 50.0
_EXEC_CPU_MS, _PSS_MB, _SLAB_MB, _RSS_MB, _READY_S, _OUTPUT_MB_PER_S = 1.5, 0.1, 0.4, 120.0, 2.0, 300.0
_OUTPUT_GROWTH_MB = 64.0
_COMPARED = (EXEC, RESET, EVALUATE, CLOSE)


def targets(report: Report) -> list[Target]:
    """Each that the report has the figures for."""
    return [*_to_bash(report), *_flatness(report), *_whole(report), *_idle(report)]


def _to_bash(report: Report) -> Iterator[Target]:
    bash = report.find(BASH, EXEC)
    if bash is None:
        return
    wanted = ((EXEC, EXEC, _EXEC), (RESET_COLD, RESET_COLD, _RESET_COLD), ("reset warm", RESET, _RESET_WARM))
    for name, what, limit in (*wanted, (CLOSE, CLOSE, _CLOSE)):
        if found := report.find(SERVER, what):
            yield Target(name=f"{name} / bash", unit="x", limit=limit, measured=found.p50 / bash.p50)
    whole, harness = report.find(SERVER, EVALUATE), report.find(BASH, EVALUATE)
    if whole and harness:
        overhead = (whole.p50 - harness.p50) / bash.p50
        yield Target(name="evaluate's overhead over test.sh / bash", unit="x", limit=_EVALUATE, measured=overhead)


def _flatness(report: Report) -> Iterator[Target]:
    live = max((each.live for each in report.series if each.callers == 1), default=1)
    callers = max((each.callers for each in report.series), default=1)
    for what in _COMPARED:
        alone, beside = report.find(SERVER, what), report.find(SERVER, what, live=live)
        if alone and beside and live > 1:
            ratio = beside.p50 / alone.p50
            yield Target(name=f"{what}: p50 at {live} live / at 1", unit="x", limit=_GROWTH, measured=ratio)
    for what in _COMPARED:
        if (found := report.find(SERVER, what, live=callers, callers=callers)) and callers > 1:
            ratio = found.p99 / found.p50
            yield Target(name=f"{what}: p99 / p50 at {callers} callers", unit="x", limit=_TAIL, measured=ratio)


def _whole(report: Report) -> Iterator[Target]:
    value = {each.name: each.value for each in report.figures}
    if throughput.SHELL_EPISODES_PER_S in value:
        percent = 100 * value[throughput.EPISODES_PER_S] / value[throughput.SHELL_EPISODES_PER_S]
        name = "whole episodes per second / the unshare loop's"
        yield Target(name=name, unit="%", limit=_OF_SHELL, measured=percent, at_least=True)
    if throughput.CPU_PER_EXEC in value:
        above = value[throughput.CPU_PER_EXEC] - value[throughput.BASH_CPU_PER_EXEC]
        yield Target(name="CPU of an exec above bash's own", unit="ms", limit=_EXEC_CPU_MS, measured=above)
    if throughput.OUTPUT_MB_PER_S in value:
        rate, growth = value[throughput.OUTPUT_MB_PER_S], value[throughput.OUTPUT_GROWTH]
        name = throughput.OUTPUT_MB_PER_S
        yield Target(name=name, unit="MB/s", limit=_OUTPUT_MB_PER_S, measured=rate, at_least=True)
        yield Target(name=throughput.OUTPUT_GROWTH, unit="MB", limit=_OUTPUT_GROWTH_MB, measured=growth)


def _idle(report: Report) -> Iterator[Target]:
    limits = (
        (footprint.PSS, _PSS_MB), (footprint.SLAB, _SLAB_MB), (footprint.RSS, _RSS_MB), (footprint.READY, _READY_S),
    )  # fmt: skip
    for name, limit in limits:
        if found := report.figure(name):
            yield Target(name=name, unit=found.unit, limit=limit, measured=found.value)
