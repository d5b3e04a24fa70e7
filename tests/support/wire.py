"""The WebSocket protocol spoken by hand: frames that the client would never send, connections that break."""

import json
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect

from support.server import Server


class Wire:
    """One raw connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    @classmethod
    async def open(cls, server: Server) -> "Wire":
        return cls(await connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None, max_size=None))

    async def send(self, kind: str, data: Any = None) -> None:
        await self.socket.send(json.dumps({"type": kind, "data": data}))

    async def exec(self, command: str) -> None:
        await self.send("step", {"command": command})

    async def receive(self) -> dict[str, Any]:
        message = json.loads(await self.socket.recv())
        assert isinstance(message, dict)
        return message

    async def ask(self, frame: str | bytes) -> dict[str, Any]:
        await self.socket.send(frame)
        return await self.receive()

    async def reset(self, task_id: str = "ok") -> dict[str, Any]:
        await self.send("reset", {"task_id": task_id})
        return await self.receive()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.socket.close()

    def drop(self) -> None:
        """Lose the connection as a killed client does: no close frame."""
        self.socket.transport.abort()
