"""Files in and out of an episode, streamed through a command inside it, so that its own rights and paths apply."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from tbench2_env.isolation.process import Process, SandboxError
from tbench2_env.isolation.spec import CommandSpec
from tbench2_env.server.episode import Episode
from tbench2_env.server.output import open_pipe
from tbench2_env.server.session import BadRequest

PATH_MAX = 4096
_CHUNK = 1 << 18
_EXIT_TIMEOUT_S = 5.0
#: Written beside the target and renamed once the server has said (on descriptor 4) that all of it came: a broken upload
#: leaves the old file and nothing else.
_RECEIVE = """
[ -d "$1" ] && { echo 'is a folder'; exit 1; }
case $1 in */*) mkdir -p -- "${1%/*}" || exit 1 ;; esac
part=$(mktemp -- "$1.XXXXXX") || exit 1
cat <&3 >"$part" && read -r whole <&4 && chmod 644 -- "$part" && mv -T -- "$part" "$1" && exit 0
rm -f -- "$part"; exit 1
"""
_SEND = """
[ -e "$1" ] || { echo 'there is no such file' >&2; exit 1; }
[ -f "$1" ] || { echo 'is not a regular file' >&2; exit 1; }
exec cat -- "$1"
"""


class FileRefused(BadRequest):
    """The file cannot be read or written there; the text says why."""


def check_path(path: str) -> str:
    """Raises: BadRequest."""
    if not path or "\0" in path or len(path.encode()) > PATH_MAX or path.endswith("/"):
        raise BadRequest(f"path: give a file's name of 1 to {PATH_MAX} bytes, without NUL and no / at its end")
    return path


class _Pipes:
    """Descriptors by role, each closed once, whatever happens."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        ends = open_pipe()
        self._open.update(ends)
        return ends

    def null(self) -> int:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._open.add(fd)
        return fd

    def close(self, *fds: int) -> None:
        """Close these, or all that are left."""
        for fd in self._open & set(fds) if fds else set(self._open):
            self._open.discard(fd)
            os.close(fd)


async def receive(episode: Episode, path: str, chunks: AsyncIterator[bytes]) -> int:
    """Write a stream to `path` in the episode; the number of bytes. Raises: BadRequest, EpisodeEnded, SandboxError."""
    pipes = _Pipes()
    with episode.transfer():
        try:
            data, said, whole, null = pipes.pipe(), pipes.pipe(), pipes.pipe(), pipes.null()
            process = episode.start_file_command(
                _command(_RECEIVE, path, episode), (null, said[1], said[1], data[0], whole[0])
            )
            pipes.close(null, said[1], data[0], whole[0])
            try:
                size = await _pump(chunks, data[1], process)
                pipes.close(data[1])
                await _confirm(whole[1], process)
            finally:
                pipes.close(data[1], whole[1])
                # Without a confirmation the command removes what came so far.
                await asyncio.shield(asyncio.ensure_future(_end(process)))
            if process.exited.result() != 0:
                episode.check_live()
                raise FileRefused(f"path {path[:200]}: {_said(said[0]) or 'cannot be written'}")
        finally:
            pipes.close()
    return size


async def _confirm(whole: int, process: Process) -> None:
    if not process.exited.done():
        with contextlib.suppress(BrokenPipeError):
            os.write(whole, b"whole\n")
        await asyncio.wait([process.exited], timeout=_EXIT_TIMEOUT_S)


async def _end(process: Process) -> None:
    """Let the command end by itself, which takes a moment, or else kill it."""
    await asyncio.wait([process.exited], timeout=_EXIT_TIMEOUT_S)
    process.kill()
    await asyncio.wait([process.exited])


async def _pump(chunks: AsyncIterator[bytes], write_end: int, process: Process) -> int:
    """Feed the pipe as fast as it is read, until the stream or the process ends."""
    os.set_blocking(write_end, False)
    size = 0
    async for chunk in chunks:
        view = memoryview(chunk)
        size += len(view)
        while view:
            if process.exited.done():
                return size
            try:
                view = view[os.write(write_end, view) :]
            except BlockingIOError:
                await _ready(write_end, process, write=True)
            except BrokenPipeError:
                return size
    return size


async def send(episode: Episode, path: str) -> AsyncIterator[bytes]:
    """The content of a regular file of the episode, in chunks; the first is read already, so errors come at once.

    Raises: BadRequest, EpisodeEnded, SandboxError; the last also later, when the file breaks off.
    """
    chunks = _read_file(episode, path)
    first = await anext(chunks)
    return _prepend(first, chunks)


async def _prepend(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


async def _read_file(episode: Episode, path: str) -> AsyncGenerator[bytes, None]:
    """Yields at least once, perhaps nothing."""
    pipes = _Pipes()
    with episode.transfer():
        try:
            data, said, null = pipes.pipe(), pipes.pipe(), pipes.null()
            process = episode.start_file_command(_command(_SEND, path, episode), (null, data[1], said[1]))
            pipes.close(null, data[1], said[1])
            try:
                size = 0
                async for chunk in _read_all(data[0], process):
                    size += len(chunk)
                    yield chunk
                await asyncio.wait([process.exited], timeout=_EXIT_TIMEOUT_S)
            finally:
                process.kill()
            if not process.exited.done() or process.exited.result() != 0:
                episode.check_live()
                if size:
                    raise SandboxError(f"path {path[:200]}: the file broke off after {size} bytes")
                raise FileRefused(f"path {path[:200]}: {_said(said[0]) or 'cannot be read'}")
            if not size:
                yield b""
        finally:
            pipes.close()


async def _read_all(read_end: int, process: Process) -> AsyncIterator[bytes]:
    os.set_blocking(read_end, False)
    while True:
        try:
            chunk = os.read(read_end, _CHUNK)
        except BlockingIOError:
            await _ready(read_end, process, write=False)
            continue
        if not chunk:
            return
        yield chunk
        # A fast client takes every chunk at once; others want their turn.
        await asyncio.sleep(0)


async def _ready(fd: int, process: Process, *, write: bool) -> None:
    """Wait until the pipe can be used, or the process is gone."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        waiting: list[asyncio.Future[Any]] = [ready, process.exited] if write else [ready]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        remove(fd)


def _command(script: str, path: str, episode: Episode) -> CommandSpec:
    return episode.caller.bash("-c", script, "file", path)


def _said(fd: int) -> str:
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096).decode(errors="replace").strip()
    return ""
