"""Measuring a tree: honest ones, hostile ones, and one that changes meanwhile."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tbench2_env.isolation.tree import Tree

from .child import drop_capabilities, in_own_process
from .rig import own_descriptors


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where removing a deep tree takes no time; the descriptors must be as before."""
    before = own_descriptors()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    assert own_descriptors() == before
    subprocess.run(["rm", "-rf", folder], check=True)  # shutil's recursion is not up to these


def measure(folder: Path) -> Tree:
    tree = Tree(str(folder))
    assert tree.advance(10)
    return tree


def test_it_agrees_with_du(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    shutil.copytree(Path(os.__file__).parent / "email", folder / "email")
    (folder / "big").write_bytes(bytes(3 << 20))
    (folder / "email/again").hardlink_to(folder / "big")
    (folder / "link").symlink_to("/usr")
    os.mkfifo(folder / "fifo")
    with open(folder / "sparse", "wb") as sparse:
        sparse.truncate(1 << 40)
    tree = measure(folder)
    du = subprocess.run(["du", "-s", "--block-size=512", folder], capture_output=True, text=True, check=True)
    assert tree.size == int(du.stdout.split()[0]) * 512 - folder.stat().st_blocks * 512
    assert tree.files == len(list(folder.rglob("*")))
    assert tree.unread == 0


def test_what_is_left_out_is_so_at_its_place_alone(folder: Path) -> None:
    for path in ("work/work/a", "work.usr/a", "tests/work/a", "tests/upper/work/a", "upper/work/a"):
        (folder / path).mkdir(parents=True)
    tree = Tree(str(folder), left_out=(b"work", b"tests/work"))
    assert tree.advance(10)
    assert tree.files == len(["work", "work.usr", "tests", "tests/work"]) + 3 + 3


def test_it_takes_what_it_is_given_and_goes_on_where_it_was(folder: Path) -> None:
    for outer in range(10):
        (folder / str(outer)).mkdir()
        for inner in range(500):
            (folder / str(outer) / str(inner)).touch()
    tree = Tree(str(folder))
    slices, cpu = [], []
    done = False
    while not done:
        begun, begun_cpu = time.monotonic(), time.thread_time()
        done = tree.advance(0.003)
        slices.append(time.monotonic() - begun)
        cpu.append(time.thread_time() - begun_cpu)
    assert tree.files == 10 * 501
    assert len(slices) > 3
    assert sorted(cpu)[len(cpu) // 2] < 0.01
    assert sum(slices) == pytest.approx(tree.took_s, abs=0.01)


def test_it_stops_once_a_limit_is_exceeded(folder: Path) -> None:
    for number in range(2000):
        (folder / str(number)).write_bytes(bytes(4096))
    tree = Tree(str(folder), files_max=500)
    assert tree.advance(10)
    assert tree.is_over
    assert 500 < tree.files < 1000
    tree = Tree(str(folder), size_max=1 << 20)
    assert tree.advance(10)
    assert tree.is_over
    assert 1 << 20 < tree.size < 2 << 20


def test_10_000_folders_deep_with_names_of_255_bytes(folder: Path) -> None:
    code = f"""
import os
os.chdir({str(folder)!r})
for _ in range(10_000):
    os.mkdir("x" * 255); os.chdir("x" * 255)
open("bottom", "w").write("x")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    tree = measure(folder)
    assert (tree.files, tree.unread) == (10_001, 0)
    assert len(own_descriptors()) < 30


def test_wide_and_deep_needs_a_descriptor_for_each_2_048_bytes_of_path_only(folder: Path) -> None:
    """Brothers at each level keep the open folders from being closed on the way down."""
    code = f"""
import os
os.chdir({str(folder)!r})
for _ in range(2_000):
    os.mkdir("a" * 255); os.mkdir("z" * 255); os.chdir("z" * 255)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1024
    tree = measure(folder)
    assert (tree.files, tree.unread) == (4_000, 0)


def test_names_that_are_no_text(folder: Path) -> None:
    (folder / os.fsdecode(b"\xff\xfe\n") / os.fsdecode(b"\x80")).mkdir(parents=True)
    assert measure(folder).files == 2


@in_own_process
def test_folders_that_may_not_be_read_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    (folder / "closed/below").mkdir(parents=True)
    (folder / "open").mkdir()
    (folder / "closed").chmod(0)
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if above.stat().st_uid == 0 and str(above).startswith("/tmp/"):
            above.chmod(0o755)
    drop_capabilities()
    tree = measure(folder)
    assert (tree.files, tree.unread) == (2, 1)


def test_a_folder_that_becomes_a_link_is_not_followed(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a/b").mkdir()
    tree = Tree(str(folder))
    assert not tree.advance(0), "the first folder has been listed, `a` is yet to be visited"
    assert tree.files == 1
    shutil.rmtree(folder / "a")
    (folder / "a").symlink_to("/usr")
    assert tree.advance(10)
    assert (tree.files, tree.unread) == (1, 1)


def test_a_tree_that_comes_and_goes_meanwhile(folder: Path) -> None:
    end = time.monotonic() + 1.5

    def change() -> None:
        while time.monotonic() < end:
            for number in range(100):
                (folder / f"{number}/x/y").mkdir(parents=True, exist_ok=True)
            for number in range(100):
                shutil.rmtree(folder / str(number), ignore_errors=True)

    thread = threading.Thread(target=change)
    thread.start()
    seen = [measure(folder).files for _ in iter(lambda: time.monotonic() < end, False)]
    thread.join()
    assert len(seen) > 10
    assert max(seen) <= 300
    assert measure(folder).files == 0
