"""Archives of layers become what overlayfs takes as lowers, whatever is in them, and back."""

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbench2_env.isolation import worktree
from tbench2_env.server.images.archive import ArchiveError, Unpacked, pack, unpack
from tbench2_env.server.images.content import measure
from tbench2_env.server.images.store import Kind
from tbench2_env.server.threads import Stop

ROOT = os.geteuid() == 0
SHIFTED, ONE_ID = Kind(100_000, True, "trusted"), Kind(0, False, "user")
KINDS = [SHIFTED, Kind(0, True, "trusted"), ONE_ID] if ROOT else [ONE_ID]
as_root = pytest.mark.skipif(not ROOT, reason="owners, devices, mounts")
#: cap_net_raw+ep as setcap(8) writes it (linux/capability.h, VFS_CAP_REVISION_2).
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def entry(name: str, data: bytes | str | None = None, type: bytes = FILE, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member: `data` is a file's content, or a link's target."""
    info = tarfile.TarInfo(name)
    info.type, info.mode = type, more.pop("mode", 0o755 if type == FOLDER else 0o644)
    content = data.encode() if isinstance(data, str) else data or b""
    if type in (LINK, HARD):
        info.linkname, content = content.decode(), b""
    info.size = len(content)
    for key, value in more.items():
        setattr(info, key, value)
    return info, content


def archive(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


class Bench:
    def __init__(self, folder: Path, kind: Kind) -> None:
        self.root, self.kind = folder / "root", kind

    def unpack(self, *entries: tuple[tarfile.TarInfo, bytes]) -> Unpacked:
        return unpack(io.BytesIO(archive(*entries)), self.root, self.kind)

    def tree(self) -> dict[str, str]:
        """What lies where: text of files, "-> target", "folder", "opaque", "whiteout" or a type's letter."""
        return {str(path.relative_to(self.root)): self._what(path) for path in sorted(self.root.rglob("*"))}

    def _what(self, path: Path) -> str:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            return f"-> {os.readlink(path)}"  # noqa: PTH115
        if stat.S_ISREG(info.st_mode):
            return path.read_text()
        if stat.S_ISDIR(info.st_mode):
            return "opaque" if self.kind.opaque in os.listxattr(path) else "folder"
        return "whiteout" if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0 else stat.filemode(info.st_mode)[0]


@pytest.fixture
def bench(tmp_path: Path, kind: Kind) -> Iterator[Bench]:
    """A folder to unpack into, nothing outside of which changes."""
    (tmp_path / "outside").write_text("mine")
    yield Bench(tmp_path, kind)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["outside"], ["outside", "root"])
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "outside").stat().st_nlink == 1
    worktree.delete(str(tmp_path / "root"))


# ---------------------------------------------------------------- what is in an archive
def test_entries_of_all_kinds(bench: Bench) -> None:
    report = bench.unpack(
        entry("./", type=FOLDER, mode=0o711),
        entry("bin/", type=FOLDER, mode=0o2750, uid=3, gid=4, mtime=100),
        entry("bin/su", "program", mode=0o4755, uid=1, gid=2, mtime=1234.5),
        entry("bin/sudo", "bin/su", type=HARD),
        entry("bin/sh", "../somewhere/./else", type=LINK, uid=5, mtime=99),
        entry("bin/" + "n" * 200, "long"),
        entry("pipe", type=tarfile.FIFOTYPE),
        entry("nobody", "x", uid=65534, gid=70_000),
        entry("closed/", type=FOLDER, mode=0),
        entry("closed/file", "x", mode=0),
    )
    assert report.entries == 10
    assert not report.skipped
    su, root = (bench.root / "bin/su").stat(), bench.root
    assert (stat.S_IMODE(su.st_mode), su.st_mtime_ns, su.st_nlink) == (0o4755, 1234_500_000_000, 2)
    assert su.st_ino == (root / "bin/sudo").stat().st_ino
    assert os.readlink(root / "bin/sh") == "../somewhere/./else"  # noqa: PTH115
    assert (root / ("bin/" + "n" * 200)).read_text() == "long"
    assert stat.S_IMODE(root.stat().st_mode) == 0o711
    assert [(root / "bin").stat().st_mtime, (root / "bin/sh").lstat().st_mtime] == [100, 99]
    assert stat.S_IMODE((root / "closed").stat().st_mode) == 0
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)
    ids = {name: (root / name).lstat() for name in ("bin", "bin/su", "bin/sh", "nobody", ".")}
    found = {
        name: (info.st_uid - bench.kind.owner_shift, info.st_gid - bench.kind.owner_shift) for name, info in ids.items()
    }
    if bench.kind.has_ids:
        assert found == {"bin": (3, 4), "bin/su": (1, 2), "bin/sh": (5, 0), "nobody": (65534, 65534), ".": (0, 0)}
    else:
        assert {info.st_uid for info in ids.values()} == {os.geteuid()}


def test_parents_that_the_archive_has_not(bench: Bench) -> None:
    bench.unpack(entry("a/b/file", "x"), entry("tmp/file", "x"), entry("a/b/file2", "x"))
    assert [stat.S_IMODE((bench.root / name).stat().st_mode) for name in (".", "a", "a/b", "tmp")] == [
        0o755, 0o755, 0o755, 0o1777,
    ]  # fmt: skip
    assert (bench.root / "a").stat().st_uid == (bench.kind.owner_shift if bench.kind.has_ids else os.geteuid())


def test_whiteouts(bench: Bench) -> None:
    bench.unpack(
        entry("etc/.wh.passwd"),
        entry(".wh.top"),
        entry("var/cache/.wh..wh..opq"),
        entry("var/cache/new", "x"),
        entry("made/", type=FOLDER),
        entry(".wh.made"),
        entry("made/file", "x"),
        entry(".wh.anew"),
        entry("anew/", type=FOLDER),
        entry(".wh.deep"),
        entry("deep/in/file", "x"),
        entry("kept", "x"),
        entry(".wh.kept"),
        entry(".wh.written"),
        entry("written", "y"),
        entry(".wh..wh.plnk/123.45", "aufs"),
        entry(".wh..wh.aufs", "aufs"),
    )
    assert bench.tree() == {
        "etc": "folder", "etc/passwd": "whiteout", "top": "whiteout",
        "var": "folder", "var/cache": "opaque", "var/cache/new": "x",
        "made": "opaque", "made/file": "x", "anew": "opaque", "deep": "opaque", "deep/in": "folder",
        "deep/in/file": "x",
        "kept": "x", "written": "y",
    }  # fmt: skip


def test_the_last_of_a_name_counts(bench: Bench) -> None:
    bench.unpack(
        entry("file", "first", mode=0o600),
        entry("file", "second", mode=0o640),
        entry("folder/", type=FOLDER, mode=0o700),
        entry("folder/kept", "x"),
        entry("./folder", type=FOLDER, mode=0o711),
        entry("was-folder/in/it", "x"),
        entry("was-folder", "file"),
        entry("was-file", "x"),
        entry("was-file/", type=FOLDER),
        entry("was-file/in", "x"),
        entry("was-link", "folder", type=LINK),
        entry("was-link/", type=FOLDER),
        entry("linked", "x"),
        entry("hard", "linked", type=HARD),
        entry("hard", "hard", type=HARD),
        entry("linked", "other"),
    )
    assert bench.tree() == {
        "file": "second", "folder": "folder", "folder/kept": "x", "was-folder": "file", "was-file": "folder",
        "was-file/in": "x", "was-link": "folder", "linked": "other", "hard": "x",
    }  # fmt: skip
    assert stat.S_IMODE((bench.root / "folder").stat().st_mode) == 0o711
    assert stat.S_IMODE((bench.root / "file").stat().st_mode) == 0o640


def test_extended_attributes(bench: Bench) -> None:
    attributes = {
        "SCHILY.xattr.security.capability": CAPABILITY.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.note": "a\nb",
        "SCHILY.xattr.user.overlay.redirect": "/etc",
        "SCHILY.xattr.user.overlay.opaque": "y",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.trusted.overlay.metacopy": "",
    }
    report = bench.unpack(
        entry("ping", "x", mode=0o444, pax_headers=attributes),
        entry("folder/", type=FOLDER, mode=0o555, pax_headers=attributes),
    )
    kept = {"user.note": b"a\nb"} | ({"security.capability": CAPABILITY} if bench.kind.has_ids else {})
    for name in ("ping", "folder"):
        assert {each: os.getxattr(bench.root / name, each) for each in os.listxattr(bench.root / name)} == kept
    assert report.skipped == ([] if bench.kind.has_ids else [
        f"{name}: security.capability, which this rung cannot give" for name in ("ping", "folder")
    ])  # fmt: skip


def test_devices(bench: Bench) -> None:
    report = bench.unpack(
        entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        entry("loop", type=tarfile.BLKTYPE, devmajor=7, devminor=0),
        entry("none", type=tarfile.CHRTYPE),
        entry("label", type=b"V"),
    )
    wrong = [f"{name}: of a type that a layer cannot hold" for name in ("none", "label")]
    if bench.kind.has_ids:
        assert bench.tree() == {"loop": "b", "null": "c"}
        assert (bench.root / "null").stat().st_rdev == os.makedev(1, 3)
        assert report.skipped == wrong
    else:
        assert bench.tree() == {}
        assert report.skipped == [f"{name}: a device, which cannot be made here" for name in ("null", "loop")] + wrong


@pytest.mark.parametrize("format", ["gnu", "posix", "v7", "ustar", "oldgnu"])
def test_archives_of_gnu_tar(tmp_path: Path, format: str) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    with (source / "a/sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
        file.truncate(5 << 20)
    (source / "a/ü").write_text("x")
    os.link(source / "a/ü", source / "a/v")
    argv = ["tar", f"--format={format}", "-cf", "-", "-C", str(source), "."]
    made = subprocess.run([*argv, *(["--sparse"] if format in ("gnu", "posix") else [])], check=True, stdout=-1).stdout
    unpack(io.BytesIO(made), tmp_path / "root", ONE_ID)
    sparse = tmp_path / "root/a/sparse"
    assert sparse.read_bytes() == (source / "a/sparse").read_bytes()
    if format in ("gnu", "posix"):
        assert sparse.stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "root/a/ü").stat().st_nlink == 2


# ---------------------------------------------------------------- compression
def zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    return subprocess.run(["zstd", "-q", "-c"], input=data, check=True, stdout=subprocess.PIPE).stdout


COMPRESSIONS = [bytes, gzip.compress, lzma.compress, bz2.compress, zstd]


class Trickle:
    """A stream that gives a few bytes at a time, as sockets do."""

    def __init__(self, data: bytes, size: int = 1 << 16) -> None:
        self._data, self._size = io.BytesIO(data), size

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(self._size, size) if size >= 0 else size)


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("size", [3, 1 << 16])
def test_compressions(bench: Bench, compress: Callable[[bytes], bytes], size: int) -> None:
    content = os.urandom(30_000)
    unpack(Trickle(compress(archive(entry("file", content))), size), bench.root, bench.kind)
    assert (bench.root / "file").read_bytes() == content


def test_a_name_is_no_magic_number(bench: Bench) -> None:
    bench.unpack(entry("BZh91AY", "x"))
    assert bench.tree() == {"BZh91AY": "x"}


def test_what_is_unpacked_can_be_watched(bench: Bench) -> None:
    data, seen = archive(entry("file", "x")) + b"more", io.BytesIO()
    unpack(io.BytesIO(gzip.compress(data)), bench.root, bench.kind, seen.write)
    assert seen.getvalue() == data


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_an_archive_cut_off_anywhere_is_refused(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    whole = archive(entry("a" * 120, os.urandom(3000)), entry("b", "x", pax_headers={"SCHILY.xattr.user.a": "b"}))
    data = compress(whole.rstrip(b"\0") + bytes(1024 - len(whole.rstrip(b"\0")) % 512))
    lengths = [0, 1, 5, 511, 512, 513, 1000, 1024, 1536, 2047, 2048, 2500, 4000, 5000, len(data) - 1030, len(data) - 10]
    for length in [each for each in lengths if 0 <= each < len(data) - (600 if compress is bytes else 0)]:
        with pytest.raises(ArchiveError, match=r"broken|cut off"):
            unpack(io.BytesIO(data[:length]), tmp_path / str(length), ONE_ID)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, zstd])
def test_damage_is_found_by_the_sum_at_the_end(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    data = bytearray(compress(archive(entry("file", os.urandom(100_000)))))
    data[50_000] ^= 1
    with pytest.raises(ArchiveError, match="broken"):
        unpack(io.BytesIO(data), tmp_path / "root", ONE_ID)


def test_a_broken_header_is_no_end(tmp_path: Path) -> None:
    data = bytearray(archive(entry("a", "x"), entry("b", "y")))
    data[1024 + 3] ^= 1
    with pytest.raises(ArchiveError, match="bad checksum"):
        unpack(io.BytesIO(data), tmp_path / "root", ONE_ID)


def test_what_reading_the_stream_raises_comes_through(tmp_path: Path) -> None:
    class Broken(Trickle):
        def read(self, size: int = -1) -> bytes:
            if not (data := super().read(size)):
                raise OSError(errno.EIO, "the disk")
            return data

    for compress in (bytes, gzip.compress, zstd):
        with pytest.raises(OSError, match="the disk"):
            unpack(Broken(compress(archive(entry("file", "x")))), tmp_path / compress.__name__, ONE_ID)


def test_without_zstd_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = zstd(archive())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ArchiveError, match="install the program zstd, or the Python package zstandard"):
        unpack(io.BytesIO(data), tmp_path / "root", ONE_ID)


# ---------------------------------------------------------------- archives that mean harm
@pytest.mark.parametrize("name", ["/outside", "../outside", "a/../../outside", "..//outside", "/../x/../outside"])
def test_names_lie_inside_the_root(bench: Bench, name: str) -> None:
    bench.unpack(entry(name, "theirs"))
    assert (bench.root / "outside").read_text() == "theirs"


@pytest.mark.parametrize("target", ["..", "../..", "/", "/..", "{outside}", "a/../../.."])
def test_links_lead_nowhere_outside(bench: Bench, target: str) -> None:
    target = target.format(outside=bench.root.parent)
    bench.unpack(
        entry("link", target, type=LINK),
        entry("link/outside", "theirs"),
        entry("link/.wh.gone"),
        entry("link/more/", type=FOLDER),
        entry("link/hard", "link/outside", type=HARD),
        entry("link/soft", "/", type=LINK),
    )
    assert bench.tree()["link"] == f"-> {target}"
    inside = next(path for path in bench.root.rglob("outside"))
    assert inside.read_text() == "theirs"
    assert {path.name for path in inside.parent.iterdir()} >= {"outside", "gone", "more", "hard", "soft"}


def test_a_link_is_replaced_and_not_written_through(bench: Bench) -> None:
    outside = str(bench.root.parent / "outside")
    bench.unpack(entry("link", outside, type=LINK), entry("link", "theirs"), entry("soft", outside, type=LINK),
                 entry("soft", mode=0o777, data=""))  # fmt: skip
    assert bench.tree() == {"link": "theirs", "soft": ""}


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../outside", "{outside}", "none", "folder", "..", "", "gone", "link"]
)
def test_hard_links_to_what_the_layer_has_not_are_refused(bench: Bench, target: str) -> None:
    target = target.format(outside=bench.root.parent / "outside")
    entries = [entry("folder/", type=FOLDER), entry(".wh.gone"), entry("hard", target, type=HARD)]
    with pytest.raises(
        ArchiveError, match=f"hard: is a hard link to {re.escape(target)}, which is no file of this layer"
    ):
        bench.unpack(*entries)


def test_a_hard_link_to_a_link_is_one(bench: Bench) -> None:
    bench.unpack(entry("link", "/etc/passwd", type=LINK), entry("hard", "link", type=HARD))
    assert bench.tree() == {"link": "-> /etc/passwd", "hard": "-> /etc/passwd"}


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([entry("a", "b", type=LINK), entry("b", "a", type=LINK), entry("a/file", "x")], "symbolic links"),
        ([entry("folder/..", "x")], r"folder/\.\.: is no name of an entry"),
        ([entry("folder/.wh.")], "hides nothing"),
        ([entry("folder/.wh...")], "hides nothing"),
        ([entry("n" * 300, "x")], "File name too long"),
        ([entry("x", "y", pax_headers={"path": "a\0b"})], "null"),
    ],
)
def test_what_no_file_system_can_hold(bench: Bench, entries: list[tuple[tarfile.TarInfo, bytes]], text: str) -> None:
    with pytest.raises(ArchiveError, match=text):
        bench.unpack(*entries)


def test_a_very_deep_tree(bench: Bench) -> None:
    with pytest.raises(ArchiveError, match="too long"):
        bench.unpack(entry("d/" * 3000 + "file", "x"))


# ---------------------------------------------------------------- over each other
@as_root
@pytest.mark.parametrize("kind", [SHIFTED], indirect=True, ids=["shift-100000"])
def test_an_overlay_of_unpacked_layers_is_the_image(bench: Bench, tmp_path: Path) -> None:
    layers = [
        [
            entry("etc/passwd", "root"), entry("etc/shadow", "secret"), entry("var/cache/old", "x"),
            entry("var/log/old", "x"), entry("lib", "usr/lib", type=LINK), entry("opt/tool/bin", "x"),
        ],
        [
            entry("etc/.wh.shadow"), entry("etc/group", "root"), entry("var/cache/.wh..wh..opq"),
            entry("var/cache/new", "y"), entry(".wh.lib"), entry("lib/", type=FOLDER), entry("lib/own", "z"),
            entry("opt/.wh.tool"), entry("opt/tool", "a file now"),
        ],
    ]  # fmt: skip
    lower, upper = (Bench(bench.root / name, bench.kind) for name in "ab")
    for each, entries in zip((lower, upper), layers, strict=True):
        each.root.parent.mkdir(parents=True)
        each.unpack(*entries)
    merged = Bench(bench.root, bench.kind)
    merged.root.mkdir()
    options = f"lowerdir={upper.root}:{lower.root}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged.root], check=True)
    try:
        assert merged.tree() == {
            "etc": "folder", "etc/group": "root", "etc/passwd": "root", "lib": "folder", "lib/own": "z",
            "opt": "folder", "opt/tool": "a file now", "var": "folder", "var/cache": "folder",
            "var/cache/new": "y", "var/log": "folder", "var/log/old": "x",
        }  # fmt: skip
    finally:
        subprocess.run(["umount", merged.root], check=True)


# ---------------------------------------------------------------- packing
def packed(root: Path, kind: Kind) -> bytes:
    out = io.BytesIO()
    pack(root, out, kind)
    return out.getvalue()


def test_a_packed_layer(bench: Bench) -> None:
    bench.unpack(
        entry("b/.wh.gone"), entry("a/.wh..wh..opq"), entry("a/file", "x", uid=7, gid=8, mtime=5),
        entry("a/g", "a/file", type=HARD), entry("z", "a", type=LINK), entry("pipe", type=tarfile.FIFOTYPE),
    )  # fmt: skip
    with tarfile.open(fileobj=io.BytesIO(packed(bench.root, bench.kind))) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [
        ".", "a", "a/.wh..wh..opq", "a/file", "a/g", "b", "b/.wh.gone", "pipe", "z",
    ]  # fmt: skip
    file, link = members[3:5]
    assert (file.uid, file.gid, file.mtime) == ((7, 8, 5) if bench.kind.has_ids else (0, 0, 5))
    assert (link.type, link.linkname) == (HARD, "a/file")


def test_what_cannot_be_packed(bench: Bench) -> None:
    bench.unpack(entry("a/file", "x"))
    (bench.root / "a/.wh.file").write_text("not a whiteout")
    with pytest.raises(ArchiveError, match=r"a/\.wh\.file: an image cannot hold this name"):
        packed(bench.root, bench.kind)


_NAMES = st.sampled_from(["a", "b", "ü", "n" * 101, "with space", "x\udc80"])
_ATTRIBUTES = st.dictionaries(st.sampled_from(["user.a", "user.ü"]), st.binary(max_size=20), max_size=2)
_LEAVES = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=2000), st.integers(0, 0o7777), _ATTRIBUTES),
    st.tuples(st.just("link"), st.text("./ab", min_size=1, max_size=150)),
    st.just(("whiteout",)),
    st.just(("fifo",)),
    st.just(("again",)),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.tuples(
        st.just("folder"), st.dictionaries(_NAMES, inner, max_size=4), st.integers(0o500, 0o7777), st.booleans(),
    ),
    max_leaves=12,
)  # fmt: skip


def plant(path: Path, tree: Any, kind: Kind, files: list[Path]) -> None:
    match tree:
        case ("folder", children, mode, opaque):
            path.mkdir()
            for name, child in children.items():
                plant(path / name, child, kind, files)
            if opaque:
                os.setxattr(path, kind.opaque, b"y")
            path.chmod(mode | 0o500)
        case ("file", data, mode, attributes):
            path.write_bytes(data)
            for name, value in attributes.items():
                os.setxattr(path, name, value)
            path.chmod(mode | 0o400)
            os.utime(path, ns=(len(data), len(data) * 10**8 + 1))
            files.append(path)
        case ("link", target):
            path.symlink_to(target)
        case ("whiteout",):
            os.mknod(path, stat.S_IFCHR, 0)
        case ("fifo",):
            os.mkfifo(path)
        case ("again",) if files:
            path.hardlink_to(files[-1])
        case _:
            path.touch()


@settings(max_examples=40, deadline=None)
@given(tree=st.dictionaries(_NAMES, _TREES, max_size=4))
def test_packing_and_unpacking_change_nothing(tree: dict[str, Any]) -> None:
    for kind in KINDS[-2:]:
        with tempfile.TemporaryDirectory() as folder:
            planted, unpacked = Path(folder, "planted"), Path(folder, "unpacked")
            plant(planted, ("folder", tree, 0o755, False), kind, [])
            data = packed(planted, kind)
            assert data == packed(planted, kind)
            unpack(io.BytesIO(data), unpacked, kind)
            assert measure(unpacked, kind, Stop()) == measure(planted, kind, Stop())
            assert packed(unpacked, kind) == data
            for name in ("planted", "unpacked"):
                worktree.delete(str(Path(folder, name)))
