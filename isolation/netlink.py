"""A small rtnetlink(7) client: makes, moves, configures and deletes interfaces, and reads the routes.

Structs and constants carry their kernel names (linux/netlink.h, rtnetlink.h, if_link.h). Every failure is raised in
`_check`, which names the message and what it was about, with the kernel's own explanation where it gives one.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from tbench2_env.isolation.program import SPARE_FD, Program

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLM_F_EXCL, NLM_F_CREATE = 0x200, 0x400
NLMSG_ERROR, NLMSG_DONE = 2, 3
SOL_NETLINK, NETLINK_CAP_ACK, NETLINK_EXT_ACK = 270, 10, 11
NLMSGERR_ATTR_MSG = 1

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_NEWADDR, RTM_NEWROUTE, RTM_GETROUTE = 16, 17, 18, 20, 24, 26
IFF_UP, IFF_RUNNING = 0x1, 0x40
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_PID, IFLA_AF_SPEC = 3, 18, 19, 26
IFLA_NUM_TX_QUEUES, IFLA_NUM_RX_QUEUES = 31, 32
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFLA_INET6_ADDR_GEN_MODE, IN6_ADDR_GEN_MODE_NONE = 8, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_DST, RTA_OIF, RTA_GATEWAY = 1, 4, 5
#: The index of lo in every network namespace (LOOPBACK_IFINDEX of net/net_namespace.h).
LOOPBACK = 1
RT_TABLE_MAIN, RTPROT_BOOT, RT_SCOPE_UNIVERSE = 254, 3, 0
RTN_UNICAST, RTN_LOCAL, RTN_UNREACHABLE = 1, 2, 7

_NLMSGHDR = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_IFINFOMSG = struct.Struct("=BxHiII")  # family, type, index, flags, mask of the flags to change
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
_RTMSG = struct.Struct("=8BI")  # family, dst_len, src_len, tos, table, protocol, scope, type, flags
_BUFFER = 1 << 17
#: A step with this descriptor fails.
_NO_FD = 0xFFFF_FFFF
_NAMES = {
    RTM_NEWLINK: "RTM_NEWLINK",
    RTM_DELLINK: "RTM_DELLINK",
    RTM_GETLINK: "RTM_GETLINK",
    RTM_NEWADDR: "RTM_NEWADDR",
    RTM_NEWROUTE: "RTM_NEWROUTE",
    RTM_GETROUTE: "RTM_GETROUTE",
}
_ADVICE = {errno.EPERM: "the process lacks CAP_NET_ADMIN over this network namespace"}


@dataclass(frozen=True)
class Route:
    """An IPv4 route: `type` is one of RTN_*, `oif` the index of its interface or 0."""

    destination: bytes
    prefix: int
    type: int
    oif: int


def attribute(kind: int, value: bytes) -> bytes:
    """A struct rtattr with its value, padded to four bytes."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found[kind & 0x3FFF] = data[4:length]  # the upper two bits are flags
        data = data[(length + 3) & ~3 :]
    return found


@dataclass(frozen=True)
class Request:
    """One message, and what it is about."""

    kind: int
    body: bytes
    about: str
    flags: int = 0

    def encode(self, number: int = 0) -> bytes:
        size = _NLMSGHDR.size + len(self.body)
        header = _NLMSGHDR.pack(size, self.kind, self.flags | NLM_F_REQUEST, number, 0)
        return (header + self.body).ljust((size + 3) & ~3, b"\0")

    def acknowledged(self) -> Self:
        return replace(self, flags=self.flags | NLM_F_ACK)


class Changes:
    """Requests that change something, collected to be made together."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def change(self, kind: int, body: bytes, about: str, flags: int = 0) -> None:
        self.requests.append(Request(kind, body, about, flags))

    # ------------------------------------------------------------ interfaces
    def add_veth(self, name: str, peer: str, peer_pid: int) -> None:
        """A pair of interfaces: `name` here, `peer` in the network namespace of process `peer_pid`. Both are down."""
        # Without a word veth makes one queue per possible CPU at both ends: 1.3 MB and 3.5 ms for a pair on 192.
        one_queue = b"".join(attribute(way, struct.pack("=I", 1)) for way in (IFLA_NUM_TX_QUEUES, IFLA_NUM_RX_QUEUES))
        there = _IFINFOMSG.pack(0, 0, 0, 0, 0) + one_queue
        there += attribute(IFLA_IFNAME, peer.encode() + b"\0")
        there += attribute(IFLA_NET_NS_PID, struct.pack("=I", peer_pid))
        info = attribute(IFLA_INFO_KIND, b"veth")
        info += attribute(IFLA_INFO_DATA, attribute(VETH_INFO_PEER, there))
        here = one_queue + attribute(IFLA_IFNAME, name.encode() + b"\0") + attribute(IFLA_LINKINFO, info)
        body = _IFINFOMSG.pack(0, 0, 0, 0, 0) + here
        self.change(RTM_NEWLINK, body, f"veth {name}, {peer} of process {peer_pid}", NLM_F_CREATE | NLM_F_EXCL)

    def set_up(self, index: int) -> None:
        self.change(RTM_NEWLINK, _IFINFOMSG.pack(0, 0, index, IFF_UP, IFF_UP), f"interface {index} up")

    def keep_from_ipv6(self, index: int) -> None:
        """Give the interface no IPv6 address of its own accord, not even a link-local one."""
        family = attribute(socket.AF_INET6, attribute(IFLA_INET6_ADDR_GEN_MODE, bytes([IN6_ADDR_GEN_MODE_NONE])))
        body = _IFINFOMSG.pack(0, 0, index, 0, 0) + attribute(IFLA_AF_SPEC, family)
        self.change(RTM_NEWLINK, body, f"interface {index} without IPv6 addresses")

    def delete_link(self, name: str) -> None:
        """Delete the interface, and the other end of a pair with it, wherever that is."""
        body = _IFINFOMSG.pack(0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, name.encode() + b"\0")
        self.change(RTM_DELLINK, body, name)

    def add_address(self, index: int, address: str, prefix: int) -> None:
        packed = socket.inet_aton(address)
        body = _IFADDRMSG.pack(socket.AF_INET, prefix, 0, RT_SCOPE_UNIVERSE, index)
        body += attribute(IFA_LOCAL, packed) + attribute(IFA_ADDRESS, packed)
        self.change(RTM_NEWADDR, body, f"{address}/{prefix} to interface {index}", NLM_F_CREATE | NLM_F_EXCL)

    # ------------------------------------------------------------ routes
    def add_default_route(self, gateway: str) -> None:
        body = self._route(0, RTN_UNICAST) + attribute(RTA_GATEWAY, socket.inet_aton(gateway))
        self.change(RTM_NEWROUTE, body, f"default via {gateway}", NLM_F_CREATE | NLM_F_EXCL)

    def add_unreachable(self, address: str, prefix: int) -> None:
        """Make every destination in the network fail at once, in the sender."""
        body = self._route(prefix, RTN_UNREACHABLE) + attribute(RTA_DST, socket.inet_aton(address))
        self.change(RTM_NEWROUTE, body, f"unreachable {address}/{prefix}", NLM_F_CREATE | NLM_F_EXCL)

    def _route(self, prefix: int, kind: int) -> bytes:
        return _RTMSG.pack(socket.AF_INET, prefix, 0, 0, RT_TABLE_MAIN, RTPROT_BOOT, RT_SCOPE_UNIVERSE, kind, 0)

    def add(self, program: Program) -> None:
        """Add the steps that make them in the network namespace of whoever carries the program out."""
        messages = b"".join(request.encode() for request in self.requests)
        about = ", ".join(f"{_NAMES[request.kind]}({request.about})" for request in self.requests)
        made = program.call("socket", socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        program.keep(SPARE_FD, made)
        program.call("write", SPARE_FD, program.data(messages), len(messages), what=about)
        # Of what is not to be acknowledged, the kernel answers with nothing but errors.
        answered = program.call("recvfrom", SPARE_FD, program.data(bytes(8)), 8, socket.MSG_DONTWAIT, 0, 0)
        program.call("close", _NO_FD, what=f"one of {about}")
        answered.error = program.here()


class Netlink(Changes):
    """A socket to the routing of the network namespace that the caller is in when it makes one.

    A change is made at once, unless it comes with others.
    """

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        for option in (NETLINK_CAP_ACK, NETLINK_EXT_ACK):
            self.sock.setsockopt(SOL_NETLINK, option, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def change(self, kind: int, body: bytes, about: str, flags: int = 0) -> None:
        self._ask(Request(kind, body, about, flags))

    def make(self, changes: Changes) -> None:
        """Make changes in one message; each is made whatever became of those before it. Raises: OSError."""
        *others, last = changes.requests
        requests = [*others, last.acknowledged()]  # of the others, the kernel tells of errors in any case
        self.sock.send(b"".join(request.encode(number) for number, request in enumerate(requests)))
        errors: list[tuple[int, bytes]] = []
        number = -1
        while number != len(others):
            for _, number, payload in _messages(self.sock.recv(_BUFFER)):
                errors.append((number, payload))
        for number, payload in errors:
            _check(requests[number], payload)

    def is_running(self, index: int) -> bool:
        """Whether the interface carries packets. From Linux 6.7 the question itself makes it, once it is connected."""
        (answer,) = self._ask(Request(RTM_GETLINK, _IFINFOMSG.pack(0, 0, index, 0, 0), f"interface {index}"))
        return bool(_IFINFOMSG.unpack_from(answer)[3] & IFF_RUNNING)

    def routes(self) -> list[Route]:
        """Every IPv4 route of every table, those to the host's own addresses (RTN_LOCAL) too."""
        body = _RTMSG.pack(socket.AF_INET, *(0,) * 8)
        return [_read_route(payload) for payload in self._ask(Request(RTM_GETROUTE, body, "all routes", NLM_F_DUMP))]

    def _ask(self, request: Request) -> list[bytes]:
        """Send a message; return the payload of each answer, once it is acknowledged or the dump is done."""
        self.sock.send(request.acknowledged().encode())
        answers: list[bytes] = []
        while True:
            for answer, _, payload in _messages(self.sock.recv(_BUFFER)):
                if answer in (NLMSG_ERROR, NLMSG_DONE):
                    _check(request, payload)
                    return answers
                answers.append(payload)


def _check(request: Request, payload: bytes) -> None:
    (number,) = struct.unpack_from("=i", payload)
    if number == 0:
        return
    explanations = [_ADVICE.get(-number, "")]
    with contextlib.suppress(struct.error):
        found = attributes(payload[4 + _NLMSGHDR.size :])
        explanations.append(found.get(NLMSGERR_ATTR_MSG, b"").rstrip(b"\0").decode(errors="replace"))
    more = "; ".join(filter(None, explanations))
    raise OSError(
        -number, f"{_NAMES[request.kind]}({request.about}): {os.strerror(-number)}" + (f" ({more})" if more else "")
    )


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Split what one recv brought into (type, sequence number, payload)."""
    while len(data) >= _NLMSGHDR.size:
        length, kind, _, number, _ = _NLMSGHDR.unpack_from(data)
        yield kind, number, data[_NLMSGHDR.size : length]
        data = data[(length + 3) & ~3 :]


def _read_route(payload: bytes) -> Route:
    fields, found = _RTMSG.unpack_from(payload), attributes(payload[_RTMSG.size :])
    (oif,) = struct.unpack("=I", found.get(RTA_OIF, bytes(4)))
    return Route(found.get(RTA_DST, bytes(4)), fields[1], fields[7], oif)
