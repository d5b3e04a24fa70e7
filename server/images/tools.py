"""Programs of the host, run beside the event loop, that never outlive whoever waits for them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """How a program ended; `code` is negative for a signal, as in `subprocess`."""

    code: int
    stdout: bytes
    stderr: str


async def run_tool(argv: Sequence[str], timeout_s: float | None = None) -> Ran:
    """Run `argv` in a session of its own and take what it writes; killed with all it started when this is cancelled.

    Raises:
        TimeoutError: after `timeout_s`; it is killed then, too.
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()  # reaps it and closes the pipes
    return Ran(process.returncode or 0, stdout, stderr.decode(errors="replace"))
