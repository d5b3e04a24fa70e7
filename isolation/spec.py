"""What a rung, a sandbox and a command are, as plain data that travels as JSON between server and spawner."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

FIRST_SUBORDINATE_ID = 100_000
ID_COUNT = 65_536

#: Top-level folders of the node's root that an episode sees, copy-on-write. Everything else is hidden.
SYSTEM_FOLDERS = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "var", "srv"})
#: Folders that every episode has to itself, empty at first: path below the root -> mode.
PRIVATE_FOLDERS = {
    "tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "run/lock": 0o1777, "root": 0o700, "home": 0o755, "mnt": 0o755,
    "media": 0o755, "proc": 0o555, "sys": 0o555, "dev": 0o755, "tests": 0o755, "logs": 0o755, "logs/verifier": 0o755,
    "logs/toolchain": 0o755,
}  # fmt: skip
#: The episode's hostname is one for all, so that /etc/hosts can be part of the shared mask.
HOSTNAME = "tbench"


class Network(StrEnum):
    """Whose network an episode uses."""

    #: The node's own: ports are shared, and the node's services are within reach.
    HOST = "host"
    #: A loopback of its own and nothing else.
    PRIVATE = "private"
    #: Private, and a way out that does not lead to the host.
    EGRESS = "egress"
    #: Private, and on its loopback, at PROXY_PORT, an HTTP proxy whose connections are accepted outside.
    PROXY = "proxy"


PROXY_PORT = 3128


class _Data:
    """Dataclasses that travel as JSON objects with the same keys."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})

    def to_dict(self) -> dict[str, Any]:
        """To be encoded: `dataclasses.asdict` would copy all of it before."""
        return {key: value.to_dict() if isinstance(value, _Data) else value for key, value in vars(self).items()}


@dataclass(frozen=True)
class Rung(_Data):
    """One level of the isolation ladder: how the overlay, the ids and the base are made, and what that cannot give.

    `id_map` is (first id inside, first id outside, count), as one line of /proc/PID/uid_map. `overlay_options` are
    mount options of overlayfs without the layers. `idmapped` shifts the owners of the node's root by `id_map`.
    `user_namespaces`: an episode has two, the agent's below its own. `by_folder`: one overlay for each system folder,
    because the root as a whole cannot be a lower layer; the spawner is then in a user namespace that it made itself.
    `foreign`: the node's files belong to somebody who does not exist inside. `isolated` false: see `bare`.
    """

    name: str
    title: str
    id_map: tuple[int, int, int]
    overlay_options: tuple[str, ...]
    xattr_prefix: str
    lacks: tuple[str, ...] = ()
    idmapped: bool = False
    protect_proc_sys: bool = False
    user_namespaces: bool = True
    by_folder: bool = False
    foreign: bool = False
    isolated: bool = True

    @property
    def overlay_pairs(self) -> list[tuple[str, str | None]]:
        """`overlay_options` as `syscalls.mount_detached` takes them: a flag has no value."""
        split = (option.partition("=") for option in self.overlay_options)
        return [(key, value or None) for key, _, value in split]

    @property
    def has_id_range(self) -> bool:
        """Whether an episode has more than one id: only then can owners differ and groups be set."""
        return self.id_map[2] > 1

    @property
    def owner_shift(self) -> int:
        """What to add to an id inside an episode to get the id that owns the file on disk."""
        return self.id_map[1] if self.has_id_range else 0

    @property
    def caps_processes(self) -> bool:
        """Whether RLIMIT_NPROC holds: the kernel does not count the processes of its own root."""
        return self.id_map[1] != 0 or not self.has_id_range

    @property
    def map_line(self) -> str:
        return "{} {} {}\n".format(*self.id_map)

    @property
    def inner_map_line(self) -> str:
        """The map of the agent's user namespace inside the episode's: the same ids."""
        return f"0 0 {self.id_map[2]}\n"


_ROOT_OVERLAY = ("redirect_dir=on", "metacopy=on", "volatile")
_USER_OVERLAY = ("userxattr", "volatile")
_SAME_IDS, _ONE_ID = (0, 0, ID_COUNT), (0, 0, 1)
_UNCAPPED = "processes are not capped by RLIMIT_NPROC, which does not count those of the host's root"
_NO_OTHER_IDS = "one user id only: chown, su, sudo -u, useradd and sshd work as far as the container fakes them"
_NO_RENAME = "renaming a folder of the node's root is EXDEV (mv copies instead)"
_OOM_SCORE = "a process may take itself out of the reach of the host's OOM killer (oom_score_adj)"
_UNPRIVILEGED = (_NO_OTHER_IDS, _NO_RENAME, _OOM_SCORE)
_NOTHING = (
    "the agent works on the node's own files with the server's rights; what it changes stays, except what the server "
    "itself laid out for the task",
    "the agent can read tests/ and solution/ and write its own verdict",
    "the agent can signal every process that the server may signal, the server among them, read what they know, and "
    "reach every service of this node; what it starts by way of those outlives its episode",
    "no limit of memory, processes, CPU or storage is kept",
)
RUNGS = {
    rung.name: rung
    for rung in (
        Rung(
            "1", "root over a real filesystem, idmapped", (0, FIRST_SUBORDINATE_ID, ID_COUNT), _ROOT_OVERLAY,
            "trusted", idmapped=True,
        ),
        Rung(
            "2", "root over an overlay root, ids unshifted", _SAME_IDS, _ROOT_OVERLAY, "trusted", (_UNCAPPED,),
            protect_proc_sys=True,
        ),
        Rung(
            "3", "root without user namespaces", _SAME_IDS, _ROOT_OVERLAY, "trusted",
            (
                _UNCAPPED,
                "root inside is root outside, held by fewer capabilities (docker's without mknod), landlock and "
                "read-only mounts instead of a user namespace",
            ),
            protect_proc_sys=True, user_namespaces=False,
        ),
        Rung(
            "E", "root of a user namespace with a single id (enroot)", _ONE_ID, _USER_OVERLAY, "user", _UNPRIVILEGED,
        ),
        Rung(
            "4", "a user namespace of our own, over files of our own user", _ONE_ID, _USER_OVERLAY, "user",
            _UNPRIVILEGED, by_folder=True,
        ),
        Rung(
            "5", "a user namespace of our own, over files of somebody else", _ONE_ID, _USER_OVERLAY, "user",
            (
                *_UNPRIVILEGED,
                "the node's files belong to nobody inside: they can be replaced, but not changed in place or chmoded "
                "(/etc is a copy, of what this user may read)",
            ),
            by_folder=True, foreign=True,
        ),
        Rung(
            "none", "not isolated: one episode at a time on the node itself", _SAME_IDS, (), "", _NOTHING,
            user_namespaces=False, isolated=False,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Limits(_Data):
    """What one episode may use, all its processes together. None: as much as there is."""

    memory_bytes: int | None = None
    #: What its worktree holds, and how many files and folders.
    storage_bytes: int | None = None
    files_max: int | None = None
    processes_max: int | None = None
    cpus: float | None = None


@dataclass(frozen=True)
class SandboxSpec(_Data):
    """One sandbox: a worktree over `layers` over `stored` layers over the node's root, and what it may use.

    `name` is unique in the server's scratch folder. `layers` are names of folders made with `Spawner.layers`, the
    topmost first. `stored` are absolute paths of folders of the host, the topmost first: what overlayfs takes as lower
    layers (whiteouts, opaque folders), with owners shifted as the rung does. Not `over_node`: nothing of the node's
    root is below, they are all there is. `building`: its upper can become a stored layer, see `Sandbox.harvest`.
    """

    name: str
    layers: tuple[str, ...] = ()
    network: Network = Network.HOST
    limits: Limits = Limits()
    stored: tuple[str, ...] = ()
    over_node: bool = True
    building: bool = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        typed = {**data, "limits": Limits.from_dict(data.get("limits", {}))}
        return super().from_dict({**typed, "network": Network(data.get("network", Network.HOST))})


@dataclass(frozen=True)
class CommandSpec(_Data):
    """One program to start in a sandbox: the file `path` with `argv`, in `cwd`, which is made if it is missing.

    `path` is absolute, so that nothing an agent put on a PATH is ever run in its place. `tty` gives the program a
    terminal of its own instead of the passed descriptors. `ids` are the agent's user, group and further groups, root's
    if there are none; where an episode has one id only, it is that.
    """

    path: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    tty: bool = False
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cover(_Data):
    """A folder in which a verifier sees something else than the agent left there, and makes changes of its own.

    Of the entries named, those in `hidden` are not there, and those in `restored` are as they were before the agent.
    `blank` are files in whose place there are empty ones; with nothing else to do the folder itself is not covered.
    """

    folder: str
    hidden: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()


@dataclass(frozen=True)
class Provided(_Data):
    """A folder of the host, an absolute path, that a verifier alone sees, read-only, at `place` of the episode.

    Who owns its files there does not matter if everybody may read them: owners are as on the disk. With `writable` it
    can be written to, which changes nothing for anybody else and is gone with the verifier: a folder as `stored` ones
    of a `SandboxSpec` are. Without isolation there is no such thing.
    """

    folder: str
    place: str
    writable: bool = False


@dataclass(frozen=True)
class SpawnerConfig(_Data):
    """What the spawner is started with: a rung, candidates for the scratch folder and for the ways out of episodes'
    networks, best first, host paths to hide, and how nice episodes are to the node's other processes (0 to 19)."""

    rung: str
    scratch: tuple[str, ...]
    hide: tuple[str, ...] = ()
    egress: tuple[str, ...] = ()
    nice: int = 0


@dataclass(frozen=True)
class Usage:
    """What an episode has used so far, all its processes together; the peaks are of what was looked at.

    `cpu_s` leaves out processes that nobody waited for, unless a cgroup counts. `storage_bytes` and `files` are what
    its worktree holds.
    """

    memory_peak_bytes: int = 0
    cpu_s: float = 0.0
    processes_peak: int = 0
    storage_bytes: int = 0
    files: int = 0


@dataclass(frozen=True)
class Host:
    """What the spawner found out about this host, for people to read.

    `plan` is the mount plan of an episode, `enforcement` how each limit is kept, `egress` the way out of episodes'
    networks, if there is one, and `egress_refusals` why others are not to be had.
    """

    plan: list[str]
    hidden_mounts: list[str]
    signals_scoped: bool
    in_memory: bool
    enforcement: dict[str, str]
    no_cgroups: str
    egress: str | None
    egress_lacks: list[str]
    egress_refusals: dict[str, str]


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    message = json.loads(data)
    assert isinstance(message, dict)
    return message
