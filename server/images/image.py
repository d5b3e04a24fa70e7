"""An image: read-only layers of a store, and what the image says about the processes that run in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class ImageConfig:
    """How commands run in an image. None: the image does not say.

    Entrypoint and Cmd are left out: an episode's commands come from its agent.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    shell: tuple[str, ...] | None = None

    @classmethod
    def from_oci(cls, document: Mapping[str, Any]) -> Self:
        """Of an image configuration, whole (opencontainers/image-spec config.md; Shell is docker's own).

        Raises: ValueError naming the property that is not what the specification says.
        """
        config = _typed(document, "config", Mapping, {})
        env = (entry.partition("=") for entry in _strings(config, "Env"))
        return cls(
            env={name: value for name, _, value in env},
            workdir=_typed(config, "WorkingDir", str, "") or None,
            user=_typed(config, "User", str, "") or None,
            shell=tuple(_strings(config, "Shell")) or None,
        )

    def to_oci(self) -> dict[str, Any]:
        """The property `config` of an image configuration."""
        found = {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.workdir,
            "User": self.user,
            "Shell": list(self.shell or ()),
        }
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class Image:
    """`layers` are ids in a store, the topmost first. `digest` is what pins it, `source` where it is from, for people:
    "registry.example/x@sha256:…", "TB2_BASES: /path"."""

    layers: tuple[str, ...]
    config: ImageConfig
    digest: str
    source: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Raises: ValueError when it is not what `to_record` makes."""
        layers, config = tuple(_strings(record, "layers")), ImageConfig.from_oci(record)
        return cls(layers, config, *(_typed(record, name, str, "") for name in ("digest", "source")))

    def to_record(self) -> dict[str, Any]:
        """For `Store.put_record`."""
        return {
            "layers": list(self.layers), "config": self.config.to_oci(), "digest": self.digest, "source": self.source,
        }  # fmt: skip


def _typed(document: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    """The property `name`; null and absence are `default`."""
    value = document.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} of the image's configuration is a {type(value).__name__}: {str(value)[:80]!r}")
    return default if value is None else value


def _strings(document: Mapping[str, Any], name: str) -> list[str]:
    values: list[str] = _typed(document, name, list, [])
    return [_typed({name: value}, name, str, "") for value in values]
