"""A server of a command's own: on a free port of the loopback, ended with the command, whatever ends that.

The command starts this module as a program. It asks the kernel for SIGTERM when the command dies, even by SIGKILL, and
then is the server.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tbench2_env import ServerGone, Tbench2HttpEnv
from tbench2_env.isolation import syscalls

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0
_TAIL_LINES = 20


class ServerFailed(Exception):
    """It did not start, or died; the text has the end of its log."""


@contextlib.asynccontextmanager
async def private_server(slots: int, token: str | None, log: Path) -> AsyncIterator[tuple[str, str]]:
    """A running server, with this process's variables: its URL and its token, a random one if `token` is None.

    Raises: ServerFailed, OSError when `log` cannot be written.
    """
    token = token or secrets.token_urlsafe()
    with _reserved_port() as port, log.open("wb") as output:
        # Everybody on this machine can reach the port, so there is always a token. The rest is passed on as it is.
        env = {**os.environ, "MAX_CONCURRENT_ENVS": str(slots), "TB2_AUTH_TOKEN": token}
        server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, str(os.getpid()), "--host", "127.0.0.1", "--port", str(port),
            env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C is for the command, which ends the server in its time
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            await _started(server, url, token, log)
            yield url, token
        except* ServerGone:
            raise ServerFailed(f"the private server is gone; the end of its log, {log}:\n{_tail(log)}") from None
        finally:
            await asyncio.shield(asyncio.ensure_future(_stop(server)))


async def _started(server: asyncio.subprocess.Process, url: str, token: str, log: Path) -> None:
    ready = asyncio.ensure_future(Tbench2HttpEnv(url, token=token).connect(retry_capacity_s=_START_TIMEOUT_S))
    exited = asyncio.ensure_future(server.wait())
    try:
        await asyncio.wait([ready, exited], return_when=asyncio.FIRST_COMPLETED)
        if exited.done() or ready.exception() is not None:
            raise ServerFailed(f"the private server did not start:\n{_tail(log)}")
    finally:
        for task in (ready, exited):
            task.cancel()
        await asyncio.wait([ready, exited])


async def _stop(server: asyncio.subprocess.Process) -> None:
    if server.returncode is None:
        server.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await server.wait()
    except TimeoutError:
        server.kill()  # its episodes die with it
        await server.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else gets: a socket that is bound but does not listen keeps it for who reuses addresses."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def _main() -> None:
    parent = int(sys.argv.pop(1))
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it could be asked for
        sys.exit(1)
    from tbench2_env.server import app

    app.main()


if __name__ == "__main__":
    _main()
