"""What an episode is given on this host for its task: a network and limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tbench2_env.isolation.spec import Limits
from tbench2_env.server import limits, networks, sandboxes
from tbench2_env.server.engine import Engine
from tbench2_env.server.snapshots import Snapshot


@dataclass(frozen=True)
class Allotment:
    """`unmet` are the task's needs that this host, as it is configured, does not meet."""

    network: networks.Choice
    limits: Limits

    @classmethod
    def of(cls, snapshot: Snapshot, engine: Engine) -> "Allotment":
        wanted, settings = snapshot.config.environment, engine.settings
        return cls(
            networks.choose(settings, engine.spawner.host, wanted),
            limits.of_task(wanted, enforced=settings.limits == "task"),
        )

    @property
    def unmet(self) -> tuple[str, ...]:
        return self.network.unmet

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that commands and verifiers need."""
        return sandboxes.network_env(self.network)

    def describe(self, engine: Engine) -> dict[str, Any]:
        """`info.isolation` of a reset."""
        return {
            **engine.describe_isolation(),
            "network_mode": self.network.network,
            "limits": limits.describe(self.limits, engine.spawner.host),
        }
