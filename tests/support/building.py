"""Building in the test's own process: an engine, tasks to build, and a look into what came of them."""

import contextlib
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from support.server import descendants, eventually
from support.tasks import make_task
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Limits, Network, SandboxSpec
from tbench2_env.server import shell
from tbench2_env.server.engine import Engine, start_engine
from tbench2_env.server.images.store import Store
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.settings import Settings
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.tasks import Task

_OUTPUT_LIMIT_BYTES = 1 << 20
_COMMAND_TIMEOUT_S = 20.0


def settings_of(folder: Path, tiny: Path, **more: Any) -> Settings:
    """Of a server below `folder` whose images called tiny are the rootfs `tiny`; it builds, and lets nobody out."""
    given = {
        "output_dir": folder / "runs", "own_cache_dir": folder / "cache", "scratch_dir": folder / "scratch",
        "bases": f"tiny*={tiny}", "registry": "none", "network": "private", "environment": "build",
    }  # fmt: skip
    return Settings(**{**given, **more})


class Workshop:
    """A running engine, and the tasks that are made for it in `folder`/tasks."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.engine = folder, engine

    @property
    def store(self) -> Store:
        return self.engine.environments.store

    def task(self, dockerfile: str, files: Mapping[str, str | bytes] = {}, *, name: str = "t", toml: str = "") -> Task:
        """The task `name`, made or changed; `files` are in its environment/."""
        return Task(name, write_task(self.folder / "tasks", name, dockerfile, files, toml=toml))

    async def build(self, dockerfile: str, files: Mapping[str, str | bytes] = {}, **more: Any) -> Snapshot:
        return await self.engine.snapshots.get(self.task(dockerfile, files, **more))

    async def open(self, snapshot: Snapshot) -> Sandbox:
        """A new episode of it, without the server's part. The layers must be leased while it lives."""
        environment = snapshot.environment
        stored = self.engine.environments.folders(environment)
        spec = SandboxSpec(
            uuid.uuid4().hex, (snapshot.name,), Network.PRIVATE, Limits(), stored, environment.over_node
        )  # fmt: skip
        return await self.engine.spawner.create(spec)

    async def run(self, snapshot: Snapshot, script: str) -> list[str]:
        """The lines that `script` prints in a new episode of it, run as the agent's commands are."""
        account = snapshot.environment.account
        env = shell.environment({"HOME": account.home}, snapshot.env)
        caller = shell.Caller(snapshot.workdir, env, account.ids)
        with (
            self.engine.environments.lease(snapshot.environment),
            shell.in_memory(script.encode(), "script") as content,
        ):
            sandbox = await self.open(snapshot)
            runner = shell.Runner(_OUTPUT_LIMIT_BYTES)
            try:
                result = await runner.run(lambda fds: sandbox.start(caller.script(), fds), _COMMAND_TIMEOUT_S, content)
            finally:
                runner.close()
                await sandbox.destroy()
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    async def built(self, dockerfile: str, script: str, files: Mapping[str, str | bytes] = {}) -> list[str]:
        """`build`, then `run`."""
        return await self.run(await self.build(dockerfile, files), script)

    def assert_idle(self) -> None:
        """Nothing is left of builds: process, worktree, mount, lock, half a layer."""
        spawner = self.engine.spawner
        pid = spawner._process.pid
        eventually(lambda: len(descendants(pid)) <= 2, 3, lambda: f"processes left: {descendants(pid)}")
        eventually(lambda: not list((spawner.folder / "episodes").iterdir()), 3, lambda: "worktrees left")
        assert leftovers(self.store) == []
        assert str(self.folder) not in Path("/proc/self/mountinfo").read_text(), "a mount leaked into the host"


class Builders:
    """Processes that build `task`, and can be killed; see `support.builder`."""

    def __init__(self, settings: Settings, task: Task) -> None:
        # -P: support/git.py is not the module git.
        script = str(Path(__file__).with_name("builder.py"))
        argv = [sys.executable, "-P", script, settings.model_dump_json(), str(task.path)]
        self._process = subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self) -> int:
        """The process id of one more; nobody else may have something to say meanwhile."""
        self._begin()
        return int(self._hear())

    def start_together(self, count: int) -> list[str]:
        """What so many say at their end."""
        for _ in range(count):
            self._begin()
        return [line for line in (self._hear() for _ in range(2 * count)) if not line.isdigit()]

    def _begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def leftovers(store: Store) -> list[str]:
    """What is in the store that only belongs there while something is made."""
    return [str(path) for name in ("making", "locks") for path in (store.folder / name).glob("*")]


@contextlib.asynccontextmanager
async def workshop(settings: Settings, folder: Path) -> AsyncIterator[Workshop]:
    proxy = EgressProxy()
    engine, _ = await start_engine(settings, proxy)
    try:
        yield Workshop(folder, engine)
    finally:
        await engine.stop()
        await proxy.stop()


def write_task(folder: Path, name: str, dockerfile: str, files: Mapping[str, str | bytes] = {}, **more: Any) -> Path:
    """`make_task`, with `files` in environment/; its Dockerfile begins with FROM tiny unless it says otherwise."""
    text = dockerfile if dockerfile.lstrip().upper().startswith(("FROM", "ARG")) else f"FROM tiny\n{dockerfile}"
    inside = {f"environment/{path}": content for path, content in files.items()}
    return make_task(folder, name, dockerfile=text, files=inside, **more)


class Ledger:
    """Where RUN lines report what they do, over the loopback of a build that has the host's network.

    A line that reports the word `holds` is answered only by `let_go`.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._held: list[socket.socket] = []
        self.holds = ""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def run(self, word: str, then: str = "true") -> str:
        """A RUN line that reports `word` and waits for the answer; wants bash."""
        port = self._listener.getsockname()[1]
        script = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo {word} >&3; read -u 3; exec 3>&-; {then}"
        return f'RUN ["bash", "-c", "{script}"]\n'

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                word = connection.recv(100).decode().strip()
                self.lines.append(word)
                if word == self.holds:
                    self._held.append(connection)
                    continue
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"go on\n")

    def let_go(self) -> None:
        """Answer all that wait; who was killed meanwhile is no error."""
        held, self._held = self._held, []
        for each in held:
            with each, contextlib.suppress(OSError):
                each.sendall(b"go on\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.let_go()


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    made = Ledger()
    try:
        yield made
    finally:
        made.close()
