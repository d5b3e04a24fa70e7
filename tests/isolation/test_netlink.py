"""The rtnetlink client against the kernel's own view in /proc and the socket interface."""

import errno
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tbench2_env.isolation import netlink
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.netlink import (
    RTN_LOCAL,
    RTN_UNICAST,
    RTN_UNREACHABLE,
    Changes,
    Netlink,
    attribute,
    attributes,
)
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.start import Starter

from .child import as_root, in_own_process
from .rig import own_descriptors
from .world import eventually, in_child


def own_network() -> Netlink:
    sc.unshare(sc.CLONE_NEWNET)
    return Netlink()


def other_network() -> int:
    """A process in a network namespace of its own."""
    read_end, write_end = os.pipe()

    def live() -> None:
        sc.unshare(sc.CLONE_NEWNET)
        os.write(write_end, b"!")
        signal.pause()

    pid = in_child(live)
    os.read(read_end, 1)
    return pid


def names(pid: int | str = "self") -> set[str]:
    return {line.split(":")[0].strip() for line in Path(f"/proc/{pid}/net/dev").read_text().split("\n")[2:] if line}


def with_ipv6() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/net/if_inet6").read_text().split("\n") if line}


def test_attributes_are_padded_and_read_back() -> None:
    data = attribute(1, b"abc") + attribute(2, b"") + attribute(0x8003, b"12345678")
    assert len(data) % 4 == 0
    assert attributes(data) == {1: b"abc", 2: b"", 3: b"12345678"}


@as_root
def test_a_pair_spans_two_namespaces_and_goes_as_one() -> None:
    link, there = own_network(), other_network()
    link.add_veth("here0", "there0", there)
    assert names() == {"lo", "here0"}
    assert names(there) == {"lo", "there0"}
    link.delete_link("here0")
    assert names() == names(there) == {"lo"}


@as_root
def test_an_interface_is_addressed_and_brought_up() -> None:
    link = own_network()
    with pytest.raises(OSError, match="Network is unreachable"):
        socket.create_connection(("127.0.0.1", 1), timeout=1)
    link.set_up(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 1), timeout=1)
    link.add_veth("here0", "there0", os.getpid())
    index = socket.if_nametoindex("here0")
    link.add_address(index, "192.0.2.1", 24)
    assert not link.is_running(index)
    for name in ("here0", "there0"):
        link.set_up(socket.if_nametoindex(name))
    assert eventually(lambda: link.is_running(index))
    assert Path("/proc/net/route").read_text().split("\n")[1].split()[:2] == ["here0", "000200C0"]
    socket.create_server(("192.0.2.1", 0)).close()


@as_root
def test_a_pair_has_one_queue_each_way_however_many_cpus_there_are() -> None:
    link = own_network()
    link.add_veth("here0", "there0", os.getpid())
    for name in ("here0", "there0"):
        header = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(name), 0, 0)  # struct ifinfomsg
        (answer,) = link._ask(netlink.Request(netlink.RTM_GETLINK, header, name))
        found = netlink.attributes(answer[len(header) :])
        ways = (netlink.IFLA_NUM_TX_QUEUES, netlink.IFLA_NUM_RX_QUEUES)
        assert [struct.unpack("=I", found[way]) for way in ways] == [(1,), (1,)]


@as_root
def test_an_interface_can_be_kept_from_ipv6() -> None:
    link = own_network()
    for name in ("with0", "without0"):
        link.add_veth(name, name + "p", os.getpid())
    link.keep_from_ipv6(socket.if_nametoindex("without0"))
    for name in ("with0", "with0p", "without0", "without0p"):
        link.set_up(socket.if_nametoindex(name))
    assert eventually(lambda: with_ipv6() == {"with0", "with0p", "without0p"})
    time.sleep(0.2)
    assert "without0" not in with_ipv6()


@as_root
def test_routes_are_added_and_read() -> None:
    link, there = own_network(), other_network()
    link.set_up(1)
    link.add_veth("here0", "there0", there)
    index = socket.if_nametoindex("here0")
    link.add_address(index, "192.0.2.1", 24)
    link.set_up(index)
    link.add_default_route("192.0.2.254")
    link.add_unreachable("198.51.100.0", 24)
    routes = {(socket.inet_ntoa(route.destination), route.prefix, route.type): route.oif for route in link.routes()}
    assert routes["0.0.0.0", 0, RTN_UNICAST] == routes["192.0.2.0", 24, RTN_UNICAST] == index
    assert routes["192.0.2.1", 32, RTN_LOCAL] == index
    assert ("198.51.100.0", 24, RTN_UNREACHABLE) in routes
    with pytest.raises(OSError, match="No route to host"):
        socket.create_connection(("198.51.100.7", 1), timeout=1)


@as_root
def test_many_routes_are_read_whole() -> None:
    link = own_network()
    for number in range(5000):
        link.add_unreachable(f"10.{number >> 8}.{number & 255}.0", 24)
    assert sum(route.type == RTN_UNREACHABLE for route in link.routes()) == 5000


@pytest.mark.parametrize(
    ("call", "number", "text"),
    [
        (lambda link: link.delete_link("no0"), errno.ENODEV, "RTM_DELLINK(no0): No such device"),
        (lambda link: link.set_up(99), errno.ENODEV, "RTM_NEWLINK(interface 99 up): No such device"),
        (
            lambda link: link.add_default_route("192.0.2.1"),
            errno.ENETUNREACH,
            "RTM_NEWROUTE(default via 192.0.2.1): Network is unreachable (Nexthop has invalid gateway)",
        ),
        (lambda link: link.add_address(99, "192.0.2.1", 24), errno.ENODEV, "RTM_NEWADDR(192.0.2.1/24 to interface 99)"),
        (lambda link: link.add_veth("a0", "b0", 1 << 22), errno.ESRCH, "RTM_NEWLINK(veth a0, b0 of process 4194304)"),
    ],
)
@as_root
def test_an_error_names_the_message_and_the_kernels_reason(
    call: Callable[[Netlink], object], number: int, text: str
) -> None:
    with pytest.raises(OSError, match=re.escape(text)) as caught:
        call(own_network())
    assert caught.value.errno == number


@in_own_process
def test_a_missing_capability_comes_with_advice() -> None:
    os.setresuid(65534, 65534, 65534)
    with Netlink() as link, pytest.raises(PermissionError, match="CAP_NET_ADMIN over this network namespace"):
        link.set_up(1)


def test_closing_gives_the_socket_back() -> None:
    before = own_descriptors()
    with Netlink() as link:
        assert any(link.routes())
    assert own_descriptors() == before


def two_routes_and_one_of_them_twice() -> Changes:
    changes = Changes()
    for address in ("10.1.0.0", "10.1.0.0", "10.2.0.0"):
        changes.add_unreachable(address, 16)
    return changes


@as_root
def test_of_changes_made_together_the_first_that_fails_is_told_and_the_others_are_made() -> None:
    link = own_network()
    with pytest.raises(OSError, match=r"RTM_NEWROUTE\(unreachable 10\.1\.0\.0/16\): File exists"):
        link.make(two_routes_and_one_of_them_twice())
    assert [route.type for route in link.routes()] == [RTN_UNREACHABLE] * 2
    link.set_up(1)  # no answer was left unread
    assert link.is_running(1)


@as_root
def test_a_program_makes_changes_and_ends_when_one_is_refused() -> None:
    link = own_network()
    for changes, refused in ((Changes(), False), (two_routes_and_one_of_them_twice(), True)):
        changes.set_up(1)
        program, starter = Program(), Starter()
        changes.add(program)
        program.call("exit_group", 0)
        started = starter.start(program, ())
        failure = starter.ended(started, os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]))
        assert (failure is not None) == refused, failure
        assert link.is_running(1)
