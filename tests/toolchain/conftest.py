"""Fixtures: a kit made of this interpreter, the uv of the development tools and wheels made here; no network."""

import base64
import ensurepip
import hashlib
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from filelock import FileLock

from tbench2_env.server.toolchain.kit import Kit
from tbench2_env.server.toolchain.prepare import Prepared, prepare

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
#: A tool that writes a CTRF report, as pytest-json-ctrf does.
TINY = """
import pathlib, sys

def main():
    import answer
    report = '{"results": {"tests": [{"name": "t", "status": "passed"}]}}'
    pathlib.Path(sys.argv[sys.argv.index("--ctrf") + 1]).write_text(report)
    print("python", sys.version.split()[0], sys.base_prefix, answer.ANSWER)
"""
SCRIPT = f"""\
curl -LsSf https://astral.invalid/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx \\
  -p {VERSION} \\
  -w tiny==1.0 \\
  -w answer==42 \\
  tiny --ctrf /logs/verifier/ctrf.json
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
SCRIPTS = {
    "common": SCRIPT,
    "after-apt": f"apt-get update\n{SCRIPT}",
    "by-pip": "pip install answer==42",
    "no-wheel": SCRIPT.replace("answer==42", "answer==43"),
    "no-python": SCRIPT.replace(f"-p {VERSION}", "-p 3.99"),
    "by-file": "pip install -r requirements.txt",
}


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    """A pure wheel (packaging.python.org, "binary distribution format")."""
    info = f"{name}-{version}.dist-info"
    whole = {
        **{path if "/" not in path else f"{info}{path}": text for path, text in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in whole.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**whole, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels: all that pip gets here."""
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder, "tiny", "1.0", {"tiny.py": TINY, "/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n"})
    make_wheel(folder, "answer", "42", {"answer.py": "ANSWER = 42\n"})
    for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"):
        shutil.copy(wheel, folder)
    return folder


@pytest.fixture
def only_index(monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    _configure(monkeypatch, index)


def _configure(patch: pytest.MonkeyPatch, index: Path) -> None:
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(index))
    patch.setenv("PATH", sysconfig.get_path("scripts"), prepend=":")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Of all workers of this run: to make the kit takes seconds."""
    own = tmp_path_factory.getbasetemp()
    return (own if worker_id == "master" else own.parent) / "toolchain-cache"


@pytest.fixture(scope="session")
def prepared(cache: Path, index: Path) -> Prepared:
    """A kit for SCRIPTS in `cache`."""
    with FileLock(cache.with_suffix(".lock")), pytest.MonkeyPatch.context() as patch:
        if (made := Kit.open(cache)) is not None:
            return Prepared(made, made.manifest.problems)
        _configure(patch, index)
        return prepare(cache, SCRIPTS, [Path(sys.executable)])
