"""The egress proxy: a real process between real network namespaces, none of which leads off this machine.

`node` plays the host: it has addresses on two interfaces. `web` is beyond it, on 198.51.100.2. `Episode` has its own
loopback only, with the proxy's listener on it.
"""

import asyncio
import contextlib
import http.server
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.netns import NetworkNamespace
from support.server import descendants
from tbench2_env.isolation.spec import PROXY_PORT
from tbench2_env.server.proxy import EgressError, EgressProxy, proxy_env
from tbench2_env.server.proxy_policy import Policy

NODE, NODE_ETH0, NODE_V6 = "198.51.100.1", "203.0.113.7", "2001:db8::7"
WEB, WEB_2 = "198.51.100.2", "198.51.100.3"
MB = 1 << 20


class Web(http.server.BaseHTTPRequestHandler):
    """Answers GET /N with N bytes, and POST with the body and the headers that it got."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/where":
            return self._answer(f"{self.headers['Host']} at {self.connection.getsockname()[0]}".encode())
        if self.path == "/never":
            time.sleep(20)
        return self._answer(b"x" * int(self.path[1:] or 0))

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class WebServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(("", 0), Web, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()

    def handle_error(self, *arguments: object) -> None:
        pass  # clients that leave

    def close(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture(scope="module")
def web() -> Iterator[NetworkNamespace]:
    """The network that is beyond the node."""
    web = NetworkNamespace()
    yield web
    web.close()


@pytest.fixture(scope="module")
def node(web: NetworkNamespace) -> Iterator[NetworkNamespace]:
    """The host's network, wired to `web`'s. Web servers answer on port 80 of both."""
    node = NetworkNamespace()
    for ours, theirs, own, its in (
        ("veth0", "far0", (NODE,), (WEB, WEB_2)),
        ("eth0", "far1", (NODE_ETH0, NODE_V6), ()),
    ):
        node.ip(f"link add {ours} type veth peer name {theirs} netns /proc/{os.getpid()}/fd/{web.fd}")
        for network, device, addresses in ((node, ours, own), (web, theirs, its)):
            for address in addresses:
                network.ip(f"addr add {address}{'/64 nodad' if ':' in address else '/24'} dev {device}")
            network.ip(f"link set {device} up")
    servers = [WebServer(web.listen("", 80)), WebServer(node.listen("", 80))]
    yield node
    for server in servers:
        server.close()
    node.close()


@pytest.fixture
async def proxy(node: NetworkNamespace) -> AsyncIterator[EgressProxy]:
    """A proxy on the node; nothing of it is left after the test."""
    before = _descriptors()
    with node.entered():
        proxy = EgressProxy()
        yield proxy
        await proxy.stop()
    assert not proxy.alive
    assert not _proxies()
    assert _descriptors() == before


class Episode:
    """An episode's network."""

    def __init__(self) -> None:
        self.network = NetworkNamespace()
        with self.network.listen("127.0.0.1", PROXY_PORT) as listener:
            self.listener = os.dup(listener.fileno())

    def close(self) -> None:
        os.close(self.listener)
        self.network.close()

    async def curl(self, *arguments: str, within_s: float = 20.0) -> tuple[int, str]:
        """curl by way of the proxy: (exit status, output with the answer's status in the last line)."""
        argv = ("curl", "-sS", "--proxy", f"http://127.0.0.1:{PROXY_PORT}", "--noproxy", "", *arguments)
        return await self.network.run(*argv, "-w", "\n%{http_connect} %{http_code}", within_s=within_s)

    def connect(self) -> socket.socket:
        return self.network.connect("127.0.0.1", PROXY_PORT)

    def tunnel(self, host: str = WEB) -> socket.socket:
        """A connection to the web server through CONNECT."""
        sock = self.connect()
        sock.sendall(f"CONNECT {host}:80 HTTP/1.1\r\nHost: {host}:80\r\n\r\n".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        return sock


async def until(true: Callable[[], bool], within_s: float = 5) -> None:
    """Wait until `true()`; fail if that takes longer."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.01)


@pytest.fixture
async def make_episode(proxy: EgressProxy) -> AsyncIterator["MakeEpisode"]:
    make = MakeEpisode(proxy)
    yield make
    for name, episode in make.episodes.items():
        await proxy.remove(name)
        episode.close()


class MakeEpisode:
    """`await make_episode("a", "web.test")`: an episode that the proxy serves; without hosts, all are allowed."""

    def __init__(self, proxy: EgressProxy) -> None:
        self._proxy, self.episodes = proxy, dict[str, Episode]()

    async def __call__(self, name: str = "a", *allowed: str) -> Episode:
        episode = self.episodes[name] = Episode()
        await self._proxy.add(name, episode.listener, allowed or None)
        return episode


async def test_get_through_the_proxy(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    assert await a.curl(f"http://{WEB}/where") == (0, f"{WEB} at {WEB}\n000 200")


async def test_connect_through_the_proxy(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    assert await a.curl("--proxytunnel", f"http://{WEB}/where") == (0, f"{WEB} at {WEB}\n200 200")


async def test_tls_passes_through_unread(make_episode: MakeEpisode, web: NetworkNamespace, tmp_path: Path) -> None:
    key, certificate = _make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = WebServer(context.wrap_socket(web.listen(WEB, 443), server_side=True))
    try:
        a = await make_episode()
        answer = await a.curl("--cacert", str(certificate), f"https://{WEB}/where")
        assert answer == (0, f"{WEB} at {WEB}\n200 200")
    finally:
        server.close()


async def test_bodies_pass_both_ways(make_episode: MakeEpisode, tmp_path: Path) -> None:
    a = await make_episode()
    body = os.urandom(5 * MB)
    (tmp_path / "body").write_bytes(body)
    for more in ([], ["--proxytunnel"]):
        arguments = ["--data-binary", f"@{tmp_path}/body", "-o", f"{tmp_path}/answer", f"http://{WEB}/", *more]
        status, output = await a.curl(*arguments)
        assert (status, output.split()[-1]) == (0, "200")
        assert (tmp_path / "answer").read_bytes() == body


async def test_a_kept_connection_never_serves_another_host(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    status, output = await a.curl(f"http://{WEB}/where", f"http://{WEB_2}/where", f"http://{WEB}/where")
    assert status == 0
    assert re.findall(r"198\S+ at 198\S+", output) == [f"{host} at {host}" for host in (WEB, WEB_2, WEB)]


async def test_the_variables_lead_programs_to_the_proxy(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    variables = [f"{name}={value}" for name, value in proxy_env().items()]
    fetch = f"import urllib.request as r; print(r.urlopen('http://{WEB}/where').read().decode())"
    assert await a.network.run("env", "-i", *variables, sys.executable, "-c", fetch) == (0, f"{WEB} at {WEB}\n")
    own = "import urllib.request as r; r.urlopen('http://localhost:1/')"
    assert "Connection refused" in (await a.network.run("env", "-i", *variables, sys.executable, "-c", own))[1]


OWN = [
    "127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "0.0.0.0", "0", "2130706433", "0x7f000001", "017700000001",
    "127.1", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", f"[::ffff:{NODE}]", NODE, NODE_ETH0,
    f"[{NODE_V6}]",
]  # fmt: skip
METADATA = ["169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]", "[fd00:ec2::254]"]
MULTICAST = ["224.0.0.1", "[ff02::1]"]


REASONS = {
    **dict.fromkeys(OWN, "an address of this host"),
    **dict.fromkeys(METADATA, "a link-local or cloud metadata address"),
    **dict.fromkeys(MULTICAST, "a multicast address"),
}


async def test_the_host_is_out_of_reach_by_whatever_address(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    right = {host: (403, f"{host} is {reason}, which episodes may not reach") for host, reason in REASONS.items()}
    assert {host: _ask(a, f"GET http://{host}/where HTTP/1.1\r\nHost: x\r\n\r\n") for host in right} == right
    assert {host: _ask(a, f"CONNECT {host}:80 HTTP/1.1\r\n\r\n") for host in right} == right


async def test_the_host_is_out_of_reach_on_an_address_that_it_got_later(
    make_episode: MakeEpisode, node: NetworkNamespace
) -> None:
    a = await make_episode()
    node.ip("addr add 203.0.113.99/24 dev eth0")
    assert (await a.curl("http://203.0.113.99/where"))[1].endswith("403")


async def test_a_refusal_says_why_to_curl(make_episode: MakeEpisode) -> None:
    a = await make_episode("a", "example.test")
    status, output = await a.curl("http://other.test/")
    assert output == "Forbidden: the network policy of this task does not allow other.test\n\n000 403"
    status, output = await a.curl("--proxytunnel", "http://other.test/")
    assert status != 0
    assert output.endswith("403 000")


async def test_only_allowed_hosts_are_reached(make_episode: MakeEpisode) -> None:
    a, b = await make_episode("a", WEB, "known.test"), await make_episode("b", "*.example.test")
    assert (await a.curl(f"http://{WEB}/where"))[1].endswith("200")
    assert (await a.curl(f"http://{WEB_2}/where"))[1].endswith("403")
    assert (await b.curl(f"http://{WEB}/where"))[1].endswith("403")
    # A name that is allowed is looked up, and these names do not exist.
    assert (await a.curl("http://known.test/"))[1].endswith("502")
    assert (await b.curl("http://deep.sub.example.test/"))[1].endswith("502")
    assert (await b.curl("http://known.test/"))[1].endswith("403")


async def test_an_allowed_name_of_the_host_is_refused(make_episode: MakeEpisode) -> None:
    a = await make_episode("a", "localhost", "127.0.0.1")
    assert _ask(a, "CONNECT localhost:80 HTTP/1.1\r\n\r\n")[0] == 403
    assert _ask(a, "CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n")[0] == 403


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("example.org", True), ("EXAMPLE.org.", True), ("a.example.org", False), ("badexample.org", False),
        ("a.sub.test", True), ("b.a.SUB.test", True), ("sub.test", False), ("xsub.test", False),
        ("a.dot.test", True), ("dot.test", True), ("xdot.test", False),
        ("192.0.2.1", True), ("192.0.2.10", False), ("3221225985", False), ("2001:db8:0::1", True), ("", False),
    ],
)  # fmt: skip
def test_what_a_list_of_hosts_allows(name: str, allowed: bool) -> None:
    policy = Policy(("Example.ORG.", "*.sub.test", ".dot.test", "192.0.2.1", "2001:db8::1"))
    assert policy.allows(name) is allowed


def test_an_empty_list_allows_nothing() -> None:
    assert not Policy(()).allows("example.org")


BAD_REQUESTS = {
    "GET / HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    "nonsense\r\n\r\n": 400,
    f"CONNECT {WEB}:99999 HTTP/1.1\r\n\r\n": 502,
    f"CONNECT {WEB}:81 HTTP/1.1\r\n\r\n": 502,
    "GET ftp://x/ HTTP/1.1\r\n\r\n": 400,
    "GET http://a..b/ HTTP/1.1\r\n\r\n": 502,
    f"GET http://{'a' * 300}/ HTTP/1.1\r\n\r\n": 502,
    "GET http://\xff\xfe/ HTTP/1.1\r\n\r\n": 502,
    "GET http://x:y/ HTTP/1.1\r\n\r\n": 400,
}


async def test_bad_requests_are_answered(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    assert {request: _ask(a, request)[0] for request in BAD_REQUESTS} == BAD_REQUESTS
    assert (await a.curl(f"http://{WEB}/where"))[1].endswith("200")


async def test_a_request_without_end_is_cut_off(make_episode: MakeEpisode) -> None:
    a = await make_episode()
    with a.connect() as sock, pytest.raises(OSError, match=r"reset|pipe"):
        sock.sendall(bytes(8 * MB))


async def test_a_refused_upload_is_told_why(make_episode: MakeEpisode, tmp_path: Path) -> None:
    a = await make_episode("a", WEB)
    (tmp_path / "body").write_bytes(bytes(5 * MB))
    for expect in ("Expect:", "Expect: 100-continue"):
        status, output = await a.curl("-H", expect, "--data-binary", f"@{tmp_path}/body", f"http://{WEB_2}/")
        assert (status, output.splitlines()[0]) == (
            0,
            "Forbidden: the network policy of this task does not allow 198.51.100.3",
        )


async def test_an_episode_has_64_connections_at_most(make_episode: MakeEpisode) -> None:
    a, b = await make_episode("a"), await make_episode("b")
    with contextlib.ExitStack() as open_until_the_end:
        tunnels = [open_until_the_end.enter_context(a.tunnel()) for _ in range(64)]
        with a.connect() as one_more:
            assert _closed(one_more)
        open_until_the_end.enter_context(b.tunnel())
        full = len(_sockets(_proxy_pid()))
        tunnels[0].close()
        await until(lambda: len(_sockets(_proxy_pid())) == full - 2)
        open_until_the_end.enter_context(a.tunnel())


CURL = f"curl -s -o /dev/null -x 127.0.0.1:{PROXY_PORT}"
FLOODS = {
    "downloads": f"while :; do seq 64 | xargs -P 64 -I N {CURL} http://{WEB}:8080/big; done",
    "connections": f"while :; do seq 64 | xargs -P 4 -I N {CURL} http://127.0.0.1/; done",
    "unreachable hosts": f"seq 64 | xargs -P 64 -I N {CURL} http://198.51.100.9/",
    "silence": f"for i in $(seq 64); do exec {{fd}}<>/dev/tcp/127.0.0.1/{PROXY_PORT}; done; sleep 60",
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_one_episodes_flood_does_not_stall_another(
    make_episode: MakeEpisode, web: NetworkNamespace, tmp_path: Path, kind: str
) -> None:
    a, b = await make_episode("a"), await make_episode("b")
    (tmp_path / "big").touch()
    os.truncate(tmp_path / "big", 20 * MB)
    serve = f"exec {sys.executable} -m http.server 8080 -d {tmp_path} 2>/dev/null >&2"
    with _Running(web, serve), _Running(a.network, FLOODS[kind]):
        await asyncio.sleep(1)
        for _ in range(10):
            started = time.monotonic()
            assert _ask(b, f"GET http://{WEB}/3 HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200
            assert time.monotonic() - started < 1
            await asyncio.sleep(0.1)


async def test_a_client_that_does_not_read_costs_no_memory(make_episode: MakeEpisode, proxy: EgressProxy) -> None:
    a = await make_episode()
    pid = _proxy_pid()
    with a.tunnel() as slow:
        before = _rss(pid)
        slow.sendall(f"GET /{300 * MB} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await asyncio.sleep(1)
        assert _rss(pid) - before < 8 * MB
        assert _cpu_s(pid, 0.5) < 0.1
        total = 0
        while total < 300 * MB:
            total += len(slow.recv(MB))
        assert _rss(pid) - before < 8 * MB


async def test_removal_closes_the_listener_and_every_connection(make_episode: MakeEpisode, proxy: EgressProxy) -> None:
    b = await make_episode("b")
    before = len(_sockets(_proxy_pid()))
    a = await make_episode("a")
    with a.tunnel() as tunnel, a.connect() as silent, b.tunnel() as other:
        await proxy.remove("a")
        os.close(a.listener)
        assert _closed(tunnel)
        assert _closed(silent)
        with pytest.raises(ConnectionRefusedError):
            a.connect()
        other.sendall(b"GET /3 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
    make_episode.episodes.pop("a").network.close()
    await until(lambda: len(_sockets(_proxy_pid())) == before)


async def test_removal_while_it_connects(make_episode: MakeEpisode, proxy: EgressProxy) -> None:
    a = await make_episode("a")
    with a.connect() as sock:
        sock.sendall(b"CONNECT 198.51.100.9:80 HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await proxy.remove("a")
        assert _closed(sock)
        assert time.monotonic() - started < 1


async def test_a_name_is_served_once(make_episode: MakeEpisode, proxy: EgressProxy) -> None:
    a = await make_episode("a")
    with pytest.raises(EgressError, match="'a' already"):
        await proxy.add("a", a.listener, None)
    assert (await a.curl(f"http://{WEB}/where"))[1].endswith("200")
    await proxy.remove("nobody")


async def test_a_proxy_that_died_is_started_again_with_the_live_episodes(
    make_episode: MakeEpisode, proxy: EgressProxy
) -> None:
    a, b = await make_episode("a"), await make_episode("b", WEB)
    first = _proxy_pid()
    os.kill(first, signal.SIGKILL)
    await until(lambda: proxy.alive and _proxies() not in ([], [first]))
    assert (await a.curl(f"http://{WEB_2}/where"))[1].endswith("200")
    assert (await b.curl(f"http://{WEB_2}/where"))[1].endswith("403")
    c = await make_episode("c")
    assert (await c.curl(f"http://{WEB}/where"))[1].endswith("200")


async def test_it_ends_with_a_server_that_is_killed(node: NetworkNamespace) -> None:
    program = """
import asyncio, socket
from tbench2_env.server.proxy import EgressProxy
async def main():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await EgressProxy().add("a", listener.fileno(), None)
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with node.start(sys.executable, "-c", program, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        (pid,) = _proxies(server.pid)
        server.kill()
    await until(lambda: not _runs(pid), 2)


async def test_it_writes_and_says_nothing(node: NetworkNamespace, tmp_path: Path) -> None:
    program = f"""
import asyncio, os, socket
from tbench2_env.server.proxy import EgressProxy
async def main():
    proxy = EgressProxy()
    listener = socket.create_server(("127.0.0.1", 3128))
    await proxy.add("a", listener.fileno(), ("{WEB}",))
    for url in ("http://{WEB}/where", "http://127.0.0.1/", "http://{WEB}:81/"):
        curl = await asyncio.create_subprocess_exec("curl", "-s", "-o", "/dev/null", "-x", "127.0.0.1:3128", url)
        assert await curl.wait() == 0
    await proxy.stop()
asyncio.run(main())
"""
    variables = [f"HOME={tmp_path}", f"TMPDIR={tmp_path}"]
    assert await node.run("env", *variables, sys.executable, "-c", program) == (0, "")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- helpers
class _Running:
    """A script that runs in a network until the end of the block."""

    def __init__(self, network: NetworkNamespace, script: str) -> None:
        self._process = network.start("bash", "-c", script)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _ask(episode: Episode, request: str) -> tuple[int, str]:
    """The status and the sentence of the proxy's answer to these very bytes."""
    with episode.connect() as sock:
        sock.settimeout(5)
        sock.sendall(request.encode("latin-1"))
        answer = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    status, _, reason = answer.partition("\r\n")[0].removeprefix("HTTP/1.1 ").partition(" ")
    return int(status), reason.removeprefix("Forbidden: ")


def _closed(sock: socket.socket) -> bool:
    sock.settimeout(1)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def _proxies(server: int | None = None) -> list[int]:
    return [pid for pid, line in descendants(server or os.getpid()).items() if "proxy_main" in line]


def _proxy_pid() -> int:
    (pid,) = _proxies()
    return pid


def _runs(pid: int) -> bool:
    """Whether it runs; a zombie, which only waits for the init of this machine, does not."""
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def _sockets(pid: int) -> list[str]:
    targets = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [target for target in targets if target.startswith("socket:")]


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for the web server."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={WEB}",
         "-addext", f"subjectAltName=IP:{WEB}", "-keyout", key, "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


def _rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _cpu_s(pid: int, within_s: float) -> float:
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(within_s)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)
