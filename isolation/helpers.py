"""Starting the helpers: one process, which `boot` goes on from."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from tbench2_env.isolation.spec import SpawnerConfig

# -I and -S keep site-packages out, and the stub packages keep the client's imports out: the spawner stays lean.
_BOOT = """
import sys, types
for name, path in (("tbench2_env", []), ("tbench2_env.isolation", [sys.argv[1]])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from tbench2_env.isolation.boot import main
main(sys.argv[2:])
"""


def start(config: SpawnerConfig) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """The process, and our ends of what it hears requests to the spawner and to the launcher on. Raises: OSError."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    theirs = [pair[1].fileno() for pair in pairs]
    arguments = [str(Path(__file__).parent), json.dumps(config.to_dict()), *map(str, theirs)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, *arguments],
        pass_fds=theirs, stdin=subprocess.DEVNULL, env={}, cwd="/",
    )  # fmt: skip
    for pair in pairs:
        pair[1].close()
    return process, pairs[0][0], pairs[1][0]
