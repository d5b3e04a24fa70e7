"""Fixtures: a spawner of the test's own, and after the test the proof that nothing is left of it."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tbench2_env.isolation import worktree

from .rig import Rig, own_descriptors
from .scene import Scene

StartRig = Callable[..., Awaitable[Rig]]
HostFolder = Callable[[str], Path]


@pytest.fixture
def host_folder() -> Iterator[HostFolder]:
    """Make a folder somewhere on the host, outside of /tmp: `host_folder("/opt")`; it holds a file `secret`."""
    made: list[Path] = []

    def make(parent: str) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="tbench2-test-", dir=parent)))
        made[-1].chmod(0o755)
        (made[-1] / "secret").write_text("host secret\n")
        return made[-1]

    yield make
    for folder in made:
        worktree.delete(str(folder))  # there may be folders in it that their owner may not enter
        assert not folder.exists()


@pytest.fixture
async def start_rig(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], host_folder: HostFolder
) -> AsyncIterator[StartRig]:
    """Start a spawner: `await start_rig(hide=[...], rung="2", scratch=folder)`. Folders of the host outlive it."""
    before = own_descriptors()
    async with AsyncExitStack() as stack:

        async def start(scratch: Path = tmp_path / "scratch", **options: Any) -> Rig:
            rig = await Rig.start(scratch, **options)
            stack.push_async_callback(rig.stop)
            return rig

        yield start
    assert len(own_descriptors()) == len(before), f"before {before} now {own_descriptors()}"
    assert capfd.readouterr().err == "", "a helper complained"


@pytest.fixture
async def rig(start_rig: StartRig) -> Rig:
    return await start_rig()


@pytest.fixture
async def scene(rig: Rig) -> AsyncIterator[Scene]:
    """A verifier in the middle of its work; after the test it finishes, and must have come to its own result."""
    scene = Scene(rig, await rig.create())
    await scene.start_verifier()
    yield scene
    await scene.finish()
