"""What a sandbox's commands used, as far as their ends tell, and what limits they met."""

import dataclasses
from typing import Any

from tbench2_env.isolation.spec import Limits, Usage


class Tally:
    """Of one sandbox, whose limits are `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ended = Usage()
        self._hits: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def command_ended(self, end: dict[str, Any]) -> None:
        """`end` is a `reactor.End`."""
        peak = max(self._ended.memory_peak_bytes, end["max_rss_bytes"])
        self._ended = Usage(cpu_s=self._ended.cpu_s + end["cpu_s"], memory_peak_bytes=peak)

    def usage(self, answer: dict[str, Any]) -> Usage:
        """Together with what the spawner answers of live processes; `all_cpu`: of all that ever were."""
        live, all_cpu = Usage(**answer["usage"]), answer["all_cpu"]
        return dataclasses.replace(
            live,
            cpu_s=round(live.cpu_s if all_cpu else live.cpu_s + self._ended.cpu_s, 3),
            memory_peak_bytes=max(live.memory_peak_bytes, self._ended.memory_peak_bytes),
        )

    def hit(self, limit: str, text: str) -> None:
        self._hits[limit] = text

    def count_hits(self, counts: dict[str, int]) -> None:
        """Of a cgroup, which counts how often it refused something."""
        if counts.get("memory", 0) > self._counts.get("memory", 0):
            mib = (self._limits.memory_bytes or 0) >> 20
            text = f"a process was killed at the episode's memory limit of {mib} MiB (environment.memory in task.toml)"
            self._hits["memory"] = text
        if counts.get("processes", 0) > self._counts.get("processes", 0):
            most = self._limits.processes_max
            self._hits["processes"] = f"the episode reached its limit of {most} processes and threads"
        self._counts = counts

    def take_hits(self) -> dict[str, str]:
        """What limits were met since the last call without the sandbox being killed for it: a sentence for each."""
        hits, self._hits = self._hits, {}
        return hits
