"""Builds one task again and again, each time in a fork of this process, which has imported all that it takes.

Arguments are settings as JSON and the task's folder. For every line on stdin it forks; a fork prints its process id
when it begins and `built`, the number of layers and the digest, or the error, when it ends.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tbench2_env.server.engine import start_engine
from tbench2_env.server.proxy import EgressProxy
from tbench2_env.server.settings import Settings
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import Task


async def build(given: dict[str, Any], task: Path) -> str:
    proxy = EgressProxy()
    engine, _ = await start_engine(Settings(**given), proxy)
    try:
        environment = (await engine.snapshots.get(Task(task.name, task))).environment
        return f"built {len(environment.layers)} {environment.digest}"
    except TaskError as error:
        return str(error)
    finally:
        await engine.stop()
        await proxy.stop()


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that ends is no zombie
    for _ in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            say(str(os.getpid()))
            with Path(os.devnull).open("w") as log, contextlib.redirect_stdout(log):
                said = asyncio.run(build(json.loads(sys.argv[1]), Path(sys.argv[2])))
            say(said)
            os._exit(0)


if __name__ == "__main__":
    main()
