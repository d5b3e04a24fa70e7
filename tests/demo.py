"""`make demo`: the main job, shown. A server, the sample tasks, 32 concurrent episodes, a table of verdicts.

Half of the episodes carry out the task's solution, half do nothing. Exit status 0 only if every verdict is right.
"""

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from support.server import Server
from support.tasks import copy_samples, solution
from tbench2_env import Tbench2Error

EPISODES = 32
_AGENT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Figures:
    """What was seen of one task: verdicts, and seconds by phase."""

    verdicts: list[bool] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[phase].append(time.perf_counter() - begun)

    def median_ms(self, phase: str) -> str:
        seconds = self.seconds[phase]
        return f"{statistics.median(seconds) * 1e3:.1f}" if seconds else "-"


async def play(server: Server, task_id: str, solve: bool, figures: Figures) -> None:
    """One episode, judged: solved must be 1.0, untouched must be a number below."""
    try:
        async with server.client(message_timeout_s=120) as env:
            with figures.timed("reset"):
                await env.reset(task_id=task_id)
            with figures.timed("exec"):
                await env.exec("pwd")
            if solve:
                await env.exec(solution(server.tasks / task_id))
            with figures.timed("evaluate"):
                verdict = await env.evaluate()
    except Tbench2Error as error:
        figures.verdicts.append(False)
        figures.notes.append(str(error))
        return
    right = verdict.reward == 1.0 if solve else verdict.reward is not None and verdict.reward < 1.0
    figures.verdicts.append(right)
    if not right:
        figures.notes.append(f"solve={solve} reward={verdict.reward} {verdict.observation.error}")


async def play_all(server: Server, task_ids: list[str]) -> dict[str, Figures]:
    results = {task_id: Figures() for task_id in task_ids}
    with Progress(transient=True) as progress:
        bar = progress.add_task(f"{EPISODES} episodes at once", total=EPISODES)

        async def one(number: int) -> None:
            task_id = task_ids[number // 2 % len(task_ids)]
            await play(server, task_id, number % 2 == 0, results[task_id])
            progress.advance(bar)

        await asyncio.gather(*(one(number) for number in range(EPISODES)))
    return results


def runnable(tasks: Path) -> tuple[list[str], list[str]]:
    """Ids of the tasks whose tools this machine has, and a sentence for each other."""
    ids, left_out = [], []
    for task in sorted(tasks.iterdir()):
        metadata = tomllib.loads((task / "task.toml").read_text()).get("metadata", {})
        missing = [tool for tool in metadata.get("requires", []) if shutil.which(tool, path=_AGENT_PATH) is None]
        if missing:
            left_out.append(f"{task.name} is left out: this machine has no {', '.join(missing)}")
        else:
            ids.append(task.name)
    return ids, left_out


def table(results: dict[str, Figures]) -> Table:
    shown = Table(title=f"{EPISODES} concurrent episodes on one server")
    for heading in ("task", "episodes", "right verdicts", "reset ms", "exec ms", "evaluate ms"):
        shown.add_column(heading, justify="left" if heading == "task" else "right")
    for task_id, figures in results.items():
        right, count = sum(figures.verdicts), len(figures.verdicts)
        medians = [figures.median_ms(phase) for phase in ("reset", "exec", "evaluate")]
        shown.add_row(task_id, str(count), f"{right}/{count}", *medians)
    return shown


def main() -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tbench2-demo-") as folder:
        tasks = Path(folder, "tasks")
        copy_samples(tasks)
        task_ids, left_out = runnable(tasks)
        server = Server(Path(folder), tasks, {"MAX_CONCURRENT_ENVS": str(EPISODES)})
        try:
            server.start()
        except AssertionError as error:
            console.print(error, style="red")
            return 1
        try:
            results = asyncio.run(play_all(server, task_ids))
        finally:
            server.stop()
    console.print(table(results), *left_out, sep="\n")
    for task_id, figures in results.items():
        for note in figures.notes:
            console.print(f"{task_id}: {note}", style="red", markup=False)
    right = sum(sum(figures.verdicts) for figures in results.values())
    console.print(f"{right}/{EPISODES} verdicts right")
    return 0 if right == EPISODES else 1


if __name__ == "__main__":
    sys.exit(main())
