"""Sandboxes, of episodes and of builds, with the way out that their network needs."""

import asyncio
from collections.abc import Mapping

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox, Spawner
from tbench2_env.isolation.spec import Network, SandboxSpec, Usage
from tbench2_env.server.networks import Choice
from tbench2_env.server.proxy import EgressError, EgressProxy, proxy_env


def network_env(choice: Choice) -> Mapping[str, str]:
    """Variables that all programs need that are to find their way out."""
    return proxy_env() if choice.network is Network.PROXY else {}


async def open_sandbox(
    spawner: Spawner, spec: SandboxSpec, choice: Choice, proxy: EgressProxy, *, idle: bool = False
) -> Sandbox:
    """A new sandbox whose network, `choice.network`, leads out; see `Spawner.create`. Raises: SandboxError."""
    sandbox = await spawner.create(spec, idle=idle)
    if sandbox.listener is None:
        return sandbox
    try:
        await proxy.add(spec.name, sandbox.listener.fileno(), choice.allowed_hosts)
    except BaseException as error:
        await asyncio.shield(close_sandbox(sandbox, proxy))
        if isinstance(error, EgressError):
            raise SandboxError(str(error)) from error
        raise
    return sandbox


async def close_sandbox(sandbox: Sandbox, proxy: EgressProxy) -> Usage | None:
    """End it and its connections; answers as `Sandbox.destroy`, and so with nothing if it is dead already."""
    await proxy.remove(sandbox.spec.name)
    return await sandbox.destroy()
