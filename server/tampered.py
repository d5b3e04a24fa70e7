"""A change of something that verifiers trust."""

from dataclasses import dataclass

from tbench2_env.isolation.changes import Change


@dataclass(frozen=True)
class Tampered:
    """A trusted path that the agent changed."""

    change: Change
    trusted_as: str
    #: Whether verifiers do not take it from the agent, whatever TB2_TAMPER says, and whether it is not worth a report.
    never: bool = False
    quiet: bool = False

    def describe(self) -> dict[str, str]:
        return {"path": printable(self.change.path), "kind": self.change.kind, "trusted_as": self.trusted_as}

    @property
    def identity(self) -> tuple[object, ...]:
        """What is another one when the path was changed again."""
        now = self.change.now
        return self.change.path, self.change.kind, now and (now.st_ino, now.st_ctime_ns, now.st_size)


def printable(path: str) -> str:
    """Text that any JSON can hold; names need not be UTF-8."""
    return path.encode(errors="surrogateescape").decode(errors="replace")
