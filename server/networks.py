"""Which network an episode gets: what TB2_NETWORK allows, what its task asks for, what this host can give."""

from dataclasses import dataclass

from tbench2_env.isolation.spec import Host, Network
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import EnvironmentTable

#: Best first; after them comes the proxy, which needs nothing of the host.
_EGRESS = ("veth", "slirp4netns", "pasta")
_PROXY_ONLY = "environment.network_mode = public: only HTTP and HTTPS lead out, through a proxy that http_proxy names"


@dataclass(frozen=True)
class Choice:
    """One task's network. `allowed_hosts` bounds what its proxy connects to; None: everything outside of this host."""

    network: Network
    allowed_hosts: tuple[str, ...] | None = None
    unmet: tuple[str, ...] = ()


def egress_candidates(settings: Settings) -> tuple[str, ...]:
    """Ways out that the spawner should look for."""
    return _EGRESS if settings.network in ("auto", "egress") else ()


def choose(settings: Settings, host: Host, wanted: EnvironmentTable) -> Choice:
    """The network for a task. What it asks for and does not get is in `unmet`."""
    mode = _mode(wanted)
    if settings.network == "host":
        return Choice(Network.HOST, unmet=() if mode == "public" else (_not_kept(wanted, why_host(settings)),))
    if mode == "no-network":
        return Choice(Network.PRIVATE)
    if settings.network == "private":
        unmet = f"environment.network_mode = {mode}: TB2_NETWORK=private lets nobody out"
        return Choice(Network.PRIVATE, unmet=(unmet,))
    if mode == "allowlist":
        return Choice(Network.PROXY, tuple(wanted.allowed_hosts))
    if host.egress is not None:
        return Choice(Network.EGRESS, unmet=tuple(f"environment.network_mode: {lack}" for lack in host.egress_lacks))
    return Choice(Network.PROXY, unmet=(_PROXY_ONLY,))


def describe(settings: Settings, host: Host) -> str:
    """What `info.isolation.network` says."""
    if settings.network == "host":
        return "host: ports are shared with the host and with other episodes"
    if settings.network == "private":
        return "private: a loopback of its own, no way out"
    way = f"by {host.egress}" if host.egress else "by an HTTP(S) proxy only"
    return f"private: a loopback of its own; out {way}, where the task allows it; the host is out of reach"


def why_host(settings: Settings) -> str:
    """Which variable says that the network is the host's."""
    return "TB2_ISOLATION=none" if settings.isolation == "none" else "TB2_NETWORK=host"


def _mode(wanted: EnvironmentTable) -> str:
    return wanted.network_mode or ("public" if wanted.allow_internet else "no-network")


def _not_kept(wanted: EnvironmentTable, why: str) -> str:
    return f"environment.network_mode = {_mode(wanted)}: not enforced, the episode shares the host's network ({why})"
