"""A report as a picture. Error bars reach from the lower to the upper quartile, of p99 there are none."""

from pathlib import Path
from typing import TYPE_CHECKING

from bench.latency import CLOSE, EVALUATE, EXEC, OPERATIONS, RESET, RESET_COLD
from bench.report import BASH, BWRAP, SERVER, SHELL, UPSTREAM, Report, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES, _DPI = (18, 6), 110
_BESIDE = (EXEC, RESET, RESET_COLD, EVALUATE, CLOSE)


def draw(report: Report, path: Path) -> None:
    """As PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.label}: median, quartiles as bars, p99 dotted")
    by_live, by_callers, beside = figure.subplots(1, 3)
    _lines(by_live, report, "live episodes, one caller", [each for each in report.series if each.callers == 1])
    concurrent = [each for each in report.series if each.live == each.callers]
    _lines(by_callers, report, "callers at once", concurrent)
    _bars(beside, report)
    figure.savefig(path)


def _lines(axes: "Axes", report: Report, label: str, series: list[Series]) -> None:
    for number, what in enumerate(OPERATIONS):
        color = f"C{number}"
        rows = sorted((each for each in series if each.who == SERVER and each.what == what), key=lambda each: each.live)
        if len(rows) > 1:
            at, medians = [each.live for each in rows], [each.p50 for each in rows]
            axes.errorbar(at, medians, yerr=_quartiles(rows), marker="o", capsize=3, label=what, color=color)
            axes.plot(at, [each.p99 for each in rows], ":", color=color, linewidth=1)
    _label(axes, label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small")


def _bars(axes: "Axes", report: Report) -> None:
    who = [name for name in (SERVER, BASH, SHELL, BWRAP, UPSTREAM) if any(each.who == name for each in report.series)]
    width = 0.8 / len(who)
    for number, name in enumerate(who):
        found = [(place, report.find(name, what)) for place, what in enumerate(_BESIDE)]
        rows = [each for _, each in found if each]
        at = [place + number * width for place, each in found if each]
        axes.bar(at, [each.p50 for each in rows], width, yerr=_quartiles(rows), capsize=2, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(_BESIDE))], _BESIDE)
    _label(axes, "one caller, one episode")
    axes.legend(fontsize="small")


def _quartiles(rows: list[Series]) -> tuple[list[float], list[float]]:
    return [each.p50 - each.p25 for each in rows], [each.p75 - each.p50 for each in rows]


def _label(axes: "Axes", label: str) -> None:
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both", axis="y")
