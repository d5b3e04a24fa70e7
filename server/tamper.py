"""Tampering: what an episode's agent changed of what a verifier trusts (TB2_TAMPER).

Looked at before the verifier runs, because a verifier installs things itself; what it left is not held against the
agent at the next evaluation. It is a report of facts, not of guilt: tasks may ask for some of it. What a package
manager installed is left out (`packages`). By family:

- Files of `trusted.TRUSTED` and of pytest's: every change.
- Programs: of those that the node has, every change; of new ones, those with a name that verifiers use or that stand
  on PATH before one of the node's. A new link to a program of the same name (python -> python3) is none.
- Libraries: every change of the node's; new ones only where the loader's cache leads to them.
- Python's standard library: every change, compiled modules too, since a forged one is run in place of its source.
  New ones of modules that were there are not reported: images of python come without, so running it makes hundreds.
  Verifiers do not see them.
- Packages of python: start-up hooks (.pth, sitecustomize) and pytest plug-ins (entry point pytest11), whoever installed
  them; changes of the node's; new ones that no RECORD explains. What was deleted is not: it can only break a test.

Not seen: what the agent's processes change while the verifier runs, and names that honest work has, such as a json.py
in the working directory.
"""

import fnmatch
import functools
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tbench2_env.isolation.changes import Budget, Change, Folder, Kind, Worktree
from tbench2_env.server import trusted
from tbench2_env.server.packages import Packages, source_of
from tbench2_env.server.tampered import Tampered, printable

#: Entries of the upper that are looked at, in trusted folders only; a worktree with more there is itself reported.
_ENTRIES_MAX = 50_000
#: Of a new python package so many entries are looked at: its RECORD could be forged anyway.
_NEW_PACKAGE_MAX = 1_000
#: Changes of the working directory that are looked at for links into /tests, and links that one of them leads through.
_LINKS_MAX, _LINK_HOPS = 10_000, 8
_THROUGH_PROC = re.compile(r"^/proc/(?:self|thread-self|\d+)(?:/task/\d+)?/root(?:/|$)")
_ENTRY_POINTS_MAX_BYTES = 1 << 18
_HAS_PYTEST_PLUGIN = re.compile(rb"^\s*\[\s*pytest11\s*\]", re.MULTILINE)
#: Paths in ld.so.cache, a table of strings that end with a NUL.
_LIBRARY_IN_CACHE = re.compile(rb"/[^\0]+(?=\0)")
_CACHE_MAX_BYTES = 4 << 20
#: Such lines of a .pth are executed (docs.python.org, module site).
_HAS_IMPORT = re.compile(rb"^import[ \t]", re.MULTILINE)
_SITE_FOLDERS = ("site-packages", "dist-packages")
_METADATA_FOLDERS = (".dist-info", ".egg-info")


#: What was done to a folder, and the folder if the upper has it.
_Step = tuple[Change | None, Folder | Change | None]


def find_tampered(worktree: Worktree, env: Mapping[str, str], workdir: str) -> list[Tampered]:
    """The trusted paths that were changed, each once, the most telling first. `env` is what verifiers get.

    `worktree` should be thorough. Raises: OSError when the episode ends meanwhile.
    """
    scan = _Scan(worktree, env.get("HOME", "/root"), workdir, env.get("PATH", ""))
    found: dict[str, Tampered] = {}
    for each in scan.all():
        found.setdefault(each.change.path, each)
    if scan.budget.exceeded:
        change = Change("/", Kind.UNREADABLE, None)
        found.setdefault("/", Tampered(change, f"more than {_ENTRIES_MAX} changes in folders that verifiers trust"))
    return list(found.values())


class _Scan:
    """One look at a worktree."""

    def __init__(self, worktree: Worktree, home: str, workdir: str, path: str) -> None:
        self._worktree, self._home, self._workdir = worktree, home.rstrip("/"), workdir.rstrip("/")
        self._program_folders = [posixpath.normpath(each) for each in path.split(":") if each.startswith("/")]
        self.budget = Budget(_ENTRIES_MAX)
        self._steps: dict[tuple[str, str], _Step] = {}
        self._packages = Packages(worktree)

    def all(self) -> Iterator[Tampered]:
        # First, because the books of installed packages explain programs, too.
        in_python = [*self._in_python()]
        for rule in (*trusted.TRUSTED, trusted.PYTEST):
            for pattern in rule.patterns:
                for change in self._match(pattern):
                    if not self._packages.explains(change):
                        yield Tampered(change, rule.reason, rule.never, rule.quiet)
        yield from self._from_workdir()
        yield from self._links_to_tests()
        yield from self._programs()
        yield from self._libraries()
        yield from in_python

    # ------------------------------------------------------------ patterns
    def _match(self, pattern: str) -> Iterable[Change]:
        """The changes of what a pattern names, and of folders above it."""
        root, names = self._worktree.root, _names_of(pattern, self._home)
        if len(names) > 1 and not _is_pattern(names[0]) and self._first_step(root, names[0]) == (None, None):
            return ()
        return self._match_below(root, names)

    def _match_below(self, folder: Folder, names: Sequence[str]) -> Iterator[Change]:
        name, *rest = names
        if name == "**":
            yield from self._worktree.walk(folder, self.budget)
            return
        is_pattern = _is_pattern(name)
        for each in fnmatch.filter(self._worktree.names(folder, self.budget), name) if is_pattern else (name,):
            if not rest:
                if (change := self._worktree.look(folder, each)) is not None:
                    yield change
                continue
            change, inner = self._step(folder, each) if is_pattern else self._first_step(folder, each)
            if isinstance(inner, Change):
                yield inner
            elif inner is not None and (change is None or change.kind is not Kind.RENAMED):
                yield from self._match_below(inner, rest)
            elif change is not None and (change.kind is not Kind.ADDED or _is_link(change)):
                yield change

    def _step(self, folder: Folder, name: str) -> "_Step":
        return self._worktree.look(folder, name), self._enter(folder, name)

    def _first_step(self, folder: Folder, name: str) -> "_Step":
        """The same, remembered: patterns have few folders among them, of which most episodes touch none."""
        key = (folder.path, name)
        if key not in self._steps:
            self._steps[key] = self._step(folder, name)
        return self._steps[key]

    def _from_workdir(self) -> Iterator[Tampered]:
        folder = self._worktree.find(self._workdir) if self._workdir else self._worktree.root
        if not isinstance(folder, Folder):
            return
        for name in trusted.FROM_WORKDIR.patterns:
            change = self._worktree.look(folder, name)
            if change is not None and change.now is not None:
                yield Tampered(change, trusted.FROM_WORKDIR.reason)
        # Importing finds plug-ins by the metadata in it, likewise.
        for name in self._worktree.names(folder, Budget(_ENTRIES_MAX)):
            if name.endswith(_METADATA_FOLDERS):
                yield from self._plugin(folder, name)

    def _links_to_tests(self) -> Iterator[Tampered]:
        """An answer that is a link to the expected answer equals it; to an agent such a link leads nowhere."""
        folder = self._worktree.find(self._workdir) if self._workdir else None
        if not isinstance(folder, Folder):
            return
        for change in self._worktree.walk(folder, Budget(_LINKS_MAX), _may_lead_on):
            if _is_link(change) and self._leads_to_tests(change.path):
                yield Tampered(change, "a link to what only verifiers have", never=True)

    def _leads_to_tests(self, path: str) -> bool:
        for _ in range(_LINK_HOPS):
            text = self._worktree.readlink(path)
            if not text:
                return False
            # Of /proc only what comes back to the root matters; the rest is no way to a file of the tests.
            path = _THROUGH_PROC.sub("/", posixpath.normpath(posixpath.join(posixpath.dirname(path), text)))
            if f"{path}/".startswith(("/tests/", "/logs/verifier/")):
                return True
        return False

    # ------------------------------------------------------------ programs and libraries
    def _programs(self) -> Iterator[Tampered]:
        for place, path in enumerate(self._program_folders):
            for change in self._match(f"{path}/*"):
                name = change.path.rpartition("/")[2]
                reason = self._reason_of_program(change, name, self._program_folders[place + 1 :])
                if reason and not self._packages.explains(change):
                    yield Tampered(change, reason, never=self._is_forged(change, name))

    def _is_forged(self, change: Change, name: str) -> bool:
        """Whether the node has a program of that name which verifiers run instead."""
        if _is_one_of(name, trusted.PYTHONS):
            return change.before is not None and change.now is not None
        core = _is_one_of(name, (*trusted.CORE_PROGRAMS, *trusted.FETCHING_PROGRAMS))
        return core and any(self._worktree.below(f"{folder}/{name}") for folder in self._program_folders)

    def _reason_of_program(self, change: Change, name: str, later: list[str]) -> str:
        if change.before is not None or change.kind in (Kind.UNREADABLE, Kind.RENAMED):
            return "a program of the node"
        shadowed = next((f"{path}/{name}" for path in later if self._worktree.below(f"{path}/{name}")), "")
        if self._is_same_program(change, name):
            return ""
        if shadowed:
            return f"a program that comes before {printable(shadowed)} on PATH"
        return "a program that verifiers run" if _is_one_of(name, trusted.PROGRAMS) else ""

    def _is_same_program(self, change: Change, name: str) -> bool:
        """Whether a new name is a link to an unchanged program of the node that begins with it."""
        if change.now is None or not stat.S_ISLNK(change.now.st_mode):
            return False
        parent, _, _ = change.path.rpartition("/")
        target = posixpath.normpath(posixpath.join(parent, self._worktree.readlink(change.path)))
        folder_path, _, base = target.rpartition("/")
        if not base.startswith(name) or folder_path not in self._program_folders or not self._worktree.below(target):
            return False
        folder = self._worktree.find(folder_path)
        return folder is None or (isinstance(folder, Folder) and self._worktree.look(folder, base) is None)

    def _libraries(self) -> Iterator[Tampered]:
        for path in trusted.LIBRARY_FOLDERS:
            for change in self._match(f"{path}/*"):
                known = change.before is not None or change.kind in (Kind.UNREADABLE, Kind.RENAMED)
                if known and not self._packages.explains(change):
                    yield Tampered(change, "a library of the node", never=True)
        for change in self._match("/etc/ld.so.cache"):
            if not self._packages.explains(change):
                yield Tampered(change, "the loader finds libraries by it", never=self._leads_astray(change))

    def _leads_astray(self, cache: Change) -> bool:
        """Whether the loader would take another library for one of the node's; honest work adds its own."""
        for path in _LIBRARY_IN_CACHE.findall(self._worktree.read(cache.path, _CACHE_MAX_BYTES)):
            folder, _, name = os.fsdecode(path).rpartition("/")
            if any(fnmatch.fnmatchcase(folder, each) for each in trusted.LIBRARY_FOLDERS):
                continue
            own = (each.replace("*", os.uname().machine) for each in trusted.LIBRARY_FOLDERS)
            if any(self._worktree.below(f"{each}/{name}") is not None for each in own):
                return True
        return False

    # ------------------------------------------------------------ python
    def _in_python(self) -> Iterator[Tampered]:
        """The libraries of every python on PATH."""
        prefixes = dict.fromkeys(posixpath.dirname(path).rstrip("/") for path in self._program_folders)
        for prefix in (*prefixes, f"{self._home}/.local"):
            yield from (
                Tampered(each, "python's standard library") for each in self._match(f"{prefix}/lib/python3*.zip")
            )
            lib = self._worktree.find(f"{prefix}/lib")
            if not isinstance(lib, Folder):
                continue
            for name in fnmatch.filter(self._worktree.names(lib, self.budget), "python3*"):
                try:
                    folder = self._worktree.enter(lib, name)
                except OSError:
                    yield Tampered(Change(f"{lib.path}/{name}", Kind.UNREADABLE, None), "python's standard library")
                    continue
                change = self._worktree.look(lib, name)
                if folder is not None and folder.moved is None:
                    yield from self._python_folder(folder, change)
                elif change is not None:
                    yield Tampered(change, "python's standard library")

    def _python_folder(self, folder: Folder, change_of_it: Change | None) -> Iterator[Tampered]:
        """One python's library; if all of it is new it is reported as a whole."""
        for name in self._worktree.names(folder, self.budget):
            inner = self._enter(folder, name)
            if name in _SITE_FOLDERS and isinstance(inner, Folder) and inner.moved is None:
                yield from self._site(inner)
                continue
            for each in self._entry_and_below(self._worktree.look(folder, name), inner):
                if name in trusted.NOT_CODE or self._packages.explains(each):
                    continue
                is_new = change_of_it is not None and change_of_it.kind is Kind.ADDED
                # A python that is new as a whole may be the task; the node's runs its own library.
                whole = change_of_it if is_new else None
                quiet = whole is None and self._is_compiled(each)
                yield Tampered(whole or each, "python's standard library", never=whole is None, quiet=quiet)
                if is_new:
                    break

    def _enter(self, folder: Folder, name: str) -> Folder | Change | None:
        try:
            return self._worktree.enter(folder, name)
        except OSError:
            return Change(f"{folder.path}/{name}", Kind.UNREADABLE, None)

    def _entry_and_below(
        self, change: Change | None, inner: Folder | Change | None, budget: Budget | None = None
    ) -> Iterator[Change]:
        if isinstance(inner, Change):
            yield inner
        elif change is not None:
            yield change
        if isinstance(inner, Folder) and inner.moved is None:
            yield from self._worktree.walk(inner, budget or self.budget)

    def _site(self, site: Folder) -> Iterator[Tampered]:
        names = self._worktree.names(site, self.budget)
        for name in names:
            if name.endswith(".dist-info"):
                self._packages.add_record(site.path, name)
        for name in names:
            change = self._worktree.look(site, name)
            if change is not None and change.now is not None and _is_one_of(name, trusted.PYTHON_HOOKS):
                yield Tampered(change, "it runs in every python", never=self._is_plant(change, name))
            elif name.endswith(_METADATA_FOLDERS):
                yield from self._plugin(site, name)
            else:
                yield from self._package(change, self._enter(site, name))

    def _is_plant(self, change: Change, name: str) -> bool:
        """A .pth that only names a folder, or that a package brought, as editable installs do, may be honest work."""
        if not name.endswith(".pth"):
            return True
        text = self._worktree.read(change.path, _ENTRY_POINTS_MAX_BYTES)
        runs_code = change.now is None or change.now.st_size > len(text) or _HAS_IMPORT.search(text) is not None
        return runs_code and not self._packages.explains(change)

    def _plugin(self, folder: Folder, name: str) -> Iterator[Tampered]:
        try:
            metadata = self._worktree.enter(folder, name)
        except OSError:
            yield Tampered(Change(f"{folder.path}/{name}", Kind.UNREADABLE, None), "a plug-in of pytest")
            return
        change = self._worktree.look(metadata, "entry_points.txt") if metadata is not None else None
        if change is None or change.now is None:
            return
        text = self._worktree.read(change.path, _ENTRY_POINTS_MAX_BYTES)
        if _HAS_PYTEST_PLUGIN.search(text) or change.now.st_size > _ENTRY_POINTS_MAX_BYTES:
            yield Tampered(change, "a plug-in of pytest", never=True)

    def _package(self, change: Change | None, inner: Folder | Change | None) -> Iterator[Tampered]:
        """A package or module: its changes if the node has it; if it is new, the package as a whole, once."""
        is_new = change is not None and change.kind in (Kind.ADDED, Kind.RENAMED)
        for each in self._entry_and_below(change, inner, Budget(_NEW_PACKAGE_MAX) if is_new else None):
            is_folder = each.now is not None and stat.S_ISDIR(each.now.st_mode) and each.kind is not Kind.RENAMED
            if each.now is None and each.kind is Kind.DELETED:
                continue
            if is_folder or self._packages.explains(each):
                continue
            if is_new and change is not None:
                yield Tampered(change, "a package of python that none of its package managers explains")
                return
            # In the working directory nothing can be hidden.
            quiet = self._is_compiled(each) and not each.path.startswith(f"{self._workdir}/")
            yield Tampered(each, "a package of python", never=quiet, quiet=quiet)

    def _is_compiled(self, change: Change) -> bool:
        """Whether it is a new compiled module of one that the episode was given, or a folder of such."""
        if change.kind is not Kind.ADDED or change.now is None:
            return False
        parent, name = posixpath.split(change.path)
        if stat.S_ISDIR(change.now.st_mode):
            return name == "__pycache__" and self._worktree.below(parent) is not None
        source = source_of(change.path) if stat.S_ISREG(change.now.st_mode) else None
        return source is not None and self._worktree.below(source) is not None


@functools.lru_cache(maxsize=512)
def _names_of(pattern: str, home: str) -> tuple[str, ...]:
    return tuple(pattern.replace("~", home, 1).strip("/").split("/"))


def _is_pattern(name: str) -> bool:
    return "*" in name or "?" in name or "[" in name


def _is_link(change: Change) -> bool:
    return change.now is not None and stat.S_ISLNK(change.now.st_mode)


def _may_lead_on(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() or entry.is_dir(follow_symlinks=False)


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
