"""What a run found, as data: the same as JSON in a file."""

from pathlib import Path

from pydantic import BaseModel, Field

#: Who is measured: the server, and what it is compared with.
SERVER, BASH, SHELL, BWRAP, UPSTREAM = "server", "bash", "unshare", "bwrap", "upstream"


class Series(BaseModel):
    """Milliseconds of one operation under one load."""

    who: str
    what: str
    live: int
    callers: int
    count: int
    least: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float


class Figure(BaseModel):
    """A number that is no latency: the median of `runs`, between the quartiles `low` and `high`."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    runs: int


class Target(BaseModel):
    """`measured` is to be at most `limit`, or at least when `at_least`."""

    name: str
    unit: str
    limit: float
    measured: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class Report(BaseModel):
    label: str
    begun: str
    seconds: float = 0.0
    machine: dict[str, str]
    series: list[Series] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
    targets: list[Target] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    def find(self, who: str, what: str, live: int = 1, callers: int = 1) -> Series | None:
        wanted = (who, what, live, callers)
        return next((each for each in self.series if (each.who, each.what, each.live, each.callers) == wanted), None)

    def figure(self, name: str) -> Figure | None:
        return next((each for each in self.figures if each.name == name), None)

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Report":
        return cls.model_validate_json(path.read_text())
