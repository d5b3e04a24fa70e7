"""A sandbox as the spawner knows it, and what is done to all of its processes from outside."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from tbench2_env.isolation import processes
from tbench2_env.isolation.provisions import Provision
from tbench2_env.isolation.spec import Network, Rung, SandboxSpec


@dataclass
class Episode:
    """`pid` is its PID 1, in the host's numbering."""

    spec: SandboxSpec
    pid: int
    pidfd: int
    created_by: int
    provision: Provision
    channel: socket.socket | None = None
    destroyed_by: int | None = None
    #: What it had used when it was destroyed, as it is answered; None until it is known. A harvest has none.
    used: dict[str, Any] | None = field(default_factory=dict)
    #: Its PID 1 has ended and it is only kept until `used` is known.
    ended: bool = False
    #: Where its upper is to be once nothing runs in it any more.
    harvest_to: str | None = None
    #: Why it was killed, if the warden did it.
    reason: str = "its PID 1 was killed"
    proc: int = -1
    #: Made ahead: nothing runs in it and nobody watches it before it is adopted.
    idle: bool = False
    #: Descriptors of PID 1's, for the launcher, as long as it does not know the episode.
    for_launcher: dict[str, int] = field(default_factory=dict)
    #: Inode of the namespace, of the kind that tells agents from verifiers here, that the agent's processes live in.
    agents: int = -1

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kinds(self) -> list[str]:
        """The namespaces of the episode that whoever enters it joins, besides the user namespace."""
        return ["pid", "mnt", "ipc", "uts", *([] if self.spec.network is Network.HOST else ["net"])]

    def open_namespace(self, kind: str) -> int:
        return os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)

    def hits(self) -> dict[str, int]:
        """How often it met a limit that its cgroup keeps."""
        return {} if self.provision.leaf is None else self.provision.leaf.hits()

    def kill(self) -> None:
        """Killing PID 1 kills all of its namespace."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def kill_verifiers(self, rung: Rung) -> None:
        """Kill all that verifiers left in the episode: whatever is neither the agent's nor PID 1."""
        with contextlib.suppress(OSError):
            if rung.user_namespaces:
                own = os.stat(f"/proc/{self.pid}/ns/user").st_ino
                wanted = processes.in_user_namespace(self.proc, own, but_not=self.agents)
            else:
                # Only verifiers may make mount namespaces, and each has one of its own.
                wanted = processes.in_other_mount_namespace(self.proc, self.agents)
            processes.kill_where(self.proc, wanted)
