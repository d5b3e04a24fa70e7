"""A process of its own that uses a store: make or lease a layer, say so on stdout, and wait for the end of stdin.

"eight" is eight processes at once, without the time that it takes to start seven more of these.
"""

import asyncio
import os
import sys
from pathlib import Path

from tbench2_env.server.images.store import Kind, Store


async def make(store: Store, layer_id: str, filled: Path, wait: bool) -> None:
    async def fill(folder: Path) -> None:
        (folder / "root").mkdir()
        (folder / "root/half").write_text("half")
        with filled.open("a") as log:
            log.write(f"{os.getpid()}\n")
        sys.stdout.write("filling\n")
        sys.stdout.flush()
        await (asyncio.to_thread(sys.stdin.read) if wait else asyncio.sleep(0.05))
        (folder / "root/whole").write_text("whole")

    made = await store.make(layer_id, fill)
    sys.stdout.write(f"{made}\n")


def main() -> None:
    folder, has_ids, act, layer_id, filled = sys.argv[1:]
    store = Store(Path(folder), Kind(0, has_ids == "True", "trusted" if has_ids == "True" else "user"))
    if act == "lease":
        with store.lease([layer_id]):
            sys.stdout.write("leased\n")
            sys.stdout.flush()
            sys.stdin.read()
    else:
        children = [] if act != "eight" or any(os.fork() == 0 for _ in range(7)) else range(7)
        asyncio.run(make(store, layer_id, Path(filled), wait=act == "stuck"))
        sys.stdout.flush()
        for _ in children:
            os.wait()


if __name__ == "__main__":
    main()
