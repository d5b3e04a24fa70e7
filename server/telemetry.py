"""What the server tells about itself: its log and its metrics."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import prometheus_client
import structlog

from tbench2_env.server.engine import Engines
from tbench2_env.server.pool import Pool
from tbench2_env.server.warm import Warm

#: C0, DEL, C1, the Unicode line and paragraph separators, and what reorders text.
_CONTROLS = (*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
_LAG_EVERY_S = 0.1
_LAG_FORGOTTEN_S = 1.0
_LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600)


def configure_logging(log_format: str) -> None:
    """Log to stderr, a line each: for people (`console`) or for machines (`json`); what libraries log, too."""
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if log_format != "json":
        shared.append(escape_controls)
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _log_libraries(shared, renderer)


def escape_controls(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Leave no line end and no terminal escape in what is logged: names and errors are not ours to choose.

    A traceback keeps its lines, indented, so that none of them looks like an entry.
    """
    for key, value in event.items():
        if isinstance(value, str):
            lines = value.split("\n") if key == "exception" else [value]
            event[key] = "\n    ".join(line.translate(_ESCAPED) for line in lines)
    return event


def _log_libraries(shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class Metrics:
    """Prometheus metrics of one server, in a registry of its own."""

    def __init__(self, pool: Pool, engines: Engines, warm: Warm) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._gauge("tbench2_slots_active", "Slots in use", lambda: pool.active)
        self._gauge("tbench2_slots", "Slots in all", lambda: pool.maximum)
        self._gauge("tbench2_queued", "Callers waiting for a slot", lambda: pool.queued)
        self._gauge("tbench2_warm", "Sandboxes kept ready for resets to come", lambda: warm.count)
        self._gauge("tbench2_helper_restarts", "Spawners that died and were replaced", lambda: engines.restarts)
        self._gauge("tbench2_scratch_bytes", "Bytes of worktrees in the scratch", lambda: _scratch_bytes(engines))
        self.resets = self._counter("tbench2_resets", "Episodes begun, or failed to begin", "outcome")
        self.sandboxes = self._counter("tbench2_sandboxes", "Episodes' sandboxes, made ahead or not", "temperature")
        self.rejections = self._counter("tbench2_rejections", "Callers turned away", "reason")
        self.verdicts = self._counter("tbench2_verdicts", "Evaluations", "outcome")
        self.ends = self._counter("tbench2_ends", "Episodes ended", "reason")
        self._seconds = prometheus_client.Histogram(
            "tbench2_seconds", "Seconds by phase", ["phase"], registry=self.registry, buckets=_BUCKETS_S
        )
        self._lag = prometheus_client.Histogram(
            "tbench2_loop_lag_seconds", "Lateness of a timer of the event loop", registry=self.registry,
            buckets=_LAG_BUCKETS_S,
        )  # fmt: skip

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        prometheus_client.Gauge(name, text, registry=self.registry).set_function(value)

    def _counter(self, name: str, text: str, label: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, text, [label], registry=self.registry)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Observe how long the block takes, as reset, exec or evaluate."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(phase).observe(time.perf_counter() - begun)

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Observe, ten times a second, how much later than it should be the loop comes round to a callback."""

        def observe(due: float) -> None:
            now = loop.time()
            self._lag.observe(now - due)
            # What falls into a pause is late, too, each by what is left of it; a host that slept is nobody's lag.
            due = max(due, now - _LAG_FORGOTTEN_S) + _LAG_EVERY_S
            loop.call_at(due, observe, due)

        observe(loop.time())

    def text(self) -> bytes:
        """Prometheus' text format. Walks the scratch: call it in a thread."""
        return prometheus_client.generate_latest(self.registry)


def _scratch_bytes(engines: Engines) -> float:
    engine = engines.current
    return 0.0 if engine is None else float(engine.spawner.scratch_bytes())
