"""Making a kit, with the real uv, pip and patchelf, of the interpreter that runs this."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tbench2_env.server.toolchain import interpreters, kit, relocate
from tbench2_env.server.toolchain.interpreters import NoInterpreter
from tbench2_env.server.toolchain.prepare import CannotPrepare, Prepared, Step, prepare

from .conftest import SCRIPTS, VERSION


def test_what_is_in_it(prepared: Prepared) -> None:
    made = prepared.kit.manifest
    assert set(made.wheels) == {"tiny-1.0-py3-none-any.whl", "answer-42-py3-none-any.whl"}
    assert made.pythons[VERSION].release == sys.version.split()[0]
    uv = subprocess.run([prepared.kit.folder / "uv/uv", "--version"], capture_output=True, text=True, check=True)
    assert made.uv in uv.stdout
    assert all(path.stat().st_mode & 0o222 == 0 for path in prepared.kit.folder.glob("wheels/*"))


def test_what_could_not_be_had_is_said(prepared: Prepared) -> None:
    told = "\n".join(prepared.problems)
    assert "Python 3.99: not on this host, and uv cannot download it: give one with --python" in told
    assert f"Python {VERSION}, tiny==1.0 answer==43: ERROR: " in told
    assert "by-file: line 1: -r: this option names a file" in told


@pytest.mark.parametrize("kind", ["native", "own"])
def test_its_python_has_its_libraries(prepared: Prepared, kind: str) -> None:
    folder = prepared.kit.folder / "python" / VERSION
    code = "import ctypes, sqlite3, ssl, sys, zlib; print(sys.base_prefix)"
    command = relocate.on_host(folder, VERSION) if kind == "own" else [str(folder / "native" / f"python{VERSION}")]
    # `native` looks for its libraries where they are in an episode; here only the loader can be told of them.
    env = {"LD_LIBRARY_PATH": str(folder / "lib/kit")} if kind == "native" else {}
    done = subprocess.run([*command, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == str(folder)


@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="this Python is without headers"
)
def test_its_python_has_its_headers(prepared: Prepared) -> None:
    """Where those look for them that build extension modules: setup.py in tests."""
    for folder in (prepared.kit.folder / "python").glob(f"level-*/cpython-{VERSION}.*"):
        assert (folder / "include" / f"python{VERSION}" / "Python.h").is_file()


@pytest.mark.usefixtures("only_index")
def test_again_without_an_index(
    prepared: Prepared, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was fetched before an interruption is not fetched again, and what that left is swept."""
    parent = kit.folder_of(tmp_path)
    shutil.copytree(kit.folder_of(cache) / "pool", parent / "pool")
    (parent / "making-killed").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(parent))
    steps: list[Step] = []
    again = prepare(tmp_path, {"common": SCRIPTS["common"]}, [Path(sys.executable)], steps.append)
    assert set(again.kit.manifest.wheels) == set(prepared.kit.manifest.wheels)
    assert [(step.number, step.total) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    assert not list(parent.glob("making-*"))


@pytest.mark.usefixtures("only_index")
def test_without_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(CannotPrepare, match="uv: pip finds no wheel of it, nor is it on PATH"):
        prepare(tmp_path, SCRIPTS)
    assert kit.Kit.open(tmp_path) is None


@pytest.mark.usefixtures("only_index")
def test_what_is_given_must_be_a_python(tmp_path: Path) -> None:
    with pytest.raises(NoInterpreter, match="give a Python or a root filesystem"):
        prepare(tmp_path, {}, [tmp_path])
    (tmp_path / "python3.99").write_text("")
    with pytest.raises(NoInterpreter, match="does not run as a Python"):
        prepare(tmp_path, {}, [tmp_path / "python3.99"])


def test_the_python_behind_a_virtual_environment() -> None:
    found = interpreters.ask(Path(sys.executable))
    assert (found.version, found.library) == (VERSION, Path(sys.base_prefix, "lib", f"python{VERSION}"))


def test_links_of_a_root_filesystem_stay_in_it(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("/usr/lib")
    (tmp_path / "usr/lib/a").symlink_to("../../../../usr/lib/b")
    (tmp_path / "usr/lib/b").write_text("")
    assert interpreters.resolve(tmp_path, tmp_path / "lib/a") == tmp_path / "usr/lib/b"
