"""What a package manager installed in an episode: changes that its own books explain.

dpkg: a file is explained by a .md5sums, or by a conffile's sum in `status`, that the agent's work changed, too, and
whose sum is that of the content; links and folders by a .list; what is gone by a .list that no longer has it. Python:
by a new RECORD with the content's SHA-256, and a compiled module by its source. All of it is inside the worktree, so a
forger could write it, too: it keeps the report free of honest work, and proves nothing. So there is no point in hashing
gigabytes: beyond a number of files and bytes the books are believed.
"""

import base64
import csv
import fnmatch
import hashlib
import os
import posixpath
import re
import stat
import struct
from dataclasses import dataclass

from tbench2_env.isolation.changes import Budget, Change, Folder, Kind, Worktree

_BOOK_MAX_BYTES = 8 << 20
_STATUS_MAX_BYTES = 64 << 20
_BOOKS_MAX = 20_000
_HASHED_MAX_FILES, _HASHED_MAX_BYTES = 2_000, 64 << 20
_CONFFILE = re.compile(rb"^ (/\S+) ([0-9a-f]{32})\b", re.MULTILINE)
_PYC = re.compile(r"(.*)/__pycache__/([^/]+?)\.[^/.]+(?:\.opt-\d)?\.pyc$")
#: struct cache_file_new and file_entry_new of glibc's dl-cache.h: magic, count, size of strings; flags, key, value.
_CACHE_MAGIC, _CACHE_HEADER, _CACHE_ENTRY = b"glibc-ld.so.cache1.1", struct.Struct("<20sII20x"), struct.Struct("<iIIIQ")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_PATH_MAX = 4096
_FOLDERS_KEPT = 8
_LD_CACHE, _PASSWD = "/etc/ld.so.cache", "/etc/passwd"
_CA_LINKS, _BUNDLE, _CA_FOLDER = "/etc/ssl/certs/", "/etc/ssl/certs/ca-certificates.crt", "/usr/share/ca-certificates/"


@dataclass
class _Hashed:
    files: int = 0
    size: int = 0

    def add(self, size: int) -> bool:
        """Whether there is time for one more."""
        self.files, self.size = self.files + 1, self.size + size
        return self.files <= _HASHED_MAX_FILES and self.size <= _HASHED_MAX_BYTES


class Packages:
    """What was installed, removed or upgraded in one worktree; read when first asked for."""

    def __init__(self, worktree: Worktree) -> None:
        self._worktree = worktree
        self._sums: dict[str, str] = {}
        self._listed: set[str] = set()
        self._dropped: set[str] = set()
        self._folders: dict[str, Folder | Change | None] = {}
        self._hashed = {"md5": _Hashed(), "sha256": _Hashed()}
        #: RECORDs, which cannot have their own sum.
        self._unsummed: set[str] = set()
        self._records: dict[str, str] = {}
        self._read_dpkg()

    def explains(self, change: Change) -> bool:
        """Whether the books have it so."""
        path = change.path
        if change.now is None:
            # Who trusts fewer certificates is not fooled.
            is_certificate = fnmatch.fnmatchcase(path, f"{_CA_LINKS}????????.[0-9]")
            return change.kind is Kind.DELETED and (path in self._dropped or is_certificate)
        if stat.S_ISLNK(change.now.st_mode) and path.startswith(_CA_LINKS):
            return self._leads_to_certificate(path)
        if not stat.S_ISREG(change.now.st_mode):
            return path in self._listed and change.kind is not Kind.RENAMED
        match path:
            case "/etc/ld.so.cache":
                return self._is_good_cache()
            case "/etc/ssl/certs/ca-certificates.crt":
                return self._is_good_bundle()
            case "/etc/passwd":
                return self._is_good_passwd()
        if path in self._sums:
            return self._has_digest(change, "md5", self._sums[path])
        if path in self._records:
            return self._has_digest(change, "sha256", _hexadecimal(self._records[path].removeprefix("sha256=")))
        if (source := source_of(path)) is not None:
            return self._is_installed(source)
        return path in self._unsummed

    def _find(self, path: str) -> Folder | Change | None:
        """A folder: asked for again and again, for each file in it."""
        if path not in self._folders:
            self._folders = dict(list(self._folders.items())[-_FOLDERS_KEPT:])
            self._folders[path] = self._worktree.find(path)
        return self._folders[path]

    def _is_installed(self, path: str) -> bool:
        parent, _, name = path.rpartition("/")
        folder = self._find(parent)
        change = self._worktree.look(folder, name) if isinstance(folder, Folder) else None
        return change is not None and self.explains(change)

    def _has_digest(self, change: Change, algorithm: str, digest: str) -> bool:
        parent, _, name = change.path.rpartition("/")
        folder = self._find(parent)
        if not isinstance(folder, Folder) or change.now is None:
            return False
        if not self._hashed[algorithm].add(change.now.st_size):
            return True
        try:
            with open(self._worktree.open_file(folder, name), "rb") as file:
                return hashlib.file_digest(file, algorithm).hexdigest() == digest
        except OSError:
            return False

    # ------------------------------------------------------------ dpkg
    def _read_dpkg(self) -> None:
        info = self._worktree.find("/var/lib/dpkg/info")
        if not isinstance(info, Folder):
            return
        for name in self._worktree.names(info, Budget(_BOOKS_MAX)):
            change = self._worktree.look(info, name) if name.endswith((".list", ".md5sums")) else None
            if change is None or change.kind is Kind.METADATA:
                continue
            text = self._worktree.read(change.path, _BOOK_MAX_BYTES)
            if name.endswith(".md5sums"):
                for line in text.splitlines():
                    digest, _, path = line.partition(b"  ")
                    self._sums.update((each, os.fsdecode(digest)) for each in _merged(b"/" + path))
                continue
            listed = {each for line in text.splitlines() for each in _merged(line)}
            before = self._worktree.read_below(change.path, _BOOK_MAX_BYTES).splitlines()
            self._listed |= listed
            self._dropped |= {each for line in before for each in _merged(line)} - listed
        if self._listed:
            status = self._worktree.read("/var/lib/dpkg/status", _STATUS_MAX_BYTES)
            conffiles = {os.fsdecode(path): os.fsdecode(digest) for path, digest in _CONFFILE.findall(status)}
            self._sums.update((path, digest) for path, digest in conffiles.items() if path in self._listed)

    # ------------------------------------------------------------ what packages' scripts make
    def _is_good_cache(self) -> bool:
        """Whether no library of the node's is found elsewhere, unless in a package."""
        before = _cached(self._worktree.read_below(_LD_CACHE, _BOOK_MAX_BYTES))
        now = _cached(self._worktree.read(_LD_CACHE, _BOOK_MAX_BYTES))
        return bool(now) and all(
            posixpath.basename(path) == key and (path in self._listed or path in before.get(key, {path}))
            for key, paths in now.items()
            for path in paths
        )

    def _is_good_bundle(self) -> bool:
        """Whether each certificate was there before or is one of a package."""
        bundle = _CERTIFICATE.findall(self._worktree.read(_BUNDLE, _BOOK_MAX_BYTES))
        known = set(_CERTIFICATE.findall(self._worktree.read_below(_BUNDLE, _BOOK_MAX_BYTES)))
        for path in self._listed:
            if path.startswith(_CA_FOLDER) and path.endswith(".crt"):
                known.update(_CERTIFICATE.findall(self._worktree.read(path, _BOOK_MAX_BYTES)))
        return bool(bundle) and known.issuperset(bundle)

    def _leads_to_certificate(self, link: str) -> bool:
        """Whether a hashed name leads, by way of one link, to a certificate of a package or of the node."""
        for _ in range(2):
            link = posixpath.normpath(posixpath.join(posixpath.dirname(link), self._worktree.readlink(link)))
        parent, _, name = link.rpartition("/")
        folder = self._find(parent)
        change = self._worktree.look(folder, name) if isinstance(folder, Folder) else folder
        if not link.startswith(_CA_FOLDER):
            return False
        return self._worktree.below(link) is not None if change is None else self.explains(change)

    def _is_good_passwd(self) -> bool:
        """Whether users were only added, and none of them is another root: useradd, and what packages do."""
        before = set(self._worktree.read_below(_PASSWD, _BOOK_MAX_BYTES).splitlines())
        now = self._worktree.read(_PASSWD, _BOOK_MAX_BYTES).splitlines()
        known = {line.split(b":")[0] for line in before}
        added = [line.split(b":") for line in now if line not in before]
        good = all(len(user) == 7 and user[0] not in known and user[2].strip(b"0") for user in added)
        return good and before.issubset(now)

    # ------------------------------------------------------------ python
    def add_record(self, site: str, distribution: str) -> None:
        """Read the RECORD of a distribution in a folder of packages (packaging.python.org, "Recording installed
        projects")."""
        text = self._worktree.read(f"{site}/{distribution}/RECORD", _BOOK_MAX_BYTES).decode(errors="surrogateescape")
        try:
            rows = list(csv.reader(text.splitlines()))
        except csv.Error:
            return
        for row in rows:
            if len(row) == 3 and row[1].startswith("sha256="):
                path = f"{site}/{row[0]}"
                path = posixpath.normpath(path) if ".." in path else path
                self._records[path] = row[1]
        self._unsummed.add(f"{site}/{distribution}/RECORD")


def source_of(path: str) -> str | None:
    """The module of which this is a compiled one (docs.python.org, PEP 3147); None if it is none."""
    compiled = _PYC.match(path)
    return None if compiled is None else f"{compiled[1]}/{compiled[2]}.py"


def _merged(line: bytes) -> tuple[str, ...]:
    """A path of a package, and where it is if /bin, /lib, ... are links to /usr's."""
    path = os.fsdecode(line)
    if path.startswith(("/usr/bin/", "/usr/sbin/", "/usr/lib")):
        return path, path.removeprefix("/usr")
    return (path, "/usr" + path) if path.startswith(("/bin/", "/sbin/", "/lib")) else (path,)


def _hexadecimal(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except ValueError:
        return ""


def _cached(data: bytes) -> dict[str, set[str]]:
    """The loader's cache: names of libraries and their paths; empty for anything that is no such cache."""
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + _CACHE_HEADER.size:
        return {}
    _, count, _ = _CACHE_HEADER.unpack_from(data, start)
    found: dict[str, set[str]] = {}
    for number in range(min(count, _BOOKS_MAX)):
        offset = start + _CACHE_HEADER.size + number * _CACHE_ENTRY.size
        if offset + _CACHE_ENTRY.size > len(data):
            return {}
        _, key, value, _, _ = _CACHE_ENTRY.unpack_from(data, offset)
        found.setdefault(_text_at(data, start + key), set()).add(_text_at(data, start + value))
    return found


def _text_at(data: bytes, offset: int) -> str:
    return os.fsdecode(data[offset : offset + _PATH_MAX].partition(b"\0")[0])
