"""What layers are compressed with, told by their first bytes: media types and names are not always right."""

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import IO, Protocol

_CHUNK = 1 << 20
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", re.DOTALL)  # and the start of a block, or the end
_MAGIC_BYTES = 10
#: What a decompressor raises for data that is broken or cut off; bz2 has an OSError without a number.
BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class ArchiveError(ValueError):
    """A layer's archive is broken, cut off, or asks for what no layer may have."""


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


@contextlib.contextmanager
def decompressed(stream: Readable) -> Iterator[io.BufferedIOBase]:
    """The content of `stream`, which is gzip, zstd, xz, bzip2 or none of them; to be read to its end.

    Raises: ArchiveError, when it ends, for zstd; otherwise reads raise one of `BROKEN`.
    """
    head = b""
    while len(head) < _MAGIC_BYTES and (more := stream.read(_MAGIC_BYTES - len(head))):
        head += more
    whole = io.BufferedReader(_Rewound(head, stream), _CHUNK)
    if head.startswith(b"\x1f\x8b"):
        yield gzip.GzipFile(fileobj=whole, mode="rb")
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        with _zstd(whole) as content:
            yield content
    elif head.startswith(b"\xfd7zXZ\x00"):
        yield lzma.LZMAFile(whole)  # noqa: SIM115 - the file below is the caller's
    elif _BZIP2.match(head):
        yield bz2.BZ2File(whole)
    else:
        yield whole


class _Rewound(io.RawIOBase):
    """`stream`, of which `head` was read already."""

    def __init__(self, head: bytes, stream: Readable) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        data = self._head[: len(buffer)] or self._stream.read(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


def _zstd(stream: io.BufferedIOBase) -> contextlib.AbstractContextManager[io.BufferedIOBase]:
    """By the package zstandard or the program zstd: Python has it since 3.14 only."""
    with contextlib.suppress(ImportError):
        return _zstd_by_package(importlib.import_module("zstandard"), stream)
    if program := shutil.which("zstd"):
        return _zstd_by_program(program, stream)
    raise ArchiveError("it is compressed with zstd: install the program zstd, or the Python package zstandard")


@contextlib.contextmanager
def _zstd_by_package(zstandard: ModuleType, stream: io.BufferedIOBase) -> Iterator[io.BufferedIOBase]:
    try:
        with zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=False) as reader:
            yield io.BufferedReader(reader, _CHUNK)
    except zstandard.ZstdError as error:
        raise ArchiveError(f"broken zstd data: {error}") from None


@contextlib.contextmanager
def _zstd_by_program(program: str, stream: io.BufferedIOBase) -> Iterator[io.BufferedIOBase]:
    pipe, argv = subprocess.PIPE, [program, "--decompress", "--stdout", "--quiet"]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        feeder = _Feeder(stream, process.stdin)
        try:
            yield io.BufferedReader(process.stdout)  # type: ignore[type-var]
            complaint = process.stderr.read().decode(errors="replace").strip()
            process.wait()
        finally:
            process.kill()
            feeder.join()
            if feeder.error:  # rather than what came of it
                raise feeder.error
    if process.returncode:
        raise ArchiveError(f"broken zstd data: {complaint or process.returncode}")


class _Feeder(threading.Thread):
    """Copies a stream into a program's standard input. `error` is what reading the stream raised."""

    def __init__(self, stream: io.BufferedIOBase, target: IO[bytes]) -> None:
        super().__init__(daemon=True, name="zstd")
        self._stream, self._target = stream, target
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._target:
            try:
                shutil.copyfileobj(self._stream, self._target, _CHUNK)
            except BrokenPipeError:
                raise
            except BaseException as error:  # for the thread that reads what comes out
                self.error = error
