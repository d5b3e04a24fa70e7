"""The kit: a folder with uv, Pythons and wheels, made once by `prepare` and then only read.

TB2_CACHE_DIR/toolchain/<digest>/    one kit; in episodes it is PLACE
    manifest.json                    what is in it
    uv/{uv,uvx}                      as in uv's wheel
    bin/{uv,uvx,env}                 what test.sh finds as ~/.local/bin (`launchers`)
    python/X.Y/…                     Pythons (`relocate`)
    python/level-N/cpython-…/        the same as uv looks for them, for episodes with glibc 2.N or newer
    wheels/*.whl                     for uv
    index/<project>/index.html       the same wheels for pip (peps.python.org/pep-0503)
TB2_CACHE_DIR/toolchain/current      a link to the kit that counts
TB2_CACHE_DIR/toolchain/pool/        wheels of kits made before, which the next one need not fetch again
"""

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, ValidationError

from tbench2_env.server.toolchain.pins import Environment, Pins

#: Where a verifier sees the kit.
PLACE = "/logs/toolchain"
MANIFEST, CURRENT = "manifest.json", "current"
_DIGEST_LENGTH = 24
_FORMAT = 2


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Python(_Frozen):
    """A Python of a kit: see `relocate.Relocated`."""

    release: str
    glibc: int
    source: str
    lacks: tuple[str, ...] = ()


class Resolved(_Frozen):
    """Requirements that were resolved together for one Python ("3.13"), and the wheels they came to."""

    python: str
    requirements: tuple[str, ...]
    wheels: tuple[str, ...]


class Manifest(_Frozen):
    """What is in a kit. `wheels` gives each one's SHA-256; `problems` are what could not be had, a sentence each."""

    format: int = _FORMAT
    made: str
    uv: str
    machine: str
    loader: str | None
    pythons: dict[str, Python]
    wheels: dict[str, str]
    resolved: tuple[Resolved, ...]
    problems: tuple[str, ...] = ()

    @property
    def levels(self) -> list[int]:
        """What N of glibc 2.N makes a difference, in order; 0 stands for older ones."""
        return sorted({0, *(python.glibc for python in self.pythons.values())})

    def digest(self) -> str:
        """Names a kit by what is in it."""
        text = self.model_dump_json(exclude={"made", "problems"})
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


class Kit:
    """A kit that is complete on disk."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, cache_dir: Path) -> "Kit | None":
        """The current kit of a cache folder, if there is one for this machine."""
        with contextlib.suppress(OSError):
            return _open((folder_of(cache_dir) / CURRENT).resolve(strict=True))
        return None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises: OSError, ValueError."""
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        if manifest.format != _FORMAT or manifest.machine != os.uname().machine:
            raise ValueError(f"{folder}: made by another version of this program or for another kind of machine")
        return cls(folder, manifest)

    @property
    def digest(self) -> str:
        return self.folder.name

    def missing_pythons(self, pins: Pins) -> list[str]:
        return [version for version in pins.pythons if version not in self.manifest.pythons]

    def missing(self, environment: Environment) -> list[str]:
        """Requirements of an environment for which the kit has no wheels; empty if it has all of them.

        What was resolved together with others is there without them, too. pip's environments have the Python of the
        image, which nobody knows before: for them any of the kit's does.
        """
        pythons = set(self.manifest.pythons) if environment.python is None else {environment.python}
        return self.covers(environment.requirements, pythons)

    def covers(self, requirements: Sequence[str], pythons: Collection[str]) -> list[str]:
        """The requirements that were not resolved together for any of the Pythons; as few as can be."""
        wanted = {_canonical(word): word for word in requirements}
        lacking = [
            [word for name, word in wanted.items() if name not in set(map(_canonical, each.requirements))]
            for each in self.manifest.resolved
            if each.python in pythons
        ]
        return min(lacking, key=len, default=list(wanted.values()))

    def describe(self) -> dict[str, Any]:
        pythons = {version: python.release for version, python in self.manifest.pythons.items()}
        return {"kit": self.digest, "uv": self.manifest.uv, "pythons": pythons}


def folder_of(cache_dir: Path) -> Path:
    return cache_dir / "toolchain"


def publish(made: Path, manifest: Manifest) -> Kit:
    """Give a folder with all of a kit's parts its manifest and name, and make it the current one.

    The one before stays for the verifiers that have it; older ones go. Raises: OSError.
    """
    (made / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    parent, name = made.parent, manifest.digest()
    _settle(made)
    try:
        made.rename(parent / name)
    except OSError:
        if not (parent / name / MANIFEST).is_file():
            raise
        # The same one is there already; whoever made `made` removes it.
    before = (parent / CURRENT).resolve().name
    link = parent / f"{CURRENT}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.rename(parent / CURRENT)
    for manifest_path in parent.glob(f"*/{MANIFEST}"):
        if manifest_path.parent.name not in (name, before, made.name, CURRENT):
            shutil.rmtree(manifest_path.parent)
    return Kit.read(parent / name)


def _settle(folder: Path) -> None:
    """Readable for everybody, writable for nobody, and on disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o555 if path.stat().st_mode & 0o100 else 0o444)
    folder.chmod(0o755)
    os.sync()


@functools.lru_cache(maxsize=8)
def _open(folder: Path) -> Kit | None:
    """Kits do not change."""
    try:
        return Kit.read(folder)
    except (OSError, ValueError, ValidationError):
        return None


def _canonical(word: str) -> tuple[str, str, tuple[str, ...]]:
    requirement = Requirement(word)
    return canonicalize_name(requirement.name), str(requirement.specifier), tuple(sorted(requirement.extras))
