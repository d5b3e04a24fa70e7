"""What the veth provider needs of the host: a block of addresses that is its alone, forwarding, and one nft table.

Several servers may run on one node, and any of them may be killed. So the claim on a block is an abstract unix socket
bound in the host's network namespace: the kernel grants it once, and frees it with the process. What a killed server
left (its table; its interfaces go with its episodes) is removed at the next claim.
"""

import contextlib
import errno
import ipaddress
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tbench2_env.isolation.netlink import Netlink, Route

#: Private addresses, and for hosts that route all of 10.0.0.0/8 elsewhere those set aside for benchmarks (RFC 2544).
POOLS = ("10.213.0.0/16", "198.18.0.0/16")
BLOCK_PREFIX = 20
#: What no episode may reach: cloud nodes hand out credentials at 169.254.169.254.
LINK_LOCAL = "169.254.0.0/16"

_INTERFACES = "tbn"
_TABLE = "tbench2_"
_IP_FORWARD = "/proc/sys/net/ipv4/ip_forward"


@dataclass(frozen=True)
class Claim:
    """Block number `index`, held by `sock`. Its interfaces' names begin with `prefix`."""

    index: int
    network: ipaddress.IPv4Network
    sock: socket.socket

    @property
    def prefix(self) -> str:
        return f"{_INTERFACES}{self.index:x}-"

    def release(self) -> None:
        with contextlib.suppress(OSError):
            run_nft(_deletion(self.index))
        self.sock.close()


def claim_block(link: Netlink) -> Claim:
    """Claim a block that no route of the host touches, and install its table. Raises: OSError."""
    for index, network in enumerate(_blocks()):
        sock = _bind(index)
        if sock is None:
            continue
        claim = Claim(index, network, sock)
        try:
            _sweep_interfaces(link, claim.prefix)
            if not any(network.overlaps(network_of(route)) for route in link.routes() if route.prefix):
                run_nft(_deletion(index) + _table(claim))
                _sweep_tables(link)
                return claim
        except OSError:
            sock.close()
            raise
        sock.close()
    raise OSError(f"every /{BLOCK_PREFIX} of {' and '.join(POOLS)} is routed by this host or used by another server")


def enable_forwarding() -> None:
    """Make the host forward IPv4, and make sure that it lets it pass. Raises: OSError."""
    chains = [chain for chain in run_nft("list chains\n").split("chain ") if "hook forward" in chain]
    dropping = [chain.split()[0] for chain in chains if "policy drop" in chain]
    if dropping:
        raise OSError(
            f"the host's firewall drops what is forwarded (nft chain {dropping[0]}, policy drop): set its policy to "
            "accept, as `iptables -P FORWARD ACCEPT` does for docker's"
        )
    try:
        with open(_IP_FORWARD, "r+b", buffering=0) as file:
            if file.read().strip() == b"0":
                file.seek(0)  # the kernel ignores what is written behind the beginning
                file.write(b"1")
    except OSError as error:
        raise OSError(
            error.errno, f"write({_IP_FORWARD}): {error.strerror} (set the sysctl net.ipv4.ip_forward=1 on the node)"
        ) from None


def network_of(route: Route) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((route.destination, route.prefix))


def _blocks() -> Iterator[ipaddress.IPv4Network]:
    for pool in POOLS:
        yield from ipaddress.IPv4Network(pool).subnets(new_prefix=BLOCK_PREFIX)


def _bind(index: int) -> socket.socket | None:
    """The claim on block `index`, or None when another process has it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(f"\0tbench2-network-{index}")
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return sock


# ---------------------------------------------------------------- what killed servers left
def _sweep_interfaces(link: Netlink, prefix: str) -> None:
    for _, name in socket.if_nameindex():
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                link.delete_link(name)


def _sweep_tables(link: Netlink) -> None:
    for found in re.findall(rf"^table inet {_TABLE}([0-9a-f]+)$", run_nft("list tables\n"), re.MULTILINE):
        index = int(found, 16)
        sock = _bind(index)
        if sock is not None:
            with sock:
                _sweep_interfaces(link, f"{_INTERFACES}{index:x}-")
                run_nft(_deletion(index))


# ---------------------------------------------------------------- the table
def _deletion(index: int) -> str:
    """Adding first makes it no error if there is none."""
    return f"add table inet {_TABLE}{index:x}\ndelete table inet {_TABLE}{index:x}\n"


def _table(claim: Claim) -> str:
    """Episodes reach what is neither the host, on any of its addresses, nor another episode, nor link-local.

    An address that the host translates (a port published by docker) leads to the host's services, too: dnat.
    """
    ours, all_servers = f'"{claim.prefix}*"', f'"{_INTERFACES}*"'
    return f"""
table inet {_TABLE}{claim.index:x} {{
  chain input {{
    type filter hook input priority filter - 10; policy accept;
    iifname {ours} drop
  }}
  chain forward {{
    type filter hook forward priority filter - 10; policy accept;
    iifname {ours} jump leaving
    oifname {ours} ct state != {{ established, related }} drop
  }}
  chain leaving {{
    meta nfproto != ipv4 drop
    ip saddr != {claim.network} drop
    ip daddr {LINK_LOCAL} drop
    ct status dnat drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {claim.network} oifname != {all_servers} masquerade
  }}
}}
"""


def run_nft(script: str) -> str:
    """Run a script in one transaction; returns its output. Raises: OSError with what nft said."""
    program = find_program("nft")
    files = {number: os.memfd_create("nft", os.MFD_CLOEXEC) for number in (0, 1, 2)}
    try:
        os.pwrite(files[0], script.encode(), 0)
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in files.items()]
        pid = os.posix_spawn(program, ["nft", "-f", "-"], {}, file_actions=actions)
        _, status = os.waitpid(pid, 0)
        output, complaint = (os.pread(files[number], 1 << 20, 0).decode(errors="replace") for number in (1, 2))
    finally:
        for fd in files.values():
            os.close(fd)
    if status:
        raise OSError(f"nft: {' '.join(complaint.split()) or f'ended with status {status}'}")
    return output


def find_program(name: str) -> str:
    """Raises: OSError naming the package to install."""
    found = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        package = {"nft": "nftables", "pasta": "passt"}.get(name, name)
        raise FileNotFoundError(errno.ENOENT, f"the program {name} is missing: install the package {package}")
    return found
