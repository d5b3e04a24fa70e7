"""What an episode is given on this host for its task, a network and limits, and the sandbox that has them."""

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from typing import Any

from tbench2_env.isolation.sandbox import Sandbox, SandboxError
from tbench2_env.isolation.spec import Limits, Network, SandboxSpec
from tbench2_env.server import limits, networks
from tbench2_env.server.engine import Engine
from tbench2_env.server.proxy import EgressError, EgressProxy, proxy_env
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
    def env(self) -> dict[str, str]:
        """Variables that commands and verifiers need."""
        return proxy_env() if self.network.network is Network.PROXY else {}

    def describe(self, engine: Engine) -> dict[str, Any]:
        """`info.isolation` of a reset."""
        return {
            **engine.describe_isolation(),
            "network_mode": self.network.network,
            "limits": limits.describe(self.limits, engine.spawner.host),
        }


async def open_sandbox(engine: Engine, snapshot: Snapshot, allotment: Allotment, proxy: EgressProxy) -> Sandbox:
    """A new sandbox for the task, with its way out. Raises: SandboxError."""
    # The sandbox has a name of its own: episode ids are the client's choice and may come again.
    spec = SandboxSpec(uuid.uuid4().hex, (snapshot.name,), allotment.network.network, allotment.limits)
    sandbox = await engine.spawner.create(spec)
    if sandbox.listener is None:
        return sandbox
    try:
        await proxy.add(spec.name, sandbox.listener.fileno(), allotment.network.allowed_hosts)
    except BaseException as error:
        await asyncio.shield(close_sandbox(sandbox, proxy))
        if isinstance(error, EgressError):
            raise SandboxError(str(error)) from error
        raise
    return sandbox


async def close_sandbox(sandbox: Sandbox, proxy: EgressProxy) -> None:
    """End it and its connections; one that is dead already is no error."""
    await proxy.remove(sandbox.spec.name)
    with contextlib.suppress(SandboxError):
        await sandbox.destroy()
