"""OpenEnv's WebSocket protocol on /ws: one connection is one session with at most one live episode.

A route of our own where upstream's falls short: the socket is watched while an action runs, so that a lost client ends
its episode at once, and it needs none of the 2,400 modules that importing openenv brings.
"""

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from tbench2_env.isolation.process import SandboxError
from tbench2_env.models import Tbench2Observation
from tbench2_env.server.ending import End
from tbench2_env.server.mcp import answer_json_rpc
from tbench2_env.server.pool import CapacityReached, Slot
from tbench2_env.server.services import Services
from tbench2_env.server.session import BadRequest, NoEpisode, Session
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import UnknownTask
from tbench2_env.server.wire import serialize

log = structlog.get_logger()
T = TypeVar("T")

#: Bytes of one message, as much as the client accepts in return.
MESSAGE_MAX_BYTES = 100 << 20
#: Characters that a client may send ahead of their answers. Whoever sends more is cut off: with its messages left in
#: the socket, the loss of the connection would go unnoticed.
_AHEAD_MAX = 2 * MESSAGE_MAX_BYTES
#: Seconds that a client who is turned away has for its first message.
_TURNED_AWAY_S = 1.0


class ClientGone(Exception):
    """The connection is lost or closed."""


def add_routes(app: FastAPI, services: Services) -> None:
    @app.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await _Connection(websocket, services, await _admit(services)).run()
        except CapacityReached as full:
            services.metrics.rejections.labels("capacity").inc()
            await _turn_away(websocket, full)


async def _turn_away(websocket: WebSocket, full: CapacityReached) -> None:
    """Say so and hang up, but not before the client asks something or a moment has passed: its library would answer a
    question on a closed connection with an exception of its own, and our reason would be read by nobody."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await websocket.send_text(_capacity_error(full))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(websocket.receive(), _TURNED_AWAY_S)
        await websocket.close()


async def _admit(services: Services) -> Slot | None:
    """A slot for a new connection. With a queue, one that finds none free waits at reset. Raises: CapacityReached."""
    if services.settings.queue_timeout_s <= 0:
        return await services.pool.acquire()
    try:
        return services.pool.take()
    except CapacityReached:
        return None


class _Connection:
    """One connection: the task that answers, and one that reads ahead and interrupts it when the client is gone."""

    def __init__(self, websocket: WebSocket, services: Services, slot: Slot | None) -> None:
        self._websocket = websocket
        self._session = Session(services, slot)
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self._ahead = 0
        self._gone = False
        self._interruptible: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Raises: CapacityReached when no slot came free for a reset; the connection is then of no use."""
        reader = asyncio.create_task(self._read())
        end = End.DISCONNECTED
        try:
            while (answer := await self._answer_next()) is not None:
                await self._unless_gone(self._websocket.send_text(answer))
            end = End.CLOSED
        except ClientGone:
            return
        finally:
            reader.cancel()
            # Whatever ends the connection ends its episode; a cancellation must not stop half-way.
            await asyncio.shield(asyncio.ensure_future(self._session.close(end)))
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.close()

    async def _read(self) -> None:
        """Ends when the client is gone."""
        try:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                while (text := await self._receive()) is not None:
                    self._messages.put_nowait(text)
        finally:
            self._gone = True
            if self._interruptible is not None:
                self._interruptible.cancel()

    async def _receive(self) -> str | None:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        if text is None:
            text = message.get("bytes", b"").decode(errors="replace")
        self._ahead += len(text)
        return None if self._ahead > _AHEAD_MAX else text

    async def _unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled at once when the client is gone. Raises: ClientGone."""
        if self._gone:
            work.close()
            raise ClientGone
        task = self._interruptible = asyncio.current_task()
        assert task is not None
        try:
            return await work
        except (WebSocketDisconnect, RuntimeError) as error:
            raise ClientGone from error
        except asyncio.CancelledError:
            if self._gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            self._interruptible = None

    async def _answer_next(self) -> str | None:
        """The answer to the next message; None when the client wants to close."""
        # What has come is answered even if the connection has ended since: a close message is a close, not a loss.
        queued = not self._messages.empty()
        text = self._messages.get_nowait() if queued else await self._unless_gone(self._messages.get())
        self._ahead -= len(text)
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            return _error("INVALID_JSON", f"Invalid JSON: {error}")
        if not isinstance(message, dict):
            return _error("INVALID_JSON", "Invalid JSON: a message is an object with a type")
        kind = message.get("type")
        if kind == "close":
            return None
        return await self._unless_gone(self._answer(kind, message.get("data")))

    async def _answer(self, kind: Any, data: Any) -> str:
        try:
            match kind:
                case "reset":
                    return _observation(await self._session.reset({} if data is None else data))
                case "step":
                    return _observation(await self._session.step(data))
                case "state":
                    return _frame("state", self._session.state.model_dump(mode="json"))
                case "mcp":
                    return _frame("mcp", answer_json_rpc(data))
            return _error("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:80]}")
        except BadRequest as error:
            return _error("VALIDATION_ERROR", str(error), errors=error.errors)
        except CapacityReached:
            raise
        except UnknownTask as error:
            return _error("VALIDATION_ERROR", str(error))
        except (NoEpisode, TaskError, SandboxError, OSError) as error:
            return _error("EXECUTION_ERROR", str(error))
        except Exception as error:
            log.exception("unexpected error", message_type=kind)
            return _error("EXECUTION_ERROR", f"{type(error).__name__}: {error}")


def _observation(observation: Tbench2Observation) -> str:
    return _frame("observation", serialize(observation))


def _capacity_error(full: CapacityReached) -> str:
    return _error("CAPACITY_REACHED", str(full), active_sessions=full.active, max_sessions=full.maximum)


def _frame(kind: str, data: dict[str, Any]) -> str:
    return json.dumps({"type": kind, "data": data})


def _error(code: str, message: str, **more: Any) -> str:
    return _frame("error", {"message": message, "code": code, **more})
