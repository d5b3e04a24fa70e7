"""Ways out of an episode's network namespace that do not lead to the host.

    veth         a pair of interfaces and NAT by nftables; needs CAP_NET_ADMIN over the host's network
    slirp4netns  one process per episode speaks TCP/IP in user space; needs /dev/net/tun
    pasta        the same by another program

The spawner makes one provider at its start, by `find`, and calls `connect` for each episode while its PID 1 waits,
which then makes the changes of `inside`. All of it is IPv4. The episode must not have
CAP_NET_ADMIN over its network namespace, or it could remove the unreachable routes again.
"""

import contextlib
import fcntl
import ipaddress
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Protocol

from tbench2_env.isolation import netfilter, userns
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.netfilter import LINK_LOCAL, find_program, network_of
from tbench2_env.isolation.netlink import LOOPBACK, RTN_LOCAL, Changes, Netlink

#: The name of the episode's interface, whoever makes it.
DEVICE = "eth0"
RESOLV_CONFS = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")

#: Only ends a wait for what never comes: a busy node may take seconds to start a program.
_READY_S = 10.0
_SAYS_IT = "no nameserver of the host's resolv.conf can be reached from an episode: names do not resolve there"


class Plug(Protocol):
    """One episode's connection. `pid` is a child of ours to be reaped, or None."""

    pid: int | None

    def unplug(self) -> None:
        """Give back what is on the host's side, without waiting; a second call does nothing."""


class Egress(Protocol):
    """A provider. `nameservers` belong into the episode's resolv.conf; `lacks` are sentences for the user.

    What is `unreachable` must be so from inside, see `inside`, for the provider would let it through.
    """

    name: str
    unreachable: Sequence[str]
    nameservers: tuple[str, ...]
    lacks: tuple[str, ...]

    def connect(self, pid: int) -> Plug:
        """Connect the network namespace of process `pid`, whose id maps are written. Raises: OSError."""

    def close(self) -> None:
        """Give back what the provider itself holds. Plugs are to be unplugged before."""


def inside(unreachable: Sequence[str]) -> Changes:
    """What every network namespace of an episode gets: its loopback, and networks that it must not reach."""
    changes = Changes()
    changes.set_up(LOOPBACK)
    for network in unreachable:
        address, prefix = network.split("/")
        changes.add_unreachable(address, int(prefix))
    return changes


def host_networks(link: Netlink) -> list[ipaddress.IPv4Network]:
    """Every address at which the host itself answers, but for its loopback."""
    found = {network_of(route) for route in link.routes() if route.type == RTN_LOCAL}
    return sorted(network for network in found if not network.is_loopback)


def usable_nameservers(files: Sequence[str], host: Sequence[ipaddress.IPv4Network]) -> tuple[str, ...]:
    """Those of the first of `files` that has any which an episode can reach: IPv4, and not the host itself."""
    for file in files:
        servers: list[str] = []
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
            servers = [line.split()[1] for line in lines if line.startswith("nameserver") and len(line.split()) > 1]
        usable = [server for server in servers if _is_elsewhere(server, host)]
        if usable:
            return tuple(usable)
    return ()


def _is_elsewhere(server: str, host: Sequence[ipaddress.IPv4Network]) -> bool:
    try:
        address = ipaddress.IPv4Address(server)
    except ValueError:
        return False
    unreachable = (*host, ipaddress.IPv4Network(LINK_LOCAL), ipaddress.IPv4Network("127.0.0.0/8"))
    return not any(address in network for network in unreachable)


# ---------------------------------------------------------------- veth
class VethPlug:
    """A /30 of the block: its first address is the host's end of the pair, its second the episode's."""

    pid: int | None = None

    def __init__(self, owner: "Veth", slot: int) -> None:
        self.owner, self.slot, self.name = owner, slot, f"{owner.claim.prefix}{slot}"
        first = owner.first_address + 4 * slot
        self.gateway, self.address = (socket.inet_ntoa(struct.pack("!I", first + n)) for n in (1, 2))

    def unplug(self) -> None:
        if self.owner.plugs.get(self.slot) is self:
            del self.owner.plugs[self.slot]
            # The pair vanishes with the episode's namespace. Deleting it costs the caller 25 ms.
            self.owner.free.append(self.slot)


class Veth:
    """A pair of interfaces per episode, and masquerading by one nftables table per server."""

    name = "veth"
    unreachable: Sequence[str] = ()

    def __init__(self, resolv_confs: Sequence[str] = RESOLV_CONFS) -> None:
        self.link = Netlink()
        try:
            # The first request that only CAP_NET_ADMIN may make; it changes nothing.
            self.link.set_up(LOOPBACK)
            netfilter.enable_forwarding()
            self.nameservers = usable_nameservers(resolv_confs, host_networks(self.link))
            self.lacks: tuple[str, ...] = () if self.nameservers else (_SAYS_IT,)
            self.claim = netfilter.claim_block(self.link)
        except OSError:
            self.link.close()
            raise
        self.first_address = int(self.claim.network.network_address)
        self.plugs: dict[int, VethPlug] = {}
        #: The longest unused first: its last interface is certainly gone.
        self.free = list(range(self.claim.network.num_addresses // 4))

    def connect(self, pid: int) -> Plug:
        if not self.free:
            raise OSError(f"all {len(self.plugs)} networks of {self.claim.network} are in use")
        slot = self.free.pop(0)
        plug = VethPlug(self, slot)
        self.plugs[slot] = plug
        try:
            self._add_pair(plug.name, pid)
            index = socket.if_nametoindex(plug.name)
            self.link.make(_end(index, plug.gateway))
            with _in_network_of(pid), Netlink() as there:
                episodes = _end(socket.if_nametoindex(DEVICE), plug.address)
                episodes.add_default_route(plug.gateway)
                there.make(episodes)
            self._wait_until_running(index)
        except OSError:
            plug.unplug()
            raise
        return plug

    def _wait_until_running(self, index: int) -> None:
        """Our end starts some time after both are up. What is sent before is lost, and costs the sender 1 s."""
        deadline = time.monotonic() + _READY_S
        while not self.link.is_running(index):
            if time.monotonic() > deadline:
                raise OSError(f"interface {index} did not start within {_READY_S:g} s")
            time.sleep(0.001)

    def _add_pair(self, name: str, pid: int) -> None:
        try:
            self.link.add_veth(name, DEVICE, pid)
        except FileExistsError:  # the namespace of an ended episode lives on
            self.link.delete_link(name)
            self.link.add_veth(name, DEVICE, pid)

    def close(self) -> None:
        for plug in list(self.plugs.values()):
            plug.unplug()
        self.claim.release()
        self.link.close()


def _end(index: int, address: str) -> Changes:
    """One end of a pair."""
    changes = Changes()
    changes.keep_from_ipv6(index)
    changes.add_address(index, address, 30)
    changes.set_up(index)
    return changes


@contextlib.contextmanager
def _in_network_of(pid: int) -> Iterator[None]:
    own, there = (os.open(f"/proc/{one}/ns/net", os.O_RDONLY | os.O_CLOEXEC) for one in ("self", pid))
    try:
        sc.setns(there, sc.CLONE_NEWNET)
        try:
            yield
        finally:
            sc.setns(own, sc.CLONE_NEWNET)
    finally:
        os.close(own)
        os.close(there)


# ---------------------------------------------------------------- a process per episode
class ProcessPlug:
    """A process that carries the packets of an episode."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        self.pidfd = os.pidfd_open(pid)

    def unplug(self) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1


class _PerProcess:
    """What slirp4netns and pasta share. `argv` gets the process id of the episode's PID 1.

    Of the program's descriptors, 3 is the ready pipe and 4 the episode's network namespace: pasta gives up the right
    to open that, which takes CAP_SYS_PTRACE, as forks of the spawner are not dumpable.
    """

    name: str

    def __init__(self, resolv_confs: Sequence[str] = RESOLV_CONFS) -> None:
        self.program = find_program(self.name)
        try:
            os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise OSError(
                error.errno, f"open(/dev/net/tun): {error.strerror} (load the module tun and make the device usable by "
                "the server's user: mode 0666 on the node, --device /dev/net/tun for a container)"
            ) from None  # fmt: skip
        with Netlink() as link:
            host = host_networks(link)
        # The programs connect from the host's own network: what is the host must be refused before it gets there.
        self.unreachable: Sequence[str] = [str(network) for network in (*host, LINK_LOCAL)]
        self.nameservers = self.find_nameservers(usable_nameservers(resolv_confs, host))
        self.lacks: tuple[str, ...] = () if self.nameservers else (_SAYS_IT,)

    def find_nameservers(self, of_host: tuple[str, ...]) -> tuple[str, ...]:
        return of_host

    def argv(self, pid: int) -> list[str]:
        raise NotImplementedError

    def connect(self, pid: int) -> Plug:
        ready, ready_inside = os.pipe2(os.O_CLOEXEC)
        log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            child = os.fork()
            if child == 0:
                _become_helper(self.program, self.argv(pid), (log, ready_inside), pid)
            os.close(ready_inside)
            plug = ProcessPlug(child)
            if not (select.select([ready], [], [], _READY_S)[0] and os.read(ready, 16)):
                plug.unplug()
                os.waitpid(child, 0)
                raise OSError(f"{self.name} did not connect the episode within {_READY_S:g} s: {_read_log(log)}")
            fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # nobody reads what it says from now on
        finally:
            os.close(ready)
            os.close(log)
        return plug

    def close(self) -> None:
        pass


def _read_log(log: int) -> str:
    return os.pread(log, 4096, 0).decode(errors="replace").strip().replace("\n", "; ") or "it gave no reason"


def _become_helper(program: str, argv: list[str], log_and_ready: tuple[int, int], of_pid: int) -> NoReturn:
    """In a fork: exec the program with the descriptors that `_PerProcess` tells of, and nothing else of ours."""
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        # pasta refuses to start where SIGPIPE is ignored, as Python has it.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        network = os.open(f"/proc/{of_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (null, null, *log_and_ready, network)]
        for number, fd in enumerate(parked):
            os.dup2(fd, number)
        os.closerange(len(parked), os.sysconf("SC_OPEN_MAX"))
        os.chdir("/")
        os.execve(program, argv, {})
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, str(error).encode())
    finally:
        # Whatever happened: a fork must never go on as a second spawner.
        os._exit(1)


class Slirp4netns(_PerProcess):
    name = "slirp4netns"

    def find_nameservers(self, of_host: tuple[str, ...]) -> tuple[str, ...]:
        return ("10.0.2.3",)  # it passes questions on to the host's own resolver, a loopback one too

    def argv(self, pid: int) -> list[str]:
        options = ["--configure", "--mtu=65520", "--disable-host-loopback", "--enable-sandbox", "--enable-seccomp"]
        return [self.name, *options, "--ready-fd=3", str(pid), DEVICE]


class Pasta(_PerProcess):
    name = "pasta"

    def argv(self, pid: int) -> list[str]:
        # By default it forwards ports both ways, maps the gateway to the host's loopback, and as root becomes nobody.
        closed = ["-t", "none", "-u", "none", "-T", "none", "-U", "none", "--no-map-gw"]
        # Not the host's own address and gateway, which it would copy.
        addresses = ["-4", "-a", "10.0.2.100", "-n", "24", "-g", "10.0.2.2", "-I", DEVICE, "--config-net", "--no-dhcp"]
        process = ["-f", "-e", "--runas", "0:0", "-P", "/proc/self/fd/3", "--netns", "/proc/self/fd/4"]
        return [self.name, *closed, *addresses, *process]


# ---------------------------------------------------------------- the choice
PROVIDERS: dict[str, Callable[[Sequence[str]], Egress]] = {
    Veth.name: Veth,
    Slirp4netns.name: Slirp4netns,
    Pasta.name: Pasta,
}


def find(
    names: Sequence[str] = tuple(PROVIDERS),
    resolv_confs: Sequence[str] = RESOLV_CONFS,
    *,
    in_user_namespace: bool = True,
) -> tuple[Egress | None, dict[str, str]]:
    """The first provider that connects a trial namespace, and for each before it the sentence why it does not.

    The trial's network belongs to a user namespace of its own if those of episodes do (`in_user_namespace`).
    For a process without children and without other threads.
    """
    refusals: dict[str, str] = {}
    for name in names:
        try:
            egress = PROVIDERS[name](resolv_confs)
            try:
                _try(egress, in_user_namespace)
            except OSError:
                egress.close()
                raise
            return egress, refusals
        except OSError as error:
            refusals[name] = error.strerror or str(error)
    return None, refusals


def _try(egress: Egress, in_user_namespace: bool) -> None:
    """Connect a namespace as an episode's is connected, and disconnect it. Raises: OSError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid, pidfd = sc.clone(sc.CLONE_NEWNET | (sc.CLONE_NEWUSER if in_user_namespace else 0))
        if pid == 0:
            _become_trial(theirs, egress.unreachable)
        try:
            if in_user_namespace:
                userns.write_maps("/proc", pid, "0 0 1\n")
            plug = egress.connect(pid)
            ours.send(b"\0")
            answer = ours.recv(4000).decode()
            plug.unplug()
            if plug.pid is not None:
                os.waitpid(plug.pid, 0)
            if answer != "ok":
                raise OSError(answer)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            os.waitpid(pid, 0)


def _become_trial(channel: socket.socket, unreachable: Sequence[str]) -> NoReturn:
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        channel.recv(1)
        with Netlink() as link:
            link.make(inside(unreachable))
        channel.send(b"ok")
        signal.pause()
    except BaseException as error:
        channel.send(str(error).encode())
    finally:
        os._exit(1)
