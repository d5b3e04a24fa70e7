"""The blocking variants of the clients: the same calls on an event loop of their own."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from tbench2_env.models import StepResult, Tbench2Action, Tbench2Observation, Tbench2State

if TYPE_CHECKING:
    from tbench2_env.base import BaseTbench2Env
    from tbench2_env.http import Tbench2HttpEnv

T = TypeVar("T")


class SyncTbench2Env:
    """What `sync()` of a client returns: a context manager with the client's methods, blocking.

        with Tbench2Env(base_url="http://localhost:8003").sync() as env:
            env.reset(task_id="hello-world")
            print(env.exec("ls -la").output)

    The calls run in a thread, so this also works where an event loop is already running (a notebook), which then
    waits. Each method takes, returns and raises what the async one does.
    """

    def __init__(self, env: "BaseTbench2Env") -> None:
        self._env = env
        self._thread: _LoopThread | None = None
        self._lock = threading.Lock()

    def connect(self, retry_capacity_s: float | None = None) -> Self:
        self._run(self._env.connect(retry_capacity_s))
        return self

    def reset(self, **kwargs: Any) -> StepResult[Tbench2Observation]:
        return self._run(self._env.reset(**kwargs))

    def step(self, action: Tbench2Action, **kwargs: Any) -> StepResult[Tbench2Observation]:
        return self._run(self._env.step(action, **kwargs))

    def exec(self, command: str, *, session_id: str | None = None, block: bool = True) -> Tbench2Observation:
        return self._run(self._env.exec(command, session_id=session_id, block=block))

    def write_file(self, file_path: str, content: str) -> Tbench2Observation:
        return self._run(self._env.write_file(file_path, content))

    def evaluate(self, *, keep: bool = False) -> StepResult[Tbench2Observation]:
        return self._run(self._env.evaluate(keep=keep))

    def state(self) -> Tbench2State:
        return self._run(self._env.state())

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            try:
                _result(thread.submit(self._env.close()))
            finally:
                thread.stop()

    def __enter__(self) -> Self:
        try:
            return self.connect()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        # Submitted under the lock: `close` in another thread must find the call on the loop, or not stop that loop.
        with self._lock:
            self._thread = self._thread or _LoopThread()
            future = self._thread.submit(call)
        return _result(future)


class SyncTbench2HttpEnv(SyncTbench2Env):
    """What `Tbench2HttpEnv.sync()` returns: the methods of `Tbench2HttpEnv`, blocking."""

    def __init__(self, env: "Tbench2HttpEnv") -> None:
        super().__init__(env)
        self._http = env

    def exec(
        self, command: str, *, session_id: str | None = None, block: bool = True, timeout_s: float | None = None
    ) -> Tbench2Observation:
        return self._run(self._http.exec(command, session_id=session_id, block=block, timeout_s=timeout_s))

    def upload(self, path: str, data: bytes | BinaryIO | Path) -> None:
        self._run(self._http.upload(path, data))

    def download(self, path: str) -> bytes:
        return self._run(self._http.download(path))

    def download_to(self, path: str, file: BinaryIO) -> None:
        self._run(self._http.download_to(path, file))


class _LoopThread:
    """An event loop in a daemon thread, from construction until `stop`."""

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_run_loop, args=(started,), name="tbench2-env-sync", daemon=True)
        self._thread.start()
        self._loop, self._stopping = started.result()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C ends the wait here; without this the call would go on over there.
        raise


def _run_loop(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    async def until_stopped() -> None:
        stopping = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stopping))
        await stopping.wait()

    asyncio.run(until_stopped())
