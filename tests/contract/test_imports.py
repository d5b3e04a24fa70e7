"""What an import costs and drags in, and what an installed client needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import Server

_REPOSITORY = Path(__file__).resolve().parents[2]
_HEAVY = ["openenv", "gradio", "fastmcp", "fastapi", "uvicorn", "starlette", "git", "structlog", "pydantic_settings"]
_ROUNDS = 5
#: Seconds on a quiet host, and on a busy one how much more than the libraries alone.
_IMPORT_LIMIT_S, _IMPORT_FACTOR = 0.4, 2.0


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter."""
    program = (
        f"{statement}; import json, sys; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def best_seconds(statement: str) -> float:
    program = f"import time; begun = time.perf_counter(); {statement}; print(time.perf_counter() - begun)"
    argv = [sys.executable, "-c", program]
    return min(float(subprocess.run(argv, capture_output=True, check=True).stdout) for _ in range(_ROUNDS))


def test_importing_the_client_loads_nothing_heavy() -> None:
    loaded = loaded_after("import tbench2_env")
    assert {"pydantic", "websockets"} <= loaded
    assert not loaded & set(_HEAVY)


def test_importing_the_client_is_quick() -> None:
    libraries = best_seconds("import pydantic, websockets.asyncio.client")
    assert best_seconds("import tbench2_env") < max(_IMPORT_LIMIT_S, _IMPORT_FACTOR * libraries)


def test_importing_the_server_does_without_openenv() -> None:
    loaded = loaded_after("import tbench2_env.server.app")
    assert {"fastapi", "uvicorn", "structlog"} <= loaded
    assert not loaded & {"openenv", "gradio", "fastmcp"}


# ------------------------------------------------------------ installed beside an inference image
_EPISODE = """
import asyncio, sys
from tbench2_env import Tbench2Action, Tbench2Env

async def main():
    async with Tbench2Env(base_url=sys.argv[1]) as env:
        await env.reset(task_id="ok")
        await env.step(Tbench2Action(action_type="write_file", file_path="out.txt", content="ok"))
        print((await env.step(Tbench2Action(action_type="evaluate"))).reward)

asyncio.run(main())
with Tbench2Env(base_url=sys.argv[1]).sync() as env:
    print(env.reset(task_id="ok").observation.task_id)
"""
_IMAGE = ["pydantic", "pydantic_core", "annotated_types", "typing_extensions.py", "typing_inspection", "websockets"]


def copy_work_tree(target: Path) -> Path:
    """The files that git knows or would take, as they are now: no build folder, no caches."""
    command = ["git", "-C", str(_REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0"):
        source = _REPOSITORY / name
        if name and not name.startswith("tests/") and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def test_an_installed_client_needs_only_pydantic_and_websockets(server: Server, tmp_path: Path) -> None:
    site = tmp_path / "client-site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*install, "--target", str(site), str(copy_work_tree(tmp_path / "tree"))], capture_output=True, text=True
    )
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip's isolated build needs setuptools from an index, and none is in reach")
    assert done.returncode == 0, done.stderr
    assert (site / "tbench2_env" / "py.typed").is_file()

    # An image's packages without ours: of this virtual environment, just these.
    image = tmp_path / "image"
    image.mkdir()
    installed = Path(next(path for path in sys.path if path.endswith("site-packages")))
    for name in _IMAGE:
        (image / name).symlink_to(installed / name)
    played = subprocess.run(
        [sys.executable, "-S", "-c", _EPISODE, server.url],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{site}:{image}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (played.returncode, played.stdout) == (0, "1.0\nok\n"), played.stderr
