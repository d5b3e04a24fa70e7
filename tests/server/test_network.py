"""An episode's network: ports of its own, a way out where the task allows one, and none to the host (CASES.md 5).

Servers that let episodes out run in a network of the test's own: see `support.world`.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import inits, running, spawner
from support.server import HELPERS, MakeServer, Server, eventually
from support.talk import soon
from support.tasks import make_task
from support.world import HOST_V4, HOST_V6, INTERNET, INTERNET_TOO, WORD, World, world
from tbench2_env import Tbench2Env

from .test_isolation_choice import refused_start

#: Ways out, and the programs that a host lacks on which each is the best.
WAYS = {
    "veth": (),
    "slirp4netns": ("nft",),
    "pasta": ("nft", "slirp4netns"),
    "proxy": ("nft", "slirp4netns", "pasta"),
}
OUT = f"http://{INTERNET}/word"
#: Writes what the verifier is told beyond, and its proxies, to the log; a good word is a 1.
FETCHING = (
    f'word=$(curl -sm 5 {OUT}); [ "$word" = "{WORD.strip()}" ] && r=1 || r=0\necho $r >/logs/verifier/reward.txt\n'
)
#: Serves what is in ~/id on two ports, one of them for root only.
SERVE = (
    "cd; echo {} >id; for port in 8080 80; do python3 -m http.server $port >/dev/null 2>&1 & done; "
    "for port in 8080 80; do curl -s --retry 40 --retry-connrefused --retry-delay 0 localhost:$port/id; done"
)
OWN_PORTS = '[ "$(curl -s localhost:8080/id localhost:80/id)" = "$(cat ~/id ~/id)" ] && r=1 || r=0\n'
FIELD = "environment.network_mode"


@pytest.fixture(scope="module")
def network_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network-tasks")
    make_task(folder, "public", FETCHING)
    make_task(folder, "no-internet", FETCHING, toml="[environment]\nallow_internet = false\n")
    make_task(folder, "no-network", FETCHING, toml='[environment]\nnetwork_mode = "no-network"\n')
    hosts = f'network_mode = "allowlist"\nallowed_hosts = ["{INTERNET}", "*.invalid"]\n'
    make_task(folder, "allowlist", FETCHING, toml="[environment]\n" + hosts)
    make_task(folder, "ports", OWN_PORTS + "echo $r >/logs/verifier/reward.txt\n")
    return folder


@pytest.fixture
def network(tmp_path: Path) -> Iterator[World]:
    """The test, its servers and clients are in its host's network."""
    with world(tmp_path) as made, made.host.entered():
        yield made
        eventually(lambda: not made.interfaces(), 5, lambda: f"interfaces left: {made.interfaces()}")


def without(programs: tuple[str, ...]) -> tuple[str, ...]:
    """On a host that lacks the programs, and with a server that listens on every address."""
    cover = "".join(f"mount --bind /dev/null $(readlink -f $(command -v {program})); " for program in programs)
    return ("unshare", "--mount", "sh", "-ec", cover + 'exec "$@" --host 0.0.0.0', "sh")


@contextlib.asynccontextmanager
async def episode(server: Server, task: str) -> AsyncIterator[tuple[Tbench2Env, dict[str, Any]]]:
    async with server.client() as env:
        info = (await env.reset(task_id=task)).observation.info
        yield env, info | {"unmet": [need for need in info["unmet"] if not need.startswith("base image ")]}


async def output(env: Tbench2Env, command: str) -> str:
    return (await env.exec(command)).output


# ---------------------------------------------------------------- 5: ports
async def test_eight_episodes_serve_the_same_ports(make_server: MakeServer, network_tasks: Path) -> None:
    """A privileged one among them; each reaches its own, and so does its verifier."""
    server = make_server({"TB2_NETWORK": "private"}, tasks=network_tasks)

    async def serve_and_look(number: int) -> tuple[str, float | None]:
        async with episode(server, "ports") as (env, _):
            said = await output(env, SERVE.format(number))
            await meet.wait()
            return said, (await env.evaluate()).reward

    meet = asyncio.Barrier(8)
    found = await asyncio.gather(*(serve_and_look(number) for number in range(8)))
    assert found == [(f"{number}\n{number}\n", 1.0) for number in range(8)]


# ---------------------------------------------------------------- out, and never to the host
@pytest.mark.parametrize("way", WAYS)
async def test_out_and_not_to_the_host(
    network: World, make_server: MakeServer, network_tasks: Path, tmp_path: Path, way: str
) -> None:
    """Neither to the server itself nor to another service, on none of the host's addresses, with and without proxy."""
    server = make_server(tasks=network_tasks, wrap=without(WAYS[way]))
    services = {server.port: "/health", 9000: "/"}
    (tmp_path / "of-host").mkdir()
    service = network.host.start(
        "python3", "-m", "http.server", "9000", "--bind", "::", "-d", str(tmp_path / "of-host")
    )
    try:
        for address in HOST_V4:
            eventually(lambda address=address: _answers(network, address, 9000), 10)  # type: ignore[misc]
            assert _answers(network, address, server.port)
        assert _answers(network, HOST_V6[0], 9000)
        async with episode(server, "public") as (env, info):
            assert info["isolation"]["network_mode"] == ("proxy" if way == "proxy" else "egress")
            assert (f"out by {way}" if way != "proxy" else "HTTP(S) proxy only") in info["isolation"]["network"]
            assert await output(env, f"curl -sm 5 {OUT}") == WORD
            assert (await env.evaluate()).reward == 1
            gateways = (await output(env, "ip -4 route | sed -n 's/default via \\([^ ]*\\) .*/\\1/p'")).split()
            assert len(gateways) == (0 if way == "proxy" else 1)
            addresses = ["127.0.0.1", "0.0.0.0", "localhost", "[::1]", "10.0.2.2", "10.0.2.3", *HOST_V4, *gateways]
            urls = [f"http://{host}:{port}{path}" for host in addresses for port, path in services.items()]
            urls += [f"http://[{HOST_V6[0]}]:{port}{path}" for port, path in services.items()]
            for option in ("--noproxy '*'", "--noproxy ''"):
                tries = [f"{{ curl -fsm 1 -o /dev/null {option} {url} && echo {url} || echo no; }} &" for url in urls]
                assert (await output(env, "\n".join([*tries, "wait"]))).split() == ["no"] * len(urls)
    finally:
        service.kill()
        service.wait()


def _answers(network: World, address: str, port: int) -> bool:
    try:
        network.host.connect(address, port).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("task", ["no-internet", "no-network"])
async def test_a_task_without_internet_has_none(
    network: World, make_server: MakeServer, network_tasks: Path, task: str
) -> None:
    server = make_server(tasks=network_tasks)
    async with episode(server, task) as (env, info):
        assert info["isolation"]["network_mode"] == "private"
        assert info["unmet"] == []
        assert await output(env, "ls /sys/class/net; ip -o link | wc -l; ip route") == "lo\n1\n"
        assert (await env.exec(f"curl -sm 1 {OUT}")).info["exit_code"] == 7
        assert await output(env, "env | grep -ic _proxy=") == "0\n"
        assert (await env.evaluate()).reward == 0


async def test_an_allowlist(network: World, make_server: MakeServer, network_tasks: Path) -> None:
    server = make_server(tasks=network_tasks)
    async with episode(server, "allowlist") as (env, info):
        assert info["isolation"]["network_mode"] == "proxy"
        assert info["unmet"] == []
        code = "curl -sm 5 -o /dev/null -w '%{http_code} %{http_connect}\\n' "
        assert await output(env, f"curl -sm 5 {OUT}") == WORD
        assert await output(env, f"{code} http://{INTERNET_TOO}/word") == "403 000\n"
        assert await output(env, f"{code} https://{INTERNET_TOO}/word") == "000 403\n"
        assert await output(env, f"{code} --noproxy '*' {OUT}") == "000 000\n"
        assert await output(env, "ls /sys/class/net") == "lo\n"
        own = "env | grep -i _proxy | cut -d= -f1 | sort"
        assert (await output(env, own)).split() == sorted(
            name for each in ("http_proxy", "https_proxy", "no_proxy") for name in (each, each.upper())
        )
        assert await output(env, SERVE.format("own")) == "own\nown\n", "its own services are reached without it"
        assert (await env.evaluate()).reward == 1


# ---------------------------------------------------------------- TB2_NETWORK
async def test_private_for_all(network: World, make_server: MakeServer, network_tasks: Path) -> None:
    server = make_server({"TB2_NETWORK": "private"}, tasks=network_tasks)
    for task, mode in (("public", "public"), ("allowlist", "allowlist")):
        async with episode(server, task) as (env, info):
            assert info["isolation"]["network_mode"] == "private"
            assert info["unmet"] == [f"{FIELD} = {mode}: TB2_NETWORK=private lets nobody out"]
            assert (await env.exec(f"curl -sm 1 {OUT}")).info["exit_code"] == 7
    assert network.interfaces() == set()


async def test_the_hosts_network_for_all(network: World, make_server: MakeServer, network_tasks: Path) -> None:
    server = make_server({"TB2_NETWORK": "host"}, tasks=network_tasks)
    async with episode(server, "public") as (env, info):
        assert info["isolation"]["network_mode"] == "host"
        assert info["isolation"]["network"].startswith("host: ports are shared")
        assert any("ports are shared with the host" in lack for lack in info["isolation"]["lacks"])
        assert info["unmet"] == []
        assert await output(env, f"curl -sm 5 {OUT}") == WORD
        assert await output(env, f"curl -sm 5 127.0.0.1:{server.port}/health | grep -c healthy") == "1\n"
    for task, mode in (("no-internet", "no-network"), ("allowlist", "allowlist")):
        async with episode(server, task) as (_, info):
            why = "not enforced, the episode shares the host's network (TB2_NETWORK=host)"
            assert info["unmet"] == [f"{FIELD} = {mode}: {why}"]


async def test_egress_or_nothing(network: World, make_server: MakeServer, network_tasks: Path, tmp_path: Path) -> None:
    """Where only the proxy is left, TB2_NETWORK=egress does not start, and auto says what is missing."""
    bare = without(WAYS["proxy"])
    with refused_start(tmp_path, network_tasks, *bare, TB2_NETWORK="egress") as said:
        for package in ("nftables", "slirp4netns", "passt"):
            assert f"install the package {package}" in said
    server = make_server(tasks=network_tasks, wrap=bare)
    async with episode(server, "public") as (_, info):
        assert len(info["unmet"]) == 1
        assert "only HTTP and HTTPS lead out" in info["unmet"][0]
    server = make_server({"TB2_NETWORK": "egress"}, tasks=network_tasks)
    async with episode(server, "public") as (env, _):
        assert await output(env, f"curl -sm 5 {OUT}") == WORD


def test_a_network_that_there_is_not(tmp_path: Path, network_tasks: Path) -> None:
    with refused_start(tmp_path, network_tasks, TB2_NETWORK="bridge") as said:
        assert "TB2_NETWORK" in said
        assert "egress" in said


# ---------------------------------------------------------------- what it costs, and leaves
@pytest.mark.parametrize("way", ["veth", "slirp4netns", "proxy"])
async def test_many_live_episodes(network: World, make_server: MakeServer, network_tasks: Path, way: str) -> None:
    server = make_server({"TB2_WARM": "0"}, tasks=network_tasks, wrap=without(WAYS[way]))
    count, per_episode = 64, int(way == "slirp4netns")
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.client()) for _ in range(count)]
        await asyncio.gather(*(env.reset(task_id="public") for env in clients))
        said = await asyncio.gather(*(output(env, f"curl -sm 10 {OUT}") for env in clients))
        assert said == [WORD] * count
        assert len(inits(server)) == count
        assert len(running(server, "slirp4netns ")) == count * per_episode
        assert len(server.descendants()) == HELPERS + count * (1 + per_episode)
        assert len(network.interfaces()) == (count if way == "veth" else 0)
    eventually(lambda: not running(server, "slirp4netns ") and not inits(server), 5)
    eventually(lambda: not network.interfaces(), 5)


async def tables(network: World) -> list[str]:
    code, found = await network.host.run("nft", "list", "tables")
    assert code == 0
    return [line.split()[2] for line in found.splitlines()]


@pytest.mark.parametrize("killed", ["nobody", "server", "server and helpers"])
async def test_what_an_ended_server_leaves(
    network: World, make_server: MakeServer, network_tasks: Path, tmp_path: Path, killed: str
) -> None:
    """Its helpers tidy up after a server that was killed. If they were, too, the next server's start does."""
    scratch = {"TB2_SCRATCH_DIR": str(tmp_path / "scratch"), "TB2_WARM": "0"}
    server = make_server(scratch, tasks=network_tasks)
    async with episode(server, "public"), episode(server, "public"):
        assert len(network.interfaces()) == 2
        [table] = await tables(network)
        if killed == "server and helpers":
            os.kill(spawner(server), signal.SIGKILL)
        server.stop(signal.SIGTERM if killed == "nobody" else signal.SIGKILL)
    await soon(lambda: not network.interfaces(), 5)
    if killed == "server and helpers":
        assert await tables(network) == [table]
    else:
        await until_no_table(network)
    server = make_server(scratch, tasks=network_tasks)
    async with episode(server, "public") as (env, _):
        assert await output(env, f"curl -sm 5 {OUT}") == WORD
    assert await tables(network) == [table]
    server.stop()
    assert await tables(network) == []
    assert list((tmp_path / "scratch").iterdir()) == []


async def until_no_table(network: World) -> None:
    deadline = time.monotonic() + 5
    while left := await tables(network):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)
