"""What larger nodes take, reckoned from a report of `make bench`: the tables of docs/scaling.md, in Markdown.

    PYTHONPATH=tests .venv/bin/python -m bench.scaling REPORT.json --into docs/scaling.md

The reckoning is plain: work adds up, what is parallel is divided by the cores, and what one thread does is not. What
it cannot see is contention that this machine has too few cores for.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.footprint import FAMILY_PSS, PSS, RSS_IDLE, SLAB
from bench.report import Report
from bench.throughput import CPU_PER_EPISODE, CPU_PER_EXEC

#: Who does its work in one thread, whatever the number of cores; the rest, "... children", is parallel.
SINGLE = ("server", "spawner", "launcher", "warden")
NETNS = "netns teardown"
#: Milliseconds per namespace in which nobody else's is torn down: the kernel has one worker for all (the queue "netns"
#: of net/core/net_namespace.c). 600 with a veth pair each, killed at once, were gone after 1.3 to 2.1 s.
_NETNS_MS = 2.2
#: Of an episode for each possible CPU: counters of its network namespace. Of Percpu in /proc/meminfo, on two CPUs.
_PERCPU_BYTES = 2000
#: Stack and page tables of its PID 1, which are no slab.
_PID1_BYTES = 45_000
#: A single thread that is busier than this makes callers wait for each other for longer than its work takes.
_BUSY = 0.7
_FULL = 1.0
#: In the whole episodes of the bench.
_EXECS_IN_BENCH = 5
_BEGIN, _END = "<!-- tables: bench.scaling -->", "<!-- end of tables -->"
NODES, CORES = 64, (2, 8, 32, 96, 192)


@dataclass(frozen=True)
class Workload:
    """Episodes of one kind. The agent's and the verifier's own CPU are on top of ours; `busy` is how much of a thread
    may be used."""

    name: str
    execs: int
    think_s: float
    command_cpu_s: float
    verifier_cpu_s: float
    busy: float = _BUSY

    @property
    def own_cpu_s(self) -> float:
        return self.execs * self.command_cpu_s + self.verifier_cpu_s

    @property
    def seconds(self) -> float:
        """From reset to verdict, on a node with a free core."""
        return self.execs * self.think_s + self.own_cpu_s


WORKLOADS = (
    Workload("trivial, as in the bench", execs=5, think_s=0, command_cpu_s=0, verifier_cpu_s=0, busy=_FULL),
    Workload("light: 20 commands of 50 ms, verifier 2 s", execs=20, think_s=5, command_cpu_s=0.05, verifier_cpu_s=2),
    Workload("usual: 50 commands of 0.2 s, verifier 20 s", execs=50, think_s=10, command_cpu_s=0.2, verifier_cpu_s=20),
)


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU by who uses them, of a whole episode of the bench and of one exec; bytes of an idle episode."""

    whole: Counter[str]
    exec: Counter[str]
    process_bytes: float
    slab_bytes: float
    server_bytes: float

    @classmethod
    def of(cls, report: Report) -> "Costs":
        process = _value(report, PSS) + _value(report, FAMILY_PSS)
        sizes = (megabytes * 1e6 for megabytes in (process, _value(report, SLAB), _value(report, RSS_IDLE)))
        return cls(_by_process(report, CPU_PER_EPISODE), _by_process(report, CPU_PER_EXEC), *sizes)

    def of_episode(self, workload: Workload) -> Counter[str]:
        spent = Counter(self.whole)
        for who, seconds in self.exec.items():
            spent[who] += seconds * (workload.execs - _EXECS_IN_BENCH)
        return spent

    def kernel_bytes(self, cores: int) -> float:
        return self.slab_bytes + _PID1_BYTES + _PERCPU_BYTES * cores


def _value(report: Report, name: str) -> float:
    """Raises: KeyError when the report lacks it."""
    found = report.figure(name)
    if found is None:
        raise KeyError(f"the report has no {name!r}")
    return found.value


def _by_process(report: Report, name: str) -> Counter[str]:
    prefix = f"{name}: "
    named = (each for each in report.figures if each.name.startswith(prefix))
    found = {each.name.removeprefix(prefix): each.value / 1e3 for each in named}
    if not found:
        raise KeyError(f"the report has no {name!r} by process")
    return Counter(found)


# ---------------------------------------------------------------- what a node takes
def rates(costs: Costs, workload: Workload, cores: int, servers: int = 1) -> dict[str, float]:
    """Episodes per second that each part of a node could carry."""
    spent = costs.of_episode(workload)
    parts = {"cores": cores / (sum(spent.values()) + workload.own_cpu_s)}
    parts |= {who: servers * workload.busy / spent[who] for who in SINGLE if spent[who]}
    return parts | {NETNS: 1e3 / _NETNS_MS}


def servers_needed(costs: Costs, workload: Workload, cores: int) -> int:
    """Until something that all servers of a node share is the limit."""
    with_one = rates(costs, workload, cores)
    shared = min(with_one["cores"], with_one[NETNS])
    return math.ceil(shared / min(with_one[who] for who in SINGLE if who in with_one))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def single_threads(costs: Costs) -> str:
    rows = []
    for who in SINGLE:
        episode, command = costs.whole[who], costs.exec[who]
        per_s = [f"{_BUSY / seconds:.0f}" if seconds else "-" for seconds in (episode, command)]
        rows.append([who, f"{episode * 1e3:.2f}", f"{command * 1e3:.2f}", *per_s])
    rows.append([NETNS, f"{_NETNS_MS:.2f}", "-", f"{1e3 / _NETNS_MS:.0f}", "-"])
    return _table(["one thread", "ms per episode", "ms per exec", "episodes/s", "execs/s"], rows)


def nodes(costs: Costs, workload: Workload) -> str:
    rows = []
    for cores in CORES:
        one = rates(costs, workload, cores)
        first, needed = min(one, key=lambda who: one[who]), servers_needed(costs, workload, cores)
        most = rates(costs, workload, cores, needed)
        last = min(most, key=lambda who: most[who])
        rate = most[last]
        live = f"{rate * workload.seconds:,.0f}" if workload.think_s else "-"
        rows.append([f"{cores}", _rate(one[first]), first, f"{needed}", _rate(rate), last, live, _rate(rate * NODES)])
    heads = ["cores", "episodes/s, one server", "first", "servers for all", "episodes/s, with them", "then", "live"]
    return _table([*heads, f"episodes/s, {NODES} nodes"], rows)


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 100 else f"{per_s:,.0f}"


def memory(costs: Costs) -> str:
    rows = []
    for cores in CORES:
        each = costs.process_bytes, costs.kernel_bytes(cores)
        whole = (costs.server_bytes + live * sum(each) for live in (256, 1024, 4096))
        rows.append([f"{cores}", *(f"{size / 1e6:.2f}" for size in each), *(f"{size / 1e9:.1f}" for size in whole)])
    heads = ["cores", "MB of processes", "MB of the kernel", "GB at 256", "GB at 1,024", "GB at 4,096"]
    return _table(heads, rows)


def tables(report: Report) -> str:
    """Raises: KeyError naming the figure that the report lacks."""
    costs = Costs.of(report)
    where = f"{report.machine['cores']} cores, Linux {report.machine['kernel']}"
    parts = [
        f"From the report {report.label!r} of {report.begun}, {where}.\n",
        f"### What one thread takes, {_BUSY:.0%} busy\n\n{single_threads(costs)}",
    ]
    parts += (f"### Episodes: {workload.name}\n\n{nodes(costs, workload)}" for workload in WORKLOADS)
    parts.append(f"### Memory of an idle episode, and in all\n\n{memory(costs)}")
    return "\n".join(parts)


def _between_marks(text: str, found: str) -> str:
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    return f"{before}{_BEGIN}\n\n{found}\n{_END}{after}"


@click.command()
@click.argument("report", type=click.Path(exists=True, path_type=Path))
@click.option("--into", type=click.Path(exists=True, path_type=Path), help="Replace the tables of this document.")
def main(report: Path, into: Path | None) -> None:
    """Print the tables, or put them where they belong."""
    found = tables(Report.read(report))
    if into is None:
        click.echo(found)
    else:
        into.write_text(_between_marks(into.read_text(), found))


if __name__ == "__main__":
    main()
