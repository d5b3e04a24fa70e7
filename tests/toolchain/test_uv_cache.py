"""The operator's warm uv cache: in the store once, and what verifiers make of it with the real uv."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.files import picture
from support.server import Server, idle_again
from support.tasks import make_task
from tbench2_env.server.images.store import Kind, LayerInUse, Store
from tbench2_env.server.toolchain.uv_cache import UvCache, Warm

from .conftest import TINY, make_wheel

ROOT = os.geteuid() == 0
KIND = Kind(0, True, "trusted") if ROOT else Kind(0, False, "user")
UV = Path(sysconfig.get_path("scripts"), "uv")
AT_ONCE = 16
SCRIPT = """\
PATH=/tests:$PATH
uv tool run --offline --default-index {index} -w answer==42 tiny --ctrf /logs/verifier/ctrf.json
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
echo $UV_CACHE_DIR; ls /logs/toolchain/mine; touch /logs/toolchain/mine
"""


# ---------------------------------------------------------------- in the store
@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "uv-cache/archive-v0").mkdir(parents=True)
    (tmp_path / "uv-cache/archive-v0/module.py").write_text("1\n")
    return Store(tmp_path / "store", KIND)


def uv_cache(store: Store, recheck_s: float = 0.0) -> UvCache:
    return UvCache(store.folder.parent.parent, store, recheck_s)


async def look(cache: UvCache) -> Warm:
    async with cache.held() as warm:
        assert warm is not None
        return warm


async def test_one_copy_is_made_of_what_the_folder_holds(store: Store) -> None:
    cache = uv_cache(store)
    found = await asyncio.gather(*(look(cache) for _ in range(4)))
    (copy,) = {warm.copy for warm in found}
    assert copy is not None
    assert picture(copy) == picture(cache.path)
    (cache.path / "new").touch()
    assert (await look(uv_cache(store, 30))).copy != copy
    assert len(store.usage()) == 2


async def test_it_is_looked_at_now_and_then(store: Store) -> None:
    cache = uv_cache(store, 30)
    first = await look(cache)
    (cache.path / "new").touch()
    assert await look(cache) == first


async def test_it_is_kept_while_a_verifier_has_it_and_made_again(store: Store) -> None:
    cache = uv_cache(store, 30)
    async with cache.held():
        (layer,) = store.usage()
        with pytest.raises(LayerInUse):
            store.remove([layer.id])
    store.remove([layer.id])
    copy = (await look(cache)).copy
    assert copy is not None
    assert (copy / "archive-v0/module.py").read_text() == "1\n"


async def test_a_damaged_copy_is_made_again(store: Store) -> None:
    copy = (await look(uv_cache(store))).copy
    assert copy is not None
    (copy / "archive-v0/module.py").write_text("2\n")
    assert (await look(uv_cache(Store(store.folder.parent, KIND)))).copy == copy
    assert (copy / "archive-v0/module.py").read_text() == "1\n"


async def test_why_it_cannot_be_used_is_said_and_not_asked_every_time(store: Store) -> None:
    cache, again = uv_cache(store, 30), uv_cache(store)
    store.folder.parent.mkdir()
    store.folder.touch()
    for each in (cache, again):
        warm = await look(each)
        assert warm.copy is None
        assert str(store.folder) in warm.why
    store.folder.unlink()
    assert (await look(cache)).copy is None
    assert (await look(again)).copy is not None


async def test_without_the_folder_there_is_none(tmp_path: Path) -> None:
    async with UvCache(tmp_path, Store(tmp_path / "store", KIND)).held() as warm:
        assert warm is None
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(not ROOT, reason="wants root")
def test_a_part_of_it_is_not_used(store: Store) -> None:
    """uv takes what is in its cache for complete."""
    folder = store.folder.parent.parent
    (folder / "uv-cache/archive-v0/module.py").chmod(0o600)
    for path in (folder, folder / "uv-cache"):
        path.chmod(0o755)
    store.folder.parent.mkdir()
    os.chown(store.folder.parent, 65534, 65534)
    script = (
        # Nobody may not be able to read the interpreter's own folder, from which executors are imported late.
        "import asyncio, concurrent.futures.thread, json, os; from pathlib import Path\n"
        "from tbench2_env.server.images.store import Kind, Store\n"
        "from tbench2_env.server.toolchain.uv_cache import UvCache\n"
        "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
        "async def look():\n"
        "    async with UvCache(Path(), Store(Path('store'), Kind(0, False, 'user'))).held() as warm:\n"
        "        print(json.dumps([warm.copy and str(warm.copy), warm.why]))\n"
        "asyncio.run(look())\n"
    )
    argv = [sys.executable, "-c", script]
    ran = subprocess.run(argv, cwd=folder, stdout=subprocess.PIPE, check=True, timeout=30)
    copy, why = json.loads(ran.stdout.splitlines()[-1])
    assert copy is None
    assert "1 files or folders of it cannot be read by the server: chmod -R a+rX it" in why


# ---------------------------------------------------------------- in episodes
class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A package index on loopback. When it is gone, a cache is all that is to be had of its packages."""
    console = {"/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n"}
    packages = {"tiny-1.0": {"tiny.py": TINY, **console}, "answer-42": {"answer.py": "ANSWER = 42\n"}}
    for package, files in packages.items():
        name, version = package.split("-")
        (folder / name).mkdir()
        make_wheel(folder / name, name, version, files)
        (wheel,) = (folder / name).iterdir()
        (folder / name / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the cache of a uv that ran once on the host, and no way out for episodes."""
    folder = tmp_path_factory.mktemp("warm")
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "UV_CACHE_DIR": str(folder / "cache/uv-cache")}
    with serving(tmp_path_factory.mktemp("index")) as index:
        run = [
            str(UV),
            "tool",
            "run",
            "--default-index",
            index,
            "-w",
            "answer==42",
            "tiny",
            "--ctrf",
            str(folder / "ctrf"),
        ]
        subprocess.run(run, env=env, capture_output=True, check=True, timeout=30)
    task = make_task(folder / "tasks", "warm", SCRIPT.format(index=index), files={"tests/uv": UV.read_bytes()})
    (task / "tests/uv").chmod(0o755)
    server = Server(folder, folder / "tasks", {"TB2_NETWORK": "private", "TB2_CACHE_DIR": str(folder / "cache")})
    with idle_again(server.start()):
        yield server
    assert server.stop() == 0


async def test_uv_runs_from_the_cache_and_what_it_adds_is_the_verifiers(warm_server: Server) -> None:
    cache = warm_server.folder / "cache/uv-cache"
    before = picture(cache)
    async with warm_server.client() as env:
        await env.reset(task_id="warm")
        for _ in range(2):
            verdict = await env.evaluate(keep=True)
            assert verdict.reward == 1, verdict.observation.output
            told = verdict.observation.info["verifier"]["toolchain"]
            assert told == {"used": "uv cache", "cache": str(cache)}
            assert "\n/logs/toolchain\n" in verdict.observation.output
            assert "cannot access '/logs/toolchain/mine'" in verdict.observation.output, "an earlier one's"
            seen = await env.exec("ls -A /logs/toolchain; env | grep UV_; find /logs /root /tmp -name 'archive-v*'")
            assert seen.output == "", "the agent sees nothing of it"
    assert picture(cache) == before


async def test_cold_uppers_at_once(warm_server: Server) -> None:
    async def evaluate() -> float | None:
        async with warm_server.client() as env:
            await env.reset(task_id="warm")
            return (await env.evaluate()).reward

    assert await asyncio.gather(*(evaluate() for _ in range(AT_ONCE))) == [1.0] * AT_ONCE
    copies = list(warm_server.folder.glob("cache/store/*/layers/base-*"))
    assert len(copies) == 1
