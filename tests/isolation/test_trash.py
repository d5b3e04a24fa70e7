"""What is discarded is deleted in the background, and so that it does not pile up."""

import asyncio
from pathlib import Path

import pytest

from tbench2_env.isolation import trash
from tbench2_env.isolation.trash import Trash

from .rig import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A scratch folder with forty worktrees in its trash."""
    for number in range(40):
        (tmp_path / f"trash/{number}/upper").mkdir(parents=True)
        for name in range(20):
            (tmp_path / f"trash/{number}/upper/{name}").touch()
    return tmp_path


async def test_who_makes_a_new_one_waits_while_the_trash_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trash, "_FULL", 3)
    cleaner = Trash(folder)
    await asyncio.wait_for(cleaner.room(), 1)
    cleaner.delete_soon()
    await until(lambda: len(list((folder / "trash").iterdir())) < 40, 5)
    await cleaner.room()
    assert len(list((folder / "trash").iterdir())) <= 4
    await until(lambda: not list((folder / "trash").iterdir()), 5)
    cleaner.close()


async def test_closing_ends_it_early(folder: Path) -> None:
    cleaner = Trash(folder)
    cleaner.delete_soon()
    await until(lambda: len(list((folder / "trash").iterdir())) < 40, 5)
    cleaner.close()
    left = len(list((folder / "trash").iterdir()))
    await asyncio.sleep(0.1)
    assert len(list((folder / "trash").iterdir())) == left
