"""A report on the terminal."""

from rich.console import Console
from rich.table import Table

from bench.latency import OPERATIONS
from bench.report import BASH, BWRAP, SERVER, SHELL, UPSTREAM, Report, Series

_WHO = (SERVER, BASH, SHELL, BWRAP, UPSTREAM)


def show(report: Report, console: Console) -> None:
    console.print(_latencies(report), _figures(report), _targets(report), *report.notes, sep="\n")
    console.print(f"{report.label}: {report.seconds:.0f} s on {report.machine}", markup=False)


def _latencies(report: Report) -> Table:
    table = _table("Milliseconds", "operation", "who", "live", "callers", "n", "p50", "IQR", "p95", "p99", "x bash")
    for what in OPERATIONS:
        rows = sorted((each for each in report.series if each.what == what), key=_order)
        for each in rows:
            table.add_row(*_cells(report, each))
        table.add_section()
    return table


def _order(series: Series) -> tuple[int, int, int]:
    return _WHO.index(series.who), series.callers, series.live


def _cells(report: Report, each: Series) -> list[str]:
    bash = report.find(BASH, "exec", live=each.live) or report.find(BASH, "exec")
    ratio = f"{each.p50 / bash.p50:.1f}" if bash else "-"
    spread = f"{each.p25:.2f}-{each.p75:.2f}"
    counts = (str(each.live), str(each.callers), str(each.count))
    return [each.what, each.who, *counts, f"{each.p50:.2f}", spread, f"{each.p95:.2f}", f"{each.p99:.2f}", ratio]


def _figures(report: Report) -> Table:
    table = _table("Figures", "what", "median", "IQR", "unit", "runs")
    for each in report.figures:
        spread = f"{each.low:.4g}-{each.high:.4g}" if each.runs > 1 else "-"
        table.add_row(each.name, f"{each.value:.4g}", spread, each.unit, str(each.runs))
    return table


def _targets(report: Report) -> Table:
    table = _table("Targets", "what", "target", "measured", "met")
    for each in report.targets:
        sign = ">=" if each.at_least else "<="
        met = "[green]yes" if each.met else "[red]no"
        table.add_row(each.name, f"{sign} {each.limit:g} {each.unit}", f"{each.measured:.2f} {each.unit}", met)
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        left = heading in ("operation", "who", "what", "unit", "target")
        table.add_column(heading, justify="left" if left else "right")
    return table
