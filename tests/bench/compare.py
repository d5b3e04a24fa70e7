"""Two reports side by side, in Markdown."""

from collections.abc import Iterator

from bench.report import BASH, Report, Series


def compare(before: Report, after: Report) -> str:
    return "\n".join([*_targets(before, after), "", *_latencies(before, after), "", *_figures(before, after)])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*headings: str) -> Iterator[str]:
    yield _row(*headings)
    yield _row("---", *("--:" for _ in headings[1:]))


def _targets(before: Report, after: Report) -> Iterator[str]:
    yield from _head("target", "limit", before.label, after.label, "met")
    earlier = {each.name: each for each in before.targets}
    for each in after.targets:
        old = f"{earlier[each.name].measured:.2f}" if each.name in earlier else "-"
        limit = f"{'≥' if each.at_least else '≤'} {each.limit:g} {each.unit}"
        yield _row(each.name, limit, old, f"{each.measured:.2f}", "yes" if each.met else "**no**")


def _latencies(before: Report, after: Report) -> Iterator[str]:
    yield from _head(
        "ms: p50 (IQR) / p95 / p99; to bash", "who", "live", "callers", before.label, after.label, "p50 to bash, change"
    )
    for new in after.series:
        old = before.find(new.who, new.what, new.live, new.callers)
        was, now = _to_bash(before, old), _to_bash(after, new)
        change = f"{(now / was - 1) * 100:+.0f} %" if was and now else "-"
        counts = (str(new.live), str(new.callers))
        yield _row(new.what, new.who, *counts, _text(before, old), _text(after, new), change)


def _to_bash(report: Report, series: Series | None) -> float | None:
    """Two runs are comparable only by what bash took in each."""
    if series is None:
        return None
    bash = report.find(BASH, "exec", live=series.live) or report.find(BASH, "exec")
    return series.p50 / bash.p50 if bash else None


def _text(report: Report, series: Series | None) -> str:
    if series is None:
        return "-"
    ratio = _to_bash(report, series)
    times = f"{series.p50:.2f} ({series.p25:.2f}-{series.p75:.2f}) / {series.p95:.2f} / {series.p99:.2f}"
    return times if ratio is None else f"{times}; {ratio:.1f}"


def _figures(before: Report, after: Report) -> Iterator[str]:
    yield from _head("figure", "unit", before.label, after.label)
    for new in after.figures:
        old = before.figure(new.name)
        yield _row(new.name, new.unit, *(_number(each.value) if each else "-" for each in (old, new)))


def _number(value: float) -> str:
    return f"{value:.4g}"
