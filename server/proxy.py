"""The server's side of the egress proxy, for episodes whose network has no other way out.

proxy = EgressProxy()
await proxy.add("episode-1", listener_fd, allowed_hosts=None)
await proxy.remove("episode-1")
await proxy.stop()
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tbench2_env.isolation.channel import Channel, ChannelClosed, close_all
from tbench2_env.isolation.spec import HOSTNAME, PROXY_PORT

_ANSWER_TIMEOUT_S = 30.0


class EgressError(Exception):
    """The egress proxy cannot be run, or did not answer."""


def proxy_env() -> dict[str, str]:
    """Variables that send an agent's or verifier's programs to the proxy, except for its own host."""
    proxy, own = f"http://127.0.0.1:{PROXY_PORT}", f"localhost,127.0.0.1,::1,0.0.0.0,{HOSTNAME}"
    variables = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": own}
    return variables | {name.upper(): value for name, value in variables.items()}


@dataclass(frozen=True)
class _Listener:
    fd: int
    allowed_hosts: tuple[str, ...] | None


class EgressProxy:
    """One proxy process for all episodes, started when the first needs it, and again should it die.

    It keeps a descriptor of each listener, and so the episode's network namespace, until `remove`.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}
        self._requests = itertools.count(1)
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        #: Whether the process has answered: one that dies before is not started again by itself.
        self._works = False

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._process is not None and self._process.poll() is None

    async def add(self, name: str, listener_fd: int, allowed_hosts: tuple[str, ...] | None) -> None:
        """Serve the connections to a listening TCP socket; the caller keeps its descriptor.

        `allowed_hosts` are as in `proxy_policy.Policy`. Raises: EgressError.
        """
        if name in self._listeners:
            raise EgressError(f"the egress proxy serves {name!r} already")
        fd = os.dup(listener_fd)
        try:
            if not self.alive:
                self._end()
                self._start()
        except BaseException:
            os.close(fd)
            raise
        self._listeners[name] = _Listener(fd, allowed_hosts)
        try:
            await self._ask(*self._addition(name))
        except BaseException:
            await self.remove(name)
            raise

    async def remove(self, name: str) -> None:
        """Close the episode's listener and all its connections. An episode that is unknown is no error."""
        listener = self._listeners.pop(name, None)
        if listener is None:
            return
        os.close(listener.fd)
        with contextlib.suppress(EgressError):  # with the process, its connections are gone
            await self._ask({"op": "remove", "name": name})

    async def stop(self) -> None:
        """End the process with all connections."""
        self._end()
        close_all([listener.fd for listener in self._listeners.values()])
        self._listeners.clear()

    def _start(self) -> None:
        """Start the process and hand it the live listeners. Raises: EgressError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel, self._works = Channel(ours), False
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tbench2_env.server.proxy_main", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/", start_new_session=True,
                    env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )  # fmt: skip
            except OSError as error:
                raise EgressError(f"the egress proxy cannot be started: {error}") from error
        asyncio.get_running_loop().add_reader(ours, self._receive)
        for name in self._listeners:
            self._post(*self._addition(name))

    def _addition(self, name: str) -> tuple[dict[str, Any], list[int]]:
        listener = self._listeners[name]
        return {"op": "add", "name": name, "allowed_hosts": listener.allowed_hosts}, [listener.fd]

    def _post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> int:
        if self._channel is None:
            raise EgressError("the egress proxy died")
        request = next(self._requests)
        try:
            self._channel.send({"id": request, **message}, fds)
        except (OSError, ChannelClosed) as error:
            raise EgressError(f"the egress proxy takes no requests: {error}") from error
        return request

    async def _ask(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        request = self._post(message, fds)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(answer, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise EgressError(f"the egress proxy did not {message['op']} within {_ANSWER_TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(request, None)

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            message, _ = self._channel.receive()
        except ChannelClosed:
            works = self._works
            self._end()
            if works and self._listeners:
                with contextlib.suppress(EgressError):  # `add` tries again and tells
                    self._start()
            return
        self._works = True
        answer = self._answers.get(message["id"])
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _end(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.sock)
            self._channel.sock.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EgressError("the egress proxy died"))
