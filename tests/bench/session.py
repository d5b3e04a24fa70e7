"""A light client: one WebSocket, frames made beforehand, and the clock stopped before an answer is read."""

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from bench.subject import BenchError

TASK = "ok"
MIB = 1 << 20


def _frame(kind: str, **data: Any) -> str:
    return json.dumps({"type": kind, "data": data})


def _step(action: str, **fields: Any) -> str:
    return _frame("step", action_type=action, **fields)


_RESET, _EVALUATE, _CLOSE = _frame("reset", task_id=TASK), _step("evaluate"), _step("close")
_TRUE, _SOLVE = _step("exec", command="true"), _step("exec", command="echo ok > out.txt")
#: A MiB of zeros from bash alone.
MIB_COMMAND = f"printf %0{MIB}d 0"
_OUTPUT = _step("exec", command=MIB_COMMAND)
_WRITE = _step("write_file", file_path="blob.txt", content="x" * MIB)


class Session:
    """The operations of the bench, each answering with the seconds it took. Raises: BenchError."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def _timed(self, frame: str) -> tuple[float, str]:
        begun = time.perf_counter()
        await self._socket.send(frame)
        answer = await self._socket.recv(decode=True)
        return time.perf_counter() - begun, answer

    async def _observe(self, frame: str) -> tuple[float, dict[str, Any]]:
        seconds, text = await self._timed(frame)
        answer = json.loads(text)
        data = answer["data"]
        if answer["type"] != "observation" or not data["observation"]["success"]:
            raise BenchError(f"{frame[:80]}: {text[:500]}")
        return seconds, data

    async def reset(self) -> float:
        return (await self._observe(_RESET))[0]

    async def true(self) -> float:
        return (await self._observe(_TRUE))[0]

    async def solve(self) -> float:
        return (await self._observe(_SOLVE))[0]

    async def output(self) -> float:
        """A MiB of it."""
        seconds, data = await self._observe(_OUTPUT)
        if (size := len(data["observation"]["output"])) < MIB:
            raise BenchError(f"of {MIB} characters of output {size} came")
        return seconds

    async def write(self) -> float:
        """A MiB into a file."""
        return (await self._observe(_WRITE))[0]

    async def run(self, command: str) -> float:
        """Raises also when it exits with another status than 0."""
        seconds, data = await self._observe(_step("exec", command=command))
        if data["observation"]["info"]["exit_code"] != 0:
            raise BenchError(f"{command}: {data['observation']['info']}")
        return seconds

    async def evaluate(self, reward: float) -> float:
        """Raises also when the verdict is another than `reward`."""
        seconds, data = await self._observe(_EVALUATE)
        if data["reward"] != reward:
            raise BenchError(f"a verdict of {data['reward']} instead of {reward}: {data['observation']}")
        return seconds

    async def close(self) -> float:
        """End the episode; the session goes on."""
        return (await self._observe(_CLOSE))[0]


@contextlib.asynccontextmanager
async def session(url: str) -> AsyncIterator[Session]:
    address = url.replace("http://", "ws://") + "/ws"
    async with connect(address, proxy=None, compression=None, ping_interval=None, max_size=None, open_timeout=60) as ws:
        yield Session(ws)
