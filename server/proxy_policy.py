"""Where an episode may connect to through the egress proxy: never to this host, and only to hosts its task allows."""

import ipaddress
import socket
from dataclasses import dataclass

import psutil

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Where clouds serve a node its credentials, besides 169.254.169.254: AWS over IPv6, Alibaba, Azure.
_METADATA = {ipaddress.ip_address(text) for text in ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")}


class Refused(Exception):
    """The destination is not for this episode; the text is for whoever asked."""


@dataclass(frozen=True)
class Policy:
    """What one episode may reach. `allowed_hosts` None: every host but this one.

    An entry is a host name or an address; `*.example.org`: all names below example.org; `.example.org`: itself, too.
    """

    allowed_hosts: tuple[str, ...] | None

    def address_of(self, host: str, port: int) -> str:
        """The address to connect to for `host`, which the caller must not look up again: the answer may change.

        Blocks for the name service. Raises: Refused, OSError, UnicodeError.
        """
        name = host.removeprefix("[").removesuffix("]")
        if not self.allows(name):
            raise Refused(f"the network policy of this task does not allow {host}")
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        addresses = [_parse(str(each[4][0])) for each in found]
        own = own_addresses()
        for address in addresses:
            if reason := _why_not(address, own):
                raise Refused(f"{host} is {reason}, which episodes may not reach")
        return str(addresses[0])

    def allows(self, name: str) -> bool:
        """Whether the task allows the name, whatever it resolves to."""
        if self.allowed_hosts is None:
            return True
        name = _normal(name)
        return any(_matches(name, _normal(pattern)) for pattern in self.allowed_hosts)


def _normal(name: str) -> str:
    name = name.lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return name.endswith(pattern[1:])
    if pattern.startswith("."):
        return name.endswith(pattern) or name == pattern[1:]
    return name == pattern


def _parse(text: str) -> _Address:
    """The address without its scope; an IPv4 address in IPv6 clothes is the IPv4 address."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def own_addresses() -> set[_Address]:
    """Every address of every interface, asked of the kernel now: interfaces come and go with other episodes."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return {_parse(each.address) for interface in interfaces for each in interface if each.family in families}


def _why_not(address: _Address, own: set[_Address]) -> str | None:
    if address in own or address.is_loopback or address.is_unspecified:
        return "an address of this host"
    if address.is_link_local or address in _METADATA:
        return "a link-local or cloud metadata address"
    if address.is_multicast:
        return "a multicast address"
    return None
