"""Sandboxes, of episodes and of builds, with the way out that their network needs."""

import asyncio
import contextlib
from collections.abc import Mapping

from tbench2_env.isolation.sandbox import Sandbox, SandboxError, Spawner
from tbench2_env.isolation.spec import Network, SandboxSpec
from tbench2_env.server.networks import Choice
from tbench2_env.server.proxy import EgressError, EgressProxy, proxy_env


def network_env(choice: Choice) -> Mapping[str, str]:
    """Variables that all programs need that are to find their way out."""
    return proxy_env() if choice.network is Network.PROXY else {}


async def open_sandbox(spawner: Spawner, spec: SandboxSpec, choice: Choice, proxy: EgressProxy) -> Sandbox:
    """A new sandbox whose network, `choice.network`, leads out. Raises: SandboxError."""
    sandbox = await spawner.create(spec)
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


async def close_sandbox(sandbox: Sandbox, proxy: EgressProxy) -> None:
    """End it and its connections; one that is dead already is no error."""
    await proxy.remove(sandbox.spec.name)
    with contextlib.suppress(SandboxError):
        await sandbox.destroy()
