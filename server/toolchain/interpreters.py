"""Finding the Python interpreters that a kit is made with: given ones, uv's own, those of this host, pyenv's."""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tbench2_env.server.images import layer

_ASK_TIMEOUT_S = 20
_INSTALL_TIMEOUT_S = 300
#: Programs and libraries of root filesystems.
_BIN_FOLDERS = ("usr/local/bin", "usr/bin", "bin", "opt/python/bin")
#: What one needs to know of an interpreter to copy it. Answers for the one behind a venv or a shim.
_QUESTION = (
    "import json, sys, sysconfig; print(json.dumps([sys.version.split()[0], sys.base_prefix, "
    "getattr(sys, '_base_executable', sys.executable), sys.implementation.name]))"
)
_NAME = re.compile(r"^python(\d+\.\d+)$")
_RELEASE = re.compile(rb"(?<![\d.])(3\.\d{1,2}\.\d{1,2})(?:\+|rc\d+)?\x00")


class NoInterpreter(Exception):
    """What was given or found is no Python that can be copied; the text names it."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to copy. `version` is "3.13", `release` "3.13.5".

    `executable` and `library` (its lib/python3.13) are paths of this host; `root` is the root filesystem in which its
    shared libraries are looked for. `runs` says whether this host can run it as it is.
    """

    version: str
    release: str
    executable: Path
    library: Path
    root: Path
    runs: bool


def find(version: str, given: Sequence[Path], uv: Path) -> Interpreter | None:
    """A Python of this version: of the `given` ones (an executable, its prefix, a root filesystem), else one of this
    host, else one that `uv` has installed. None if there is none."""
    for path in given:
        if (found := _in_folder_or_file(path, version)) is not None:
            return found
    for executable in _of_host(version, uv):
        try:
            found = ask(executable)
        except NoInterpreter:
            continue
        if found.version == version:
            return found
    return None


def install(version: str, uv: Path, folder: Path) -> Interpreter | None:
    """Have `uv` download one into `folder`; None if it cannot."""
    command = [str(uv), "python", "install", "--no-bin", "--install-dir", str(folder), version]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return next((ask(each) for each in sorted(folder.glob(f"cpython-{version}.*/bin/python{version}"))), None)


def versions_of(given: Path) -> list[str]:
    """Versions of the interpreters in what an operator gave. Raises: NoInterpreter if there is none."""
    if given.is_file():
        return [ask(given).version]
    names = {entry.name for folder in _folders(given) if folder.is_dir() for entry in folder.iterdir()}
    found = sorted(match[1] for name in names if (match := _NAME.match(name)) is not None)
    if not found:
        raise NoInterpreter(f"{given}: no bin/python3.X or usr/bin/python3.X in it: give a Python or a root filesystem")
    return found


def ask(executable: Path) -> Interpreter:
    """The interpreter behind an executable of this host. Raises: NoInterpreter."""
    command = [str(executable), "-I", "-c", _QUESTION]
    try:
        # Elsewhere a .python-version or a pyvenv.cfg could decide which it is.
        with tempfile.TemporaryDirectory() as nowhere:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True, cwd=nowhere
            )
        release, prefix, base, implementation = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise NoInterpreter(f"{executable} does not run as a Python: {error}") from None
    version = ".".join(release.split(".")[:2])
    library, real = Path(prefix, "lib", f"python{version}"), Path(base).resolve()
    if implementation != "cpython" or not (library / "os.py").is_file():
        raise NoInterpreter(f"{executable}: not a CPython with its library in {library}")
    return Interpreter(version, release, real, library, Path("/"), runs=True)


def _of_host(version: str, uv: Path) -> Iterator[Path]:
    name = f"python{version}"
    command = [str(uv), "python", "find", "--no-python-downloads", "--no-project", "--system", version]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is not None and done.returncode == 0:
        yield Path(done.stdout.strip())
    found = shutil.which(name)
    if found is not None:
        yield Path(found)
        # pyenv's shims stand for the versions beside them, and refuse those that are not selected.
        shims = Path(found).parent
        if shims.name == "shims":
            yield from sorted(shims.parent.glob(f"versions/{version}.*/bin/{name}"), reverse=True)


# ---------------------------------------------------------------- folders, which may be of another system
def _in_folder_or_file(path: Path, version: str) -> Interpreter | None:
    """Raises: NoInterpreter for a file that is none."""
    if path.is_file():
        found = ask(path)
        return found if found.version == version else None
    is_root = _is_root(path)
    for folder in _folders(path):
        executable = folder / f"python{version}"
        if not executable.exists() and not executable.is_symlink():
            continue
        if not is_root:
            return ask(executable)
        return _in_root(path, executable, version)
    return None


def _folders(path: Path) -> list[Path]:
    return [path / name for name in _BIN_FOLDERS] if _is_root(path) else [path / "bin"]


def _is_root(path: Path) -> bool:
    return (path / "usr").is_dir() and (path / "etc").is_dir()


def _in_root(root: Path, executable: Path, version: str) -> Interpreter | None:
    real = resolve(root, executable)
    library = next(
        (each for each in (executable.parent.parent / "lib", root / "usr/lib", real.parent.parent / "lib")
         if resolve(root, each / f"python{version}/os.py").is_file()), None,
    )  # fmt: skip
    if library is None or not real.is_file():
        return None
    library = resolve(root, library / f"python{version}")
    return Interpreter(version, _release(real, library, version), real, library, root, runs=root == Path("/"))


def resolve(root: Path, path: Path) -> Path:
    """`path`, which is below `root`, with its links followed as they are followed inside of `root`."""
    try:
        return root / layer.resolve(layer.BaseView(root), str(path.relative_to(root))).lstrip("/")
    except OSError:  # links in a circle, or behind what may not be read: whoever opens it is told
        return path


def _release(executable: Path, library: Path, version: str) -> str:
    """Of a Python that cannot be run: its release stands in it, or in its libpython, as a string."""
    for path in (executable, *library.parent.glob(f"libpython{version}.so.*")):
        with path.open("rb") as file:
            for match in _RELEASE.finditer(file.read()):
                if match[1].decode().startswith(f"{version}."):
                    return match[1].decode()
    return f"{version}.0"
