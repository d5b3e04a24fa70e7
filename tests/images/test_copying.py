"""Layers built on the real file system over a fake root; owners are checked where the tests may chown."""

import io
import os
import re
import shutil
import socket
import stat
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbench2_env.server.images.context import Context, View, _regex
from tbench2_env.server.images.copying import build_layer, copy_tree
from tbench2_env.server.images.dockerfile import parse
from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.emulation import emulate
from tbench2_env.server.images.layer import BaseView, Owner, changed_mode
from tbench2_env.server.images.steps import Copy, Workdir

ME = Owner(uid_offset=0, change=False)


def plant(root: Path, entries: dict[str, str | bytes | None]) -> None:
    """Make files (text), links ("-> target") and directories (None) below `root`."""
    for name, content in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(content)


def tree(root: Path) -> dict[str, str]:
    """The reverse of `plant`, leaves and empty directories only."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"  # noqa: PTH115
        elif path.is_file():
            found[name] = path.read_bytes().decode(errors="replace")
        elif not any(path.iterdir()):
            found[name] = "(empty)"
    return found


def snapshot(root: Path, without: Path) -> dict[str, tuple[object, ...]]:
    """Everything below `root` but `without`, with what a stray write would change."""
    seen: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name) != without]
        for path in (Path(folder), *(Path(folder, name) for name in (*folders, *files))):
            status = path.lstat()
            seen[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, status.st_size, status.st_ino)
    seen.pop(str(root))
    return seen


def emulated(text: str) -> tuple[Copy, ...]:
    return tuple(step for step in emulate(parse(text)).steps if isinstance(step, Copy))


@dataclass
class Bench:
    base: Path
    context: Path
    target: Path

    def build(self, text: str, owner: Owner = ME) -> dict[str, str]:
        base = BaseView(self.base, frozenset({"/tmp", "/root"}))
        build_layer(emulate(parse(text)).steps, Context(self.context), self.target, base, owner)
        return tree(self.target)

    def mode(self, name: str) -> int:
        return stat.S_IMODE((self.target / name).lstat().st_mode)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path / "base", tmp_path / "context", tmp_path / "target")
    for folder in (made.base, made.context, made.target):
        folder.mkdir()
    plant(
        made.base,
        {
            "usr/bin/env": "ELF",
            "usr/lib": None,
            "bin": "-> usr/bin",
            "abs": "-> /usr/lib",
            "out": "-> ../../../../usr",
            "loop": "-> loop",
            "dangling": "-> /opt/new",
            "etc/passwd": "root:x:0:0::/root:/bin/sh\nbroken\nwww:x:33:34::/:/bin/false\n",
            "etc/group": "root:x:0:\nstaff:x:50:www,7\n",
            "app/old": "old",
            "srv/file": "f",
            "tmp/hidden": "h",
            "root": None,
        },
    )
    (made.base / "app").chmod(0o2775)
    (made.base / "tmp").chmod(0o1777)
    return made


CONTEXT: dict[str, str | bytes | None] = {
    "a.txt": "A",
    "b.txt": "B",
    ".env": "E",
    "d/x": "X",
    "d/sub/y": "Y",
    "d/link": "-> ../a.txt",
    "e/x": "X2",
    "to-d": "-> d",
    "to-a": "-> /a.txt",
    "to-out": "-> ../../../../../etc/passwd",
    "round": "-> round",
    "[1].txt": "one",
}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("WORKDIR /w/x", {"w/x": "(empty)"}),
        ("WORKDIR /", {}),
        ("WORKDIR /bin/deep", {"usr/bin/deep": "(empty)"}),
        # one file
        ("COPY a.txt /new", {"new": "A"}),
        ("COPY a.txt /new/", {"new/a.txt": "A"}),
        ("COPY a.txt /app", {"app/a.txt": "A"}),
        ("COPY a.txt /", {"a.txt": "A"}),
        ("COPY a.txt /x/../y", {"y": "A"}),
        ("COPY a.txt /../../y", {"y": "A"}),
        ("COPY a.txt /app/old", {"app/old": "A"}),
        ("COPY /a.txt ../../b.txt /w/", {"w/a.txt": "A", "w/b.txt": "B"}),
        ("WORKDIR /w\nCOPY a.txt .", {"w/a.txt": "A"}),
        ("WORKDIR /w\nCOPY a.txt ..", {"a.txt": "A", "w": "(empty)"}),
        ("WORKDIR /w\nCOPY a.txt rel", {"w/rel": "A"}),
        ("WORKDIR /w\nCOPY a.txt /w", {"w/a.txt": "A"}),
        ("COPY a.txt /x\nCOPY b.txt /x", {"x": "B"}),
        # several
        ("COPY a.txt b.txt /w", {"w/a.txt": "A", "w/b.txt": "B"}),
        ("COPY *.txt /w", {"w/a.txt": "A", "w/b.txt": "B", "w/[1].txt": "one"}),
        ("COPY a*.txt /w", {"w": "A"}),
        ("COPY a.txt missing* /w/", {"w/a.txt": "A"}),
        ("COPY [[]1].txt /w/", {"w/[1].txt": "one"}),
        ("COPY .e* /w/", {"w/.env": "E"}),
        ("COPY */x /w/", {"w/x": "X2"}),
        ("COPY d/*/y /w/", {"w/y": "Y"}),
        # directories
        ("COPY d /w", {"w/x": "X", "w/sub/y": "Y", "w/link": "-> ../a.txt"}),
        ("COPY d/ /w/", {"w/x": "X", "w/sub/y": "Y", "w/link": "-> ../a.txt"}),
        ("WORKDIR /w\nCOPY e/. .", {"w/x": "X2"}),
        ("COPY e /app", {"app/x": "X2"}),
        ("COPY d e /w", {"w/x": "X2", "w/sub/y": "Y", "w/link": "-> ../a.txt"}),
        ("COPY a.txt e /w", {"w/a.txt": "A", "w/x": "X2"}),
        ("COPY d* /w", {"w/x": "X", "w/sub/y": "Y", "w/link": "-> ../a.txt"}),
        ("COPY e /", {"x": "X2"}),
        # links in the context
        ("COPY to-d /w", {"w/x": "X", "w/sub/y": "Y", "w/link": "-> ../a.txt"}),
        ("COPY to-d/x /w", {"w": "X"}),
        ("COPY to-a /w/", {"w/to-a": "A"}),
        # links in the base
        ("COPY a.txt /bin/foo", {"usr/bin/foo": "A"}),
        ("COPY a.txt /bin/", {"usr/bin/a.txt": "A"}),
        ("COPY a.txt /bin", {"usr/bin/a.txt": "A"}),
        ("COPY a.txt /abs/../x", {"usr/x": "A"}),
        ("COPY a.txt /out/foo", {"usr/foo": "A"}),
        ("COPY a.txt /dangling", {"opt/new": "A"}),
        ("COPY a.txt /dangling/", {"opt/new/a.txt": "A"}),
        ("COPY e /bin", {"usr/bin/x": "X2"}),
        # what is hidden
        ("COPY a.txt /tmp", {"tmp": "A"}),
        ("COPY a.txt /tmp/hidden/", {"tmp/hidden/a.txt": "A"}),
        # flags
        ("COPY --parents d/x d/su*/y /w", {"w/d/x": "X", "w/d/sub/y": "Y"}),
        ("COPY --parents d/./sub a.txt /w/", {"w/sub/y": "Y", "w/a.txt": "A"}),
        ("COPY --parents d/**/y /w/", {"w/d/sub/y": "Y"}),
        ("COPY --parents d/./../../../a.txt /", {"a.txt": "A"}),
        ("COPY --exclude=sub --exclude=a* --exclude=l* d a.txt b.txt /w/", {"w/x": "X", "w/b.txt": "B"}),
        ("COPY --exclude=**/y --parents d/sub d/x /w/", {"w/d/sub": "(empty)", "w/d/x": "X"}),
        # heredocs
        ("COPY <<one /w\n1\none", {"w": "1\n"}),
        ("COPY <<one <<two a.txt /w\n1\none\n2\ntwo", {"w/a.txt": "A", "w/one": "1\n", "w/two": "2\n"}),
    ],
)
def test_copy(bench: Bench, steps: str, expected: dict[str, str]) -> None:
    plant(bench.context, CONTEXT)
    assert bench.build(f"FROM x\n{steps}\n") == expected


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("COPY missing /w/", "COPY missing build context"),
        ("COPY missing* /w/", "COPY missing* build context"),
        ("COPY a.txt missing /w/", "missing build context"),
        ("COPY to-ou* /w/", "etc/passwd No such file"),
        ("COPY to-out /w/", "to-out build context"),
        ("COPY round /w/", "symbolic links"),
        ("COPY a.txt /loop/x", "symbolic links"),
        ("COPY a.txt /srv/file/x", "/srv/file destination"),
        ("COPY d /srv/file", "/srv/file destination"),
        ("WORKDIR /srv/file", "WORKDIR /srv/file destination"),
        ("COPY pipe /w", "pipe remove it"),
        ("COPY special /w", "socket remove it"),
        ("COPY clash /", "/bin destination"),
        ("COPY clash2 /", "/app rename"),
        ("COPY --chown=nobody a.txt /w", "/etc/passwd nobody number"),
        ("COPY --chown=www:none a.txt /w", "/etc/group none number"),
        (f"COPY a.txt /{'n' * 300}", "too long"),
    ],
)
def test_refused(bench: Bench, step: str, words: str) -> None:
    plant(bench.context, {**CONTEXT, "special/x": "x", "clash/bin/x": "x", "clash2/app": "x"})
    os.mkfifo(bench.context / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(bench.context / "special/socket"))
    with pytest.raises(DockerfileError) as caught:
        bench.build(f"FROM x\nUSER 0\n{step}")
    assert caught.value.line == 3
    assert [word for word in words.split() if word not in str(caught.value)] == []


def test_base_view(bench: Bench) -> None:
    view = BaseView(bench.base, frozenset({"/tmp", "/etc/group"}))
    seen = ["/", "/bin", "/usr/bin/env", "/etc/passwd"]
    unseen = ["/bin/env", "/tmp", "/tmp/hidden", "/etc/group", "/etc/passwd/x", "/no"]
    assert [path for path in seen + unseen if view.lstat(path)] == seen
    assert view.readlink("/bin") == "usr/bin"


def test_a_link_copied_before_does_not_lead_out(bench: Bench, tmp_path: Path) -> None:
    plant(tmp_path, {"outside/kept": "kept"})
    plant(bench.context, {"a/link": "-> /etc", "a/up": "-> ../../../../outside", "a/abs": f"-> {tmp_path}/outside"})
    plant(bench.context, {"b/kept": "b", "c.txt": "C"})
    before = snapshot(tmp_path, bench.target)
    built = bench.build("COPY a /app/\nCOPY b /app/link/\nCOPY b /app/up\nCOPY b /app/abs/\nCOPY c.txt /app/link/new")
    assert built == {
        "app/link": "-> /etc",
        "app/up": "-> ../../../../outside",
        "app/abs": f"-> {tmp_path}/outside",
        "etc/kept": "b",
        "etc/new": "C",
        "outside/kept": "b",
        str(tmp_path / "outside/kept")[1:]: "b",
    }
    assert snapshot(tmp_path, bench.target) == before


def test_a_link_is_replaced_not_written_through(bench: Bench, tmp_path: Path) -> None:
    plant(tmp_path, {"outside": "kept"})
    plant(bench.context, {"a/f": f"-> {tmp_path}/outside", "b/f": "new", "c/f/x": "x"})
    plant(bench.context, {"t.tar": archive([("f", tarfile.REGTYPE, "tar")])})
    assert bench.build("COPY a /w/\nCOPY b /w/") == {"w/f": "new"}
    assert bench.build("COPY a /w/\nCOPY <<f /w/\ninline\nf") == {"w/f": "inline\n"}
    assert bench.build("COPY a /w/\nADD t.tar /w/") == {"w/f": "tar"}
    assert (tmp_path / "outside").read_text() == "kept"
    shutil.rmtree(bench.target / "w")
    with pytest.raises(DockerfileError, match="no directory"):
        bench.build("COPY a /w/\nCOPY c /w/")


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ("", {".dockerignore", "a.log", "d/b.log", "d/keep.log", "d/e/c", "f"}),
        ("*.log\n", {".dockerignore", "d/b.log", "d/keep.log", "d/e/c", "f"}),
        ("**/*.log\n!d/keep.log", {".dockerignore", "d/keep.log", "d/e/c", "f"}),
        ("# d\n\n d/ \n", {".dockerignore", "a.log", "f"}),
        ("d\n!d/keep.log", {".dockerignore", "a.log", "d/keep.log", "f"}),
        ("*\n!f", {"f"}),
        ("/d/**\n.dockerignore", {"a.log", "f"}),
        ("**/e\n[^d]*", {"d/b.log", "d/keep.log"}),
    ],
)
def test_dockerignore(bench: Bench, rules: str, left: set[str]) -> None:
    names = ("a.log", "d/b.log", "d/keep.log", "d/e/c", "f")
    plant(bench.context, {**dict.fromkeys(names, "x"), ".dockerignore": rules})
    assert {name for name, kind in bench.build("COPY . /").items() if kind != "(empty)"} == left


def test_an_ignored_source_is_named(bench: Bench) -> None:
    plant(bench.context, {".dockerignore": "a", "a": "A"})
    with pytest.raises(DockerfileError, match="a: not in the build context, or ignored"):
        bench.build("COPY a /b")


def test_modes_and_times(bench: Bench) -> None:
    plant(bench.context, {"d/run.sh": "#!", "d/sub/x": "x", "d/link": "-> run.sh", "f": "f"})
    for name, mode in (("d/run.sh", 0o4755), ("d/sub", 0o700), ("d", 0o711), ("f", 0o640)):
        (bench.context / name).chmod(mode)
        os.utime(bench.context / name, ns=(1, 987_654_321))
    bench.build("COPY d /new\nCOPY d /app\nCOPY f /up/f\nWORKDIR /tmp/w")
    bench.build("COPY --chmod=710 d /etc/\nCOPY --chmod=700 d /m")
    assert [bench.mode(name) for name in ("new/run.sh", "new/sub", "up/f", "up", "new")] == [
        0o4755, 0o700, 0o640, 0o755, 0o755,
    ]  # fmt: skip
    assert (bench.target / "new/run.sh").stat().st_mtime_ns == 987_654_321
    assert (bench.target / "new/sub").stat().st_mtime_ns == 987_654_321
    assert bench.mode("app") == 0o2775  # as the base has it
    assert bench.mode("tmp") == 0o1777  # hidden in the base, and what every image has
    assert [bench.mode(name) for name in ("etc", "etc/run.sh", "etc/sub", "m", "m/sub/x")] == [
        0o755, 0o710, 0o710, 0o700, 0o700,
    ]  # fmt: skip
    assert bench.mode(".") == stat.S_IMODE(bench.base.stat().st_mode)


def may_chown() -> bool:
    """Root by name only (enroot) gets success, and nothing happens."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.chown(file.name, 100_033, 100_033)
        except OSError:
            return False
        return os.stat(file.name).st_uid == 100_033  # noqa: PTH116


@pytest.mark.skipif(not may_chown(), reason="this user cannot give files away")
def test_owners(bench: Bench) -> None:
    plant(bench.context, {"d/x": "x", "d/link": "-> x", "big": "b"})
    os.chown(bench.base / "app", 33, 70_000)
    os.chown(bench.context / "d/x", 1234, 1234)
    (bench.context / "d/x").chmod(0o4755)
    bench.build(
        "COPY d /app/\nCOPY --chown=www d /new/sub\nCOPY --chown=www:staff d/x /n\nCOPY --chown=7 d/x /m\n"
        "COPY --chown=8:9 d/x /o\nCOPY --chown=70000 big /big\nWORKDIR /w\nCOPY --chown=5 <<h /\nh\n",
        Owner(uid_offset=100_000, change=True),
    )
    found = {
        name: (status.st_uid - 100_000, status.st_gid - 100_000)
        for name in ("app", "app/x", "app/link", "new", "new/sub/x", "n", "m", "o", "big", "w", "h", ".")
        for status in [(bench.target / name).lstat()]
    }
    assert found == {
        "app": (33, 65534), "app/x": (0, 0), "app/link": (0, 0), "new": (33, 34), "new/sub/x": (33, 34),
        "n": (33, 50), "m": (7, 7), "o": (8, 9), "big": (65534, 65534), "w": (0, 0), "h": (5, 5), ".": (0, 0),
    }  # fmt: skip
    assert bench.mode("app/x") == 0o4755


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("u+x,go-w", 0o666, 0o744), ("a=r", 0o4777, 0o444), ("+x", 0o600, 0o711), ("ug=rwX", 0o604, 0o664),
        ("g=X", 0o755, 0o715), ("o-rwx", 0o777, 0o770), ("ug+s,+t", 0o755, 0o7755), ("0750", 0o777, 0o750),
        ("u-s", 0o4755, 0o755), ("go=", 0o777, 0o700), ("a+X", stat.S_IFDIR | 0o600, 0o711), ("u=rw-w+x", 0o0, 0o500),
    ],
)  # fmt: skip
def test_modes_are_chmods(tmp_path: Path, change: str, before: int, after: int) -> None:
    assert changed_mode(change, before) == after
    path = tmp_path / "it"
    path.mkdir() if stat.S_ISDIR(before) else path.touch()
    path.chmod(stat.S_IMODE(before))
    subprocess.run(["sh", "-c", f"umask 0; chmod {change} {path}"], check=True)
    assert stat.S_IMODE(path.stat().st_mode) == after


def test_copy_from_another_root(bench: Bench, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    plant(
        stage, {"opt/app/run": "#!", "opt/app/.dockerignore": "*", "opt/current": "-> /opt/app", "etc/x": "-> ../opt"}
    )
    (stage / "opt/app/run").chmod(0o4711)
    os.utime(stage / "opt/app/run", ns=(5, 5))
    (step,) = emulated("COPY /opt/current /etc/x/app/r* /srv/")
    build_layer([step], View(stage, 0), bench.target, BaseView(bench.base), ME)
    assert tree(bench.target) == {"srv/run": "#!", "srv/.dockerignore": "*"}
    assert bench.mode("srv/run") == 0o4711
    assert (bench.target / "srv/run").stat().st_mtime_ns == 5
    (step,) = emulated("COPY /nothing /srv/")
    with pytest.raises(DockerfileError, match="line 1: COPY: /nothing: not in the stage or image"):
        build_layer([step], View(stage, 0), bench.target, BaseView(bench.base), ME)


@pytest.mark.skipif(not may_chown(), reason="this user cannot give files away")
def test_owners_of_another_root_and_of_the_base(bench: Bench, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    plant(stage, {"d/www": "w", "d/root": "r"})
    for path, uid in ((stage / "d/www", 100_033), (stage / "d/root", 100_000), (stage / "d", 100_007)):
        os.chown(path, uid, uid)
    for path in (bench.base, bench.base / "app", bench.base / "etc"):
        os.chown(path, 100_000, 100_050)
    steps: list[Copy | Workdir] = [*emulated("COPY d /app/\nCOPY --chown=5 d /five")]
    steps.append(Workdir("/w/x", user="www:staff"))
    view = BaseView(bench.base, shift=100_000)
    build_layer(steps, View(stage, 100_000), bench.target, view, Owner(uid_offset=100_000, change=True))
    names = ("", "app", "app/www", "app/root", "five/www", "w", "w/x")
    found = {name: (bench.target / name).stat() for name in names}
    assert {name: (status.st_uid - 100_000, status.st_gid - 100_000) for name, status in found.items()} == {
        "": (0, 50), "app": (0, 50), "app/www": (33, 33), "app/root": (0, 0), "five/www": (5, 5),
        "w": (33, 50), "w/x": (33, 50),
    }  # fmt: skip


def test_the_digest_is_of_what_is_copied(bench: Bench) -> None:
    plant(bench.context, {**CONTEXT, ".dockerignore": "**/*.log"})
    (step,) = emulated("COPY d a.* /w/")

    def digest() -> str:
        return Context(bench.context).digest(step)

    first = digest()
    plant(bench.context, {"d/x.log": "no matter", "b.txt": "B2", "a.log": "no matter"})
    assert digest() == first
    (bench.context / "d/sub/y").write_text("Y2")
    second = digest()
    (bench.context / "d/x").chmod(0o700)
    assert len({first, second, digest()}) == 3


def archive(members: list[tuple[str, bytes, str]], kind: str = "w", **attributes: object) -> bytes:
    """A tar of (name, type, content or link)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=kind) as tar:  # type: ignore[call-overload]
        for name, type_, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = type_, 0o4755, 5
            member.size = len(content) if type_ == tarfile.REGTYPE else 0
            member.linkname = content if type_ in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


FILE, DIR, SYM, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize("kind", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archives_are_unpacked(bench: Bench, kind: str) -> None:
    members = [("d", DIR, ""), ("./d/f", FILE, "F"), ("/abs", FILE, "A"), ("l", SYM, "/abs"), ("h", HARD, "d/f")]
    plant(bench.context, {"x": archive(members, kind)})
    unpacked = {"opt/d/f": "F", "opt/abs": "A", "opt/l": "-> /abs", "opt/h": "F"}
    assert bench.build("ADD x /opt") == unpacked
    assert bench.mode("opt/d/f") == 0o4755
    assert (bench.target / "opt/d").stat().st_mtime == 5
    assert bench.mode("opt") == 0o755


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 10240, b"\x1f\x8b broken", archive([])])
def test_what_is_no_archive_is_copied(bench: Bench, content: bytes) -> None:
    plant(bench.context, {"x.tar.gz": content})
    bench.build("ADD x.tar.gz /opt/")
    assert (bench.target / "opt/x.tar.gz").read_bytes() == content


def test_copy_and_unpack_false_leave_archives_alone(bench: Bench) -> None:
    plant(bench.context, {"x.tar": archive([("f", FILE, "F")])})
    bench.build("COPY x.tar /c/\nADD --unpack=false x.tar /a/")
    assert (bench.target / "c/x.tar").is_file()
    assert (bench.target / "a/x.tar").is_file()


@pytest.mark.parametrize(
    "members",
    [
        [("../f", FILE, "x")],
        [("a/../../f", FILE, "x")],
        [("fifo", tarfile.FIFOTYPE, "")],
        [("device", tarfile.CHRTYPE, "")],
        [("h", HARD, "/etc/passwd")],
        [("l", SYM, "l"), ("h", HARD, "l")],
        [("d", DIR, ""), ("h", HARD, "d")],
        [("d/f", FILE, ""), ("d", FILE, "")],
        [("bin", DIR, "")],
        [("loop/x", FILE, "x")],
    ],
)
def test_hostile_archives_are_refused(bench: Bench, tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    plant(bench.context, {"x.tar": archive(members)})
    before = snapshot(tmp_path, bench.target)
    with pytest.raises(DockerfileError, match="line 1: ADD"):
        bench.build("ADD x.tar /")
    assert snapshot(tmp_path, bench.target) == before


def test_links_in_archives_stay_inside(bench: Bench, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    members = [("l", SYM, str(outside)), ("l/f", FILE, "F"), ("u", SYM, "../../../.."), ("u/g", FILE, "G")]
    plant(bench.context, {"x.tar": archive(members)})
    built = bench.build("ADD x.tar /opt")
    assert built[f"{str(outside)[1:]}/f"] == "F"
    assert built["g"] == "G"
    assert not any(outside.iterdir())


def test_a_truncated_archive_is_refused(bench: Bench) -> None:
    plant(bench.context, {"x.tgz": archive([("f", FILE, "F" * 100_000)], "w:gz")[:-30]})
    with pytest.raises(DockerfileError, match="broken archive"):
        bench.build("ADD x.tgz /")


@pytest.mark.skipif(not may_chown(), reason="this user cannot give files away")
def test_owners_of_archives(bench: Bench) -> None:
    plant(bench.context, {"x.tar": archive([("d/f", FILE, "F")], uid=3, gid=4)})
    bench.build("ADD x.tar /a\nADD --chown=5:6 x.tar /b", Owner(uid_offset=10, change=True))
    owners = [(bench.target / name).stat() for name in ("a", "a/d", "a/d/f", "b/d/f")]
    assert [(status.st_uid, status.st_gid) for status in owners] == [(10, 10), (10, 10), (13, 14), (15, 16)]


def test_copy_tree(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new/target"
    plant(source, {"solution/x": "x", "tests/solution": "kept", "tests/run": "#!", "link": "-> ./tests/run"})
    (source / "tests/run").chmod(0o755)
    copy_tree(source, target, ME, frozenset({"solution"}))
    assert tree(target) == {"tests/solution": "kept", "tests/run": "#!", "link": "-> ./tests/run"}
    assert stat.S_IMODE((target / "tests/run").stat().st_mode) == 0o755
    copy_tree(source, target, ME)
    assert (target / "solution/x").read_text() == "x"
    os.mkfifo(source / "pipe")
    with pytest.raises(OSError, match="remove it"):
        copy_tree(source, target, ME)


def test_the_nodes_faults_are_not_the_authors(bench: Bench) -> None:
    bench.target.rmdir()
    with pytest.raises(FileNotFoundError):
        bench.build("WORKDIR /w")


def test_the_kernel_merges_it(bench: Bench) -> None:
    plant(bench.context, {"foo": "F"})
    bench.build("COPY foo /bin/\nCOPY foo /app/")
    merged = bench.base.parent / "merged"
    merged.mkdir()
    mount = f"mount -t overlay overlay -o lowerdir={bench.target}:{bench.base} {merged}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no overlay mounts here")
    look = f"cat {merged}/bin/foo {merged}/bin/env {merged}/app/old; readlink {merged}/bin; stat -c %a {merged}/app"
    seen = subprocess.run(["unshare", "-m", "sh", "-c", f"{mount} && {look}"], capture_output=True, check=True)
    assert seen.stdout.decode().split() == ["FELFold" + "usr/bin", "2775"]


# --- properties ------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "[x]", ".h"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
LINKS = st.sampled_from(
    ["a", "../b", "/", "/a/b", ".", "..", "../../../..", "OUTSIDE/a", "OUTSIDE/new", "OUTSIDE", "../outside"]
)
CONTENTS = st.one_of(
    st.just("text"),
    st.none(),
    LINKS.map("-> {}".format),
    st.lists(
        st.tuples(
            st.one_of(PATHS, LINKS), st.sampled_from([FILE, DIR, SYM, HARD, tarfile.FIFOTYPE]), st.one_of(PATHS, LINKS)
        ),
        min_size=1,
        max_size=5,
    ).map(archive),
)
WILD = st.lists(st.sampled_from([*"ab/*?.", "..", "[a-b]", "[", "**"]), max_size=5).map("".join)
GLOBS = st.one_of(PATHS, LINKS, WILD, st.builds("{}/./{}".format, PATHS, WILD))
COPIES = st.builds(
    Copy,
    sources=st.lists(GLOBS, max_size=3).map(tuple),
    dest=st.builds("{}{}".format, st.one_of(PATHS, LINKS), st.sampled_from(["", "/", "/."])),
    chown=st.sampled_from([None, "3:4", "nobody"]),
    chmod=st.sampled_from([None, "700", "u+x,go="]),
    workdir=st.one_of(PATHS, LINKS).map("/{}".format),
    is_add=st.booleans(),
    line=st.just(7),
    inline=st.lists(st.tuples(NAMES, st.text(max_size=3)), max_size=2).map(tuple),
    exclude=st.lists(GLOBS, max_size=1).map(tuple),
    parents=st.booleans(),
)
STEPS = st.one_of(COPIES, st.builds(Workdir, st.one_of(PATHS, LINKS).map("/{}".format), st.just(7)))


def plant_what_fits(root: Path, outside: Path, entries: list[tuple[str, str | bytes | None]]) -> None:
    """As `plant`; an entry below a file or over a link is left out, for `plant` itself must not follow one."""
    for name, content in entries:
        parents = [root / name, *(root / name).parents][: name.count("/") + 1]
        if not any(path.is_symlink() or path.is_file() for path in parents) and not (root / name).exists():
            named = content.replace("OUTSIDE", str(outside)) if isinstance(content, str) else content
            plant(root, {name: named})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(PATHS, CONTENTS), max_size=8),
    st.lists(st.tuples(PATHS, st.sampled_from(["text", None, "-> /a", "-> ../..", "-> OUTSIDE"])), max_size=5),
    st.lists(STEPS, min_size=1, max_size=4),
    st.booleans(),
)
def test_nothing_is_written_outside_the_target(
    context: list[tuple[str, str | bytes | None]],
    base: list[tuple[str, str | bytes | None]],
    steps: list[Copy | Workdir],
    is_view: bool,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for folder in ("base", "context", "target", "outside"):
            (top / folder).mkdir()
        plant(top, {"outside/a": "a", "outside/d/b": "b"})
        plant_what_fits(top / "context", top / "outside", context)
        plant_what_fits(top / "base", top / "outside", base)
        before = snapshot(top, top / "target")
        source = View(top / "context", 0) if is_view else Context(top / "context")
        with suppress(DockerfileError):
            build_layer(steps, source, top / "target", BaseView(top / "base", frozenset({"/c"})), ME)
        assert snapshot(top, top / "target") == before


class Malformed(Exception):
    pass


def go_match(pattern: str, name: str) -> bool:
    """Go's path.Match by its documented grammar, one character at a time."""
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "*":
        ends = [end for end in range(len(name) + 1) if "/" not in name[:end]]
        return any(go_match(rest, name[end:]) for end in ends)
    if head == "[":
        chosen, rest = go_class(rest, name[:1])
        return go_match(rest, name[1:]) and chosen
    if head == "?":
        return go_match(rest, name[1:]) and name[:1] not in ("", "/")
    if head == "\\":
        if not rest:
            raise Malformed
        head, rest = rest[0], rest[1:]
    return go_match(rest, name[1:]) and name[:1] == head


def go_class(rest: str, char: str) -> tuple[bool, str]:
    negated = rest.startswith("^")
    rest = rest[negated:]
    chosen = first = False
    while not (first and rest.startswith("]")):
        low, rest = go_char(rest)
        high = low
        if rest.startswith("-"):
            high, rest = go_char(rest[1:])
        chosen |= low <= char <= high
        first = True
    return char != "" and chosen != negated, rest[1:]


def go_char(rest: str) -> tuple[str, str]:
    if not rest or rest[0] in "-]":
        raise Malformed
    if rest[0] == "\\":
        rest = rest[1:]
    if not rest:
        raise Malformed
    return rest[0], rest[1:]


@settings(max_examples=500, deadline=None)
@given(st.text("ab-^*?[]\\/.", max_size=8), st.text("ab-^]\\/.", max_size=6))
def test_globs_are_those_of_go(pattern: str, name: str) -> None:
    try:
        expected = go_match(pattern, name)
    except Malformed:
        expected = False
    assert bool(re.compile(_regex(pattern), re.DOTALL).fullmatch(name)) == expected
