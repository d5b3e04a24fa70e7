"""Running a command line in a sandbox: bash fed by descriptor, empty stdin, a time limit, bounded output."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tbench2_env.isolation.process import Process
from tbench2_env.isolation.spec import CommandSpec
from tbench2_env.server.output import Capture, Reader, open_pipe

BASH = "/bin/bash"
#: Where the command line is read from. By descriptor, so that neither its length (execve takes 128 KiB in one
#: argument) nor its quotes matter, and nobody's argv holds it: `pkill -f` must not find the shell that runs it.
#: `eval` keeps bash's own error messages ("bash: line 1: ..."). With a trap for it, useless otherwise, bash says of a
#: killed child "Killed", as a terminal does, and does not repeat the whole command line.
_READ_AND_RUN = 'read -rd "" -u 3; exec 3<&-; trap : KILL; eval "$REPLY"'
_READ_AND_WRITE = 'case $1 in */*) mkdir -p -- "${1%/*}" ;; esac && cat <&3 >"$1"'
#: Exit code of a command that was killed by signal n is 128 + n, as in a shell.
_SIGNAL_BASE = 128

_CLEAN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
}


def environment(*layers: Mapping[str, str]) -> dict[str, str]:
    """A command's whole environment: a fixed list and what the task sets; nothing of the server's own."""
    merged = dict(_CLEAN_ENV)
    for layer in layers:
        merged.update(layer)
    return merged


@dataclass(frozen=True)
class Caller:
    """Where, with which variables and as whom (`CommandSpec.ids`) an agent's commands run."""

    cwd: str
    env: dict[str, str]
    ids: tuple[int, ...] = ()

    def bash(self, *arguments: str, tty: bool = False) -> CommandSpec:
        return CommandSpec(BASH, ("bash", *arguments), self.cwd, self.env, tty, self.ids)

    def script(self, *, tty: bool = False) -> CommandSpec:
        """bash that runs the script on its descriptor 3."""
        return self.bash("-c", _READ_AND_RUN, tty=tty)

    def interactive(self) -> CommandSpec:
        return self.bash("-i", tty=True)

    def write(self, path: str) -> CommandSpec:
        """A command that writes its descriptor 3 to `path`, making the folders above it."""
        return self.bash("-c", _READ_AND_WRITE, "write_file", path)


@contextlib.contextmanager
def in_memory(data: bytes, name: str) -> Iterator[int]:
    """A descriptor to read `data` from."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Result:
    """How a command went. `exit_code` is 128 + n after signal n; `output_bytes` counts what it printed in all."""

    output: str
    exit_code: int
    timed_out: bool
    seconds: float
    output_bytes: int


class Runner:
    """Runs commands one by one, and keeps the pipes of their background children open until it is closed."""

    def __init__(self, output_limit_bytes: int) -> None:
        self._limit = output_limit_bytes
        self._readers: list[Reader] = []

    async def run(self, start: Callable[[Sequence[int]], Process], timeout_s: float, *extra_fds: int) -> Result:
        """Run what `start` starts with (stdin, stdout, stderr, *extra_fds), at most `timeout_s` seconds.

        Returns when the command itself ends, whoever still holds its output. At the time limit, or when cancelled, its
        whole tree is killed. Raises: SandboxError.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        capture = Capture(self._limit)
        reader, process = self._start(start, extra_fds, capture)
        try:
            timed_out = await _wait(process, timeout_s)
            status = await process.wait()
        finally:
            process.kill()
            reader.finish()
            self._forget_closed()
        exit_code = status if status >= 0 else _SIGNAL_BASE - status
        return Result(capture.text(), exit_code, timed_out, loop.time() - begun, capture.total)

    def _start(
        self, start: Callable[[Sequence[int]], Process], extra_fds: Sequence[int], capture: Capture
    ) -> tuple[Reader, Process]:
        read_end, write_end = open_pipe()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            process = start((null, write_end, write_end, *extra_fds))
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(null)
            os.close(write_end)
        reader = Reader(read_end, capture.feed)
        self._readers.append(reader)
        return reader, process

    def _forget_closed(self) -> None:
        self._readers = [reader for reader in self._readers if not reader.closed]

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers.clear()


async def _wait(process: Process, timeout_s: float) -> bool:
    """Whether the time ran out; the process is then killed."""
    done, _ = await asyncio.wait([process.exited], timeout=timeout_s)
    if not done:
        process.kill()
    return not done
