"""Each provider leads to the internet and to nothing of the host, and leaves nothing behind."""

import functools
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import pytest

from tbench2_env.isolation import egress, netfilter
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.egress import Egress, Veth
from tbench2_env.isolation.netlink import Netlink

from .child import in_own_process, own_mounts, own_user_namespace, stat_fields
from .rig import HOST_NETWORK_IS_OURS, USER_NAMESPACES, own_descriptors
from .world import HOST, HOST_TOO, INTERNET, METADATA, PORT, Episode, enter_world, episodes, eventually, fetch, in_child

P = ParamSpec("P")
PER_PROCESS = ["slirp4netns", "pasta"] if USER_NAMESPACES else ["slirp4netns"]
PROVIDERS = ["veth", *PER_PROCESS]
MAPS = ["0 0 65536\n", "0 100000 65536\n", "0 0 1\n"] if USER_NAMESPACES else [""]
NOBODY = 65534


def in_world(test: Callable[P, None]) -> Callable[P, None]:
    """Run the test in the world. Where that may not be made, nothing leads out of an episode, which is said."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if HOST_NETWORK_IS_OURS:
            enter_world()
            test(*args, **kwargs)
        else:
            nothing_leads_out()

    return in_own_process(run)


def nothing_leads_out() -> None:
    found, refusals = egress.find()
    assert found is None
    assert "CAP_NET_ADMIN" in refusals["veth"]
    for name in ("slirp4netns", "pasta"):
        no_device = r"open\(/dev/net/tun\): Permission denied \(load the module tun and make"
        assert re.match(f"{no_device}|the program {name} is missing: install the package", refusals[name])


def provider(name: str) -> Egress:
    found, refusals = egress.find([name], in_user_namespace=USER_NAMESPACES)
    assert found is not None, refusals
    return found


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def tables() -> list[str]:
    return netfilter.run_nft("list tables\n").split("\n")[:-1]


def address_of(episode: Episode) -> str:
    return str(getattr(episode.plug, "address", "10.0.2.100"))


def alive(pid: int) -> bool:
    return stat_fields(pid)[:1] not in ([], ["Z"])


# ---------------------------------------------------------------- what is reached
@pytest.mark.parametrize("map_line", MAPS)
@pytest.mark.parametrize("name", PROVIDERS)
@in_world
def test_the_internet_is_reached_and_the_host_is_not(name: str, map_line: str) -> None:
    way = provider(name)
    with episodes(way, map_line=map_line) as (episode,):
        assert episode.fetch(INTERNET) == ["internet"]
        gateway = getattr(episode.plug, "gateway", "10.0.2.2")
        for forbidden in (HOST, HOST_TOO, METADATA, gateway, "127.0.0.1", "0.0.0.0", "::1", "10.0.2.2", "10.0.2.3"):
            assert episode.fetch(forbidden)[0].startswith("error:"), forbidden
        assert episode.fetch(INTERNET) == ["internet"]
    way.close()


@pytest.mark.parametrize("name", PROVIDERS)
@in_world
def test_episodes_do_not_reach_each_other(name: str) -> None:
    way = provider(name)
    with episodes(way, 2) as (one, other):
        address = address_of(one)
        assert one.ask("serve", "one") is None
        assert one.fetch(address) == ["one"]
        assert other.fetch(address)[0].startswith("error:")
    way.close()


@in_world
def test_a_port_that_the_host_publishes_is_the_hosts_too() -> None:
    netfilter.run_nft(
        "add table ip docker\nadd chain ip docker pre { type nat hook prerouting priority dstnat; }\n"
        f"add rule ip docker pre ip daddr {HOST} tcp dport {PORT} dnat to {INTERNET}\n"
    )
    way = provider("veth")
    with episodes(way) as (episode,):
        assert episode.fetch(HOST)[0].startswith("error:")
        assert episode.fetch(INTERNET) == ["internet"]
    way.close()


@in_world
def test_the_hosts_end_of_a_pair_has_no_ipv6_address() -> None:
    way = provider("veth")
    with episodes(way):
        assert eventually(lambda: "up0" in Path("/proc/net/if_inet6").read_text())
        assert "tbn" not in Path("/proc/net/if_inet6").read_text()
    way.close()


@in_world
def test_a_way_out_is_found_where_episodes_have_no_user_namespaces() -> None:
    for name in egress.PROVIDERS:
        found, refusals = egress.find([name], in_user_namespace=False)
        assert found is not None, refusals
        found.close()


# ---------------------------------------------------------------- several servers
@in_world
def test_two_servers_have_networks_of_their_own() -> None:
    first, second = Veth(), Veth()
    assert first.claim.network != second.claim.network
    with episodes(second) as (other,):
        with episodes(first) as (one,):
            assert other.ask("serve", "other") is None
            assert one.fetch(INTERNET, HOST_TOO)[0] == other.fetch(INTERNET)[0] == "internet"
            assert one.fetch(address_of(other))[0].startswith("error:")
        first.close()
        assert other.fetch(INTERNET) == ["internet"]
        assert other.fetch(HOST)[0].startswith("error:")
    second.close()
    assert tables() == []


def _killed_claimants(count: int) -> list[int]:
    """Let processes claim a block each and connect an episode, and kill them; returns their blocks' numbers."""
    read_end, write_end = os.pipe()

    def claim() -> None:
        way = Veth()
        with episodes(way):
            os.write(write_end, bytes([way.claim.index]))
            signal.pause()

    claimed, pids = [], []
    for _ in range(count):
        pids.append(in_child(claim))
        claimed.append(os.read(read_end, 1)[0])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return claimed


@in_world
def test_what_a_killed_server_held_is_free_and_swept_at_the_next_claim() -> None:
    before = interfaces()
    assert _killed_claimants(2) == [0, 1]
    assert tables() == ["table inet tbench2_0", "table inet tbench2_1"]
    # Forks of a server that have not become another program yet share its claim, and die with it.
    assert eventually(lambda: interfaces() == before)
    way = Veth()
    assert way.claim.index == 0
    assert tables() == ["table inet tbench2_0"]
    way.close()


@in_world
def test_a_block_that_the_host_routes_is_not_taken() -> None:
    with Netlink() as link:
        link.add_unreachable("10.213.0.0", 19)
        assert str(netfilter.claim_block(link).network) == "10.213.32.0/20"
        link.add_unreachable("10.0.0.0", 8)
        assert str(netfilter.claim_block(link).network) == "198.18.0.0/20"
        link.add_unreachable("198.18.0.0", 15)
        with pytest.raises(OSError, match="is routed by this host or used by another server"):
            netfilter.claim_block(link)


# ---------------------------------------------------------------- ends
@pytest.mark.parametrize("name", PROVIDERS)
@in_world
def test_many_at_once_and_nothing_is_left(name: str) -> None:
    before, descriptors = interfaces(), len(own_descriptors())
    way = provider(name)
    started = time.monotonic()
    with episodes(way, 64) as made:
        spent_ms = (time.monotonic() - started) * 1000 / 64
        assert spent_ms < 500
        helpers = {episode.plug.pid for episode in made} - {None}
        assert len(helpers) == (0 if name == "veth" else 64)
        assert len(interfaces() - before) == (64 if name == "veth" else 0)
        assert all(len(interface) <= 15 for interface in interfaces())
        assert {episode.fetch(INTERNET)[0] for episode in made} == {"internet"}
        made[0].plug.unplug()
        made[0].plug.unplug()
    assert not any(Path(f"/proc/{pid}").exists() for pid in helpers)
    assert eventually(lambda: interfaces() == before)
    way.close()
    assert tables() == []
    assert len(own_descriptors()) == descriptors


@pytest.mark.parametrize("name", PER_PROCESS)
@in_world
def test_a_helper_dies_with_the_spawner(name: str) -> None:
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    read_end, write_end = os.pipe()

    def connect() -> None:
        with episodes(provider(name)) as (episode,):
            os.write(write_end, f"{episode.plug.pid} {episode.pid}\n".encode())
            signal.pause()

    spawner = in_child(connect)
    helper, pid_1 = (int(pid) for pid in os.read(read_end, 64).split())
    assert alive(helper)
    os.kill(pid_1, signal.SIGSTOP)  # the helper must not end only because the network namespace does
    os.kill(spawner, signal.SIGKILL)
    assert eventually(lambda: not alive(helper))


@pytest.mark.parametrize("name", PER_PROCESS)
@in_world
def test_a_helper_inherits_nothing(name: str) -> None:
    leak, _ = os.pipe()
    os.set_inheritable(leak, True)
    way = provider(name)
    with episodes(way) as (episode,):
        assert episode.plug.pid is not None
        process = Path(f"/proc/{episode.plug.pid}")
        assert (process / "environ").read_bytes() == b""
        inherited = {fd.readlink() for fd in (process / "fd").iterdir()}
        assert Path(f"/proc/self/fd/{leak}").readlink() not in inherited
        assert os.getsid(episode.plug.pid) == episode.plug.pid
    way.close()


# ---------------------------------------------------------------- refusals
@in_world
def test_a_provider_without_its_capability_or_device_says_so() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    sc.prctl(sc.PR_SET_DUMPABLE, 1)
    if USER_NAMESPACES:
        own_user_namespace()
    nothing_leads_out()


@in_world
def test_a_missing_device_is_named() -> None:
    own_mounts()
    sc.mount("none", "/dev/net", "tmpfs")
    assert "open(/dev/net/tun): No such file" in egress.find(["slirp4netns"])[1]["slirp4netns"]


@in_own_process
def test_a_missing_program_is_named() -> None:
    with pytest.raises(OSError, match="the program no-such is missing: install the package no-such"):
        netfilter.find_program("no-such")


@in_world
def test_forwarding_that_cannot_be_switched_on_is_refused() -> None:
    own_mounts()
    sc.mount("/proc/sys", "/proc/sys", flags=sc.MS_BIND)
    sc.mount("", "/proc/sys", flags=sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY)
    assert "set the sysctl net.ipv4.ip_forward=1" in egress.find(["veth"])[1]["veth"]
    assert tables() == []


@in_world
def test_a_firewall_that_drops_what_is_forwarded_is_named() -> None:
    netfilter.run_nft(
        "add table ip filter\nadd chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }\n"
    )
    assert "nft chain FORWARD, policy drop" in egress.find(["veth"])[1]["veth"]


@in_world
def test_a_process_that_is_gone_cannot_be_connected() -> None:
    gone = in_child(lambda: None)
    os.waitpid(gone, 0)
    before = interfaces()
    for name in PROVIDERS:
        way = provider(name)
        with pytest.raises(OSError, match=f"{gone}|did not connect"):
            way.connect(gone)
        way.close()
    assert interfaces() == before


@in_world
def test_a_network_is_not_given_out_again_at_once() -> None:
    way = Veth()
    used = []
    for _ in range(3):
        with episodes(way) as (episode,):
            assert episode.fetch(INTERNET) == ["internet"]
            used.append(address_of(episode))
    assert len(set(used)) == 3
    way.close()


@in_world
def test_a_network_whose_namespace_lives_on_is_taken_from_it() -> None:
    way = Veth()
    way.free = way.free[:1]
    with episodes(way) as (old,):
        old.plug.unplug()
        with episodes(way) as (new,):
            assert new.fetch(INTERNET) == ["internet"]
            assert old.fetch(INTERNET)[0].startswith("error:")
            old.plug.unplug()
            with pytest.raises(OSError, match=r"all 1 networks of 10\.213\.0\.0/20 are in use"):
                way.connect(os.getpid())
    way.close()


# ---------------------------------------------------------------- names
@in_world
def test_only_nameservers_that_an_episode_can_reach_are_named(tmp_path: Path) -> None:
    with Netlink() as link:
        host = egress.host_networks(link)
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text(f"# nameserver 9.9.9.9\nnameserver 127.0.0.53\nnameserver {HOST}\nnameserver fd00::1\nnameserver\n")
    real.write_text(f"search x\nnameserver {HOST_TOO}\nnameserver 192.0.2.53\nnameserver 198.51.100.1\n")
    assert egress.usable_nameservers([str(stub), str(real)], host) == ("192.0.2.53", "198.51.100.1")
    assert egress.usable_nameservers([str(tmp_path / "none"), str(stub)], host) == ()
    way = Veth([str(stub)])
    assert way.nameservers == ()
    assert "names do not resolve" in way.lacks[0]
    way.close()


@in_world
def test_the_host_is_every_address_of_its_own() -> None:
    with Netlink() as link:
        assert {str(network) for network in egress.host_networks(link)} >= {f"{HOST}/32", f"{HOST_TOO}/32"}
    assert fetch(HOST_TOO) == "host"
