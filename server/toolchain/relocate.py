"""Copying a Python into a kit so that it runs at the kit's place in any episode, whatever that has for a C library.

Of one Python there are two executables. `native` uses the episode's own loader and C library, and for all else that
Python itself needs (libssl, libffi, ...) the kit's copies. `own` uses the kit's loader and C library, too: for episodes
whose C library is older than what this Python was built with. It is only for those: programs and libraries of an
episode work with a newer C library, never with an older one, and a wheel may load any of them (libstdc++, libGL).

Both find the kit's libraries by an rpath (DT_RPATH, not RUNPATH: it counts for what libraries load, too; ld.so(8)), so
nothing is set in the environment that the programs which a test starts would inherit.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tbench2_env.server.toolchain.interpreters import Interpreter, NoInterpreter, resolve

#: Parts of the library that no test needs: large, or of this host only.
_LEFT_OUT = frozenset(
    ["test", "idlelib", "tkinter", "turtledemo", "site-packages", "dist-packages", "__pycache__", "EXTERNALLY-MANAGED"]
)
#: The C library's own parts, which belong to its loader.
_LIBC = re.compile(
    r"^(?:ld-linux.*|libc|libm|libdl|libpthread|librt|libutil|libresolv|libmvec|libnss_\w+)\.so(?:\.\d+)*$"
)
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)\x00")
_SEARCHED = ("lib/{}", "usr/lib/{}", "lib64", "usr/lib64", "lib", "usr/lib", "usr/local/lib")
_ELF = b"\x7fELF"
_TIMEOUT_S = 60
_ESSENTIAL = ("_ssl", "_ctypes", "_sqlite3", "_hashlib", "zlib", "_bz2", "_lzma")


@dataclass(frozen=True)
class Relocated:
    """A Python of a kit. `glibc` is the least 2.N with which `native` runs; `loader` the path of an episode's loader.

    `lacks` are modules of its library that were left out, because libraries of theirs are not there.
    """

    version: str
    release: str
    glibc: int
    loader: str
    lacks: tuple[str, ...]


def relocate(source: Interpreter, target: Path, place: str, patchelf: Path) -> Relocated:
    """Copy `source` to the folder `target`, which is `place` in episodes:

    lib/pythonX.Y, include/pythonX.Y, lib/kit (its shared libraries), lib/libc (C library and loader),
    native/pythonX.Y, own/pythonX.Y.
    Raises: NoInterpreter if it cannot be copied.
    """
    return _Relocation(source, target, place, patchelf).run()


def on_host(target: Path, version: str) -> list[str]:
    """The command line that runs a relocated Python on this host, whatever C library that has."""
    libc, executable = target / "lib/libc", target / "own" / f"python{version}"
    loader = next(libc.glob("ld-linux*"))
    return [
        str(loader), "--library-path", f"{libc}:{target / 'lib/kit'}", "--argv0", str(executable), str(executable)
    ]  # fmt: skip


class _Relocation:
    def __init__(self, source: Interpreter, target: Path, place: str, patchelf: Path) -> None:
        self._source, self._target, self._place, self._patchelf = source, target, place, patchelf
        self._libraries, self._libc = target / "lib/kit", target / "lib/libc"
        self._lacks: list[str] = []

    def run(self) -> Relocated:
        source, name = self._source, f"python{self._source.version}"
        loader = self._patch("--print-interpreter", source.executable)
        self._copy_tree(self._source.library, self._target / "lib" / name)
        self._copy_headers(self._target / "include" / name)
        self._libraries.mkdir()
        self._libc.mkdir()
        self._gather(loader)
        # Where a library has a DT_RUNPATH of its own, the executable's rpath does not count for it.
        for library in [*self._extensions(), *self._libraries.iterdir()]:
            if self._patch("--print-rpath", library):
                self._patch("--remove-rpath", library)
        for kind in ("native", "own"):
            (self._target / kind).mkdir()
            shutil.copyfile(source.executable, self._target / kind / name)
            (self._target / kind / name).chmod(0o755)
        kit, libc = f"{self._place}/lib/kit", f"{self._place}/lib/libc"
        self._set(f"native/{name}", kit)
        self._set(f"own/{name}", f"{libc}:{kit}", f"{libc}/{Path(loader).name}")
        essential = [module for module in self._lacks if module in _ESSENTIAL]
        if essential:
            raise NoInterpreter(f"{source.executable}: shared libraries of {', '.join(essential)} are not there")
        return Relocated(source.version, source.release, self._glibc_needed(), loader, tuple(self._lacks))

    # ------------------------------------------------------------ its own files
    def _copy_tree(self, source: Path, target: Path) -> None:
        """Links are followed: Debian's point to /etc and beyond."""
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name in _LEFT_OUT or entry.name.startswith("config-") or entry.suffix == ".a":
                continue
            path = resolve(self._source.root, entry)
            if path.is_dir():
                self._copy_tree(path, target / entry.name)
            elif path.is_file():
                shutil.copyfile(path, target / entry.name)

    def _copy_headers(self, target: Path) -> None:
        """Some tests build extension modules. Debian has headers in packages of their own, and in /usr/include/MACHINE
        the true pyconfig.h, which the one beside Python.h includes by that path."""
        includes = self._source.library.parent.parent / "include"
        headers = resolve(self._source.root, includes / target.name)
        if not headers.is_dir():
            target.mkdir(parents=True)
            return
        self._copy_tree(headers, target)
        config = resolve(self._source.root, includes / f"{os.uname().machine}-linux-gnu" / target.name / "pyconfig.h")
        if config.is_file():
            shutil.copyfile(config, target / config.name)

    def _glibc_needed(self) -> int:
        files = [self._source.executable, *self._extensions(), *self._libraries.iterdir()]
        found = {int(match[1]) for file in files for match in _GLIBC.finditer(file.read_bytes())}
        return max(found, default=17)

    def _extensions(self) -> list[Path]:
        return sorted((self._target / "lib").glob("python*/lib-dynload/*.so"))

    # ------------------------------------------------------------ its libraries
    def _gather(self, loader: str) -> None:
        """Copy all that it loads; an extension whose libraries are not there goes."""
        real = resolve(self._source.root, self._source.root / loader.lstrip("/"))
        shutil.copyfile(real, self._libc / Path(loader).name)
        (self._libc / Path(loader).name).chmod(0o755)
        missing = self._copy_needed(self._source.executable, self._source.executable.parent)
        if missing:
            raise NoInterpreter(f"{self._source.executable}: {missing} is not there, which it needs")
        for extension in self._extensions():
            original = self._source.library / "lib-dynload" / extension.name
            if self._copy_needed(original, original.parent):
                extension.unlink()
                self._lacks.append(extension.name.partition(".")[0])
        # Loaded by name when threads end or names are looked up.
        for name in ("libgcc_s.so.1", "libresolv.so.2"):
            self._copy_one(name, [])

    def _copy_needed(self, file: Path, origin: Path) -> str | None:
        """Copy what `file` needs, and what that needs; answers with the name of one that is not there."""
        rpath = [part.replace("$ORIGIN", str(origin)) for part in self._patch("--print-rpath", file).split(":") if part]
        folders = [Path(part) for part in rpath]
        for name in self._patch("--print-needed", file).splitlines():
            if (missing := self._copy_one(name, folders)) is not None:
                return missing
        return None

    def _copy_one(self, name: str, rpath: list[Path]) -> str | None:
        target = (self._libc if _LIBC.match(name) else self._libraries) / name
        if target.exists() or name.startswith("ld-linux"):
            return None
        found = next((path for path in self._candidates(name, rpath) if path.is_file()), None)
        if found is None:
            return name
        missing = self._copy_needed(found, found.parent)
        if missing is None:
            shutil.copyfile(found, target)
        return missing

    def _candidates(self, name: str, rpath: list[Path]) -> Iterator[Path]:
        root = self._source.root
        for folder in rpath:
            # An rpath of another system means a folder of that system.
            inside = folder if folder.is_relative_to(root) else root / str(folder).lstrip("/")
            yield resolve(root, inside / name)
        for pattern in _SEARCHED:
            yield resolve(root, root / pattern.format(f"{os.uname().machine}-linux-gnu") / name)
        yield resolve(root, self._source.library.parent / name)

    # ------------------------------------------------------------ patchelf
    def _set(self, name: str, rpath: str, loader: str | None = None) -> None:
        options = ["--force-rpath", "--set-rpath", rpath]
        self._patch(*options, *([] if loader is None else ["--set-interpreter", loader]), self._target / name)

    def _patch(self, *arguments: str | Path) -> str:
        command = [str(self._patchelf), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise NoInterpreter(f"{arguments[-1]}: {done.stderr.strip()}")
        return done.stdout.strip()
