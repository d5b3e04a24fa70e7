"""Root file systems copied on the real file system, as root and as an ordinary user."""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tbench2_env.server.images.kind import Kind
from tbench2_env.server.images.rootfs import copy_rootfs, fingerprint
from tbench2_env.server.threads import Stop, Stopped

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="wants root")
ONE_ID = Kind(0, False, "user")
SHIFTED = Kind(100_000, True, "trusted")


def make_rootfs(folder: Path) -> Path:
    for name in ("etc", "usr/bin", "dev", "secret"):
        (folder / name).mkdir(parents=True)
    (folder / "usr/bin/su").write_bytes(b"\x7fELF")
    (folder / "usr/bin/su").chmod(0o4755)
    (folder / "usr/bin/sg").hardlink_to(folder / "usr/bin/su")
    (folder / "bin").symlink_to("usr/bin")
    (folder / "etc/gone").symlink_to("./nowhere")
    (folder / "etc/motd").write_text("hello\n")
    (folder / "secret/key").write_text("s")
    (folder / "secret").chmod(0o700)
    os.mkfifo(folder / "dev/initctl")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(folder / "dev/log"))
    os.utime(folder / "etc/motd", ns=(1_600_000_000_000_000_001,) * 2)
    os.utime(folder / "etc", ns=(1_500_000_000_000_000_001,) * 2)
    return folder


def test_a_copy_has_modes_links_and_times(tmp_path: Path) -> None:
    source, copy = make_rootfs(tmp_path / "source"), tmp_path / "copy"
    assert copy_rootfs(source, copy, ONE_ID, Stop()) == {"sockets and whiteouts": 1}
    assert [os.readlink(copy / name) for name in ("bin", "etc/gone")] == ["usr/bin", "./nowhere"]  # noqa: PTH115
    assert stat.S_IMODE((copy / "usr/bin/su").stat().st_mode) == 0o4755
    assert (copy / "usr/bin/su").samefile(copy / "usr/bin/sg")
    assert stat.S_ISFIFO((copy / "dev/initctl").stat().st_mode)
    assert stat.S_IMODE((copy / "secret").stat().st_mode) == 0o700
    assert (copy / "etc/motd").read_text() == "hello\n"
    assert (copy / "etc/motd").stat().st_mtime_ns == 1_600_000_000_000_000_001
    assert (copy / "etc").stat().st_mtime_ns == 1_500_000_000_000_000_001


@as_root
def test_owners_are_shifted_and_capabilities_kept(tmp_path: Path) -> None:
    source, copy = make_rootfs(tmp_path / "source"), tmp_path / "copy"
    capability = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep, version 2
    for name, owner in {"etc/motd": (33, 34), "usr/bin/su": (0, 5), "bin": (7, 7)}.items():
        os.lchown(source / name, *owner)
    (source / "usr/bin/su").chmod(0o4755)
    os.setxattr(source / "etc/motd", "security.capability", capability)
    os.setxattr(source / "etc/motd", "user.note", b"x")
    os.mknod(source / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(source / "dev/whiteout", stat.S_IFCHR, 0)
    assert copy_rootfs(source, copy, SHIFTED, Stop()) == {"sockets and whiteouts": 2}
    owners = {name: (copy / name).lstat()[4:6] for name in ("", "etc/motd", "usr/bin/su", "bin")}
    root = 100_000
    assert owners == {
        "": (root, root), "etc/motd": (root + 33, root + 34),
        "usr/bin/su": (root, root + 5), "bin": (root + 7, root + 7),
    }  # fmt: skip
    assert stat.S_IMODE((copy / "usr/bin/su").stat().st_mode) == 0o4755
    assert os.getxattr(copy / "etc/motd", "security.capability") == capability
    assert os.getxattr(copy / "etc/motd", "user.note") == b"x"
    assert (copy / "dev/null").stat().st_rdev == os.makedev(1, 3)


@as_root
def test_what_an_ordinary_user_unpacked_belongs_to_root(tmp_path: Path) -> None:
    source, copy = make_rootfs(tmp_path / "source"), tmp_path / "copy"
    for path in (source, *source.rglob("*")):
        os.lchown(path, 1000, 1000)
    copy_rootfs(source, copy, SHIFTED, Stop())
    assert {path.lstat().st_uid for path in (copy, *copy.rglob("*"))} == {100_000}


@as_root
def test_a_mounted_folder_is_empty_in_the_copy(tmp_path: Path) -> None:
    source = make_rootfs(tmp_path / "source")
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tbench2_env.server.images.kind import Kind\n"
        "from tbench2_env.server.images.rootfs import copy_rootfs\n"
        "from tbench2_env.server.threads import Stop\n"
        "copy_rootfs(Path(sys.argv[1]), Path(sys.argv[2]), Kind(0, False, 'user'), Stop())\n"
    )
    shell = 'mount -t tmpfs none "$1/etc" && touch "$1/etc/mounted" && exec "$0" -c "$3" "$1" "$2"'
    argv = ["unshare", "--mount", "sh", "-c", shell, sys.executable, str(source), str(tmp_path / "copy"), script]
    subprocess.run(argv, check=True, timeout=30)
    assert not list((tmp_path / "copy/etc").iterdir())
    assert (tmp_path / "copy/usr/bin/su").exists()


@as_root
def test_what_a_user_may_not_read_or_make_is_counted(tmp_path: Path) -> None:
    source = make_rootfs(tmp_path / "source")
    (source / "etc/shadow").write_text("x")
    (source / "etc/shadow").chmod(0o640)
    os.mknod(source / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    tmp_path.chmod(0o755)
    (tmp_path / "out").mkdir()
    os.chown(tmp_path / "out", 65534, 65534)
    left_out = _copied_by_nobody(source, tmp_path / "out/copy")
    assert left_out == {"sockets and whiteouts": 1, "unreadable": 2, "devices": 1}
    assert (tmp_path / "out/copy/etc/motd").read_text() == "hello\n"
    assert not (tmp_path / "out/copy/etc/shadow").exists()


def _copied_by_nobody(source: Path, target: Path) -> dict[str, int]:
    """In a process that gives up its ids once it has imported and gone where their owner may not come."""
    script = (
        "import json, os, sys; from pathlib import Path\n"
        "from tbench2_env.server.images.kind import Kind\n"
        "from tbench2_env.server.images.rootfs import copy_rootfs\n"
        "from tbench2_env.server.threads import Stop\n"
        "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
        "print(json.dumps(copy_rootfs(Path(sys.argv[1]), Path(sys.argv[2]), Kind(0, False, 'user'), Stop())))\n"
    )
    argv = [sys.executable, "-c", script, source.name, str(target.relative_to(source.parent))]
    ran = subprocess.run(argv, cwd=source.parent, stdout=subprocess.PIPE, check=True, timeout=30)
    return dict(json.loads(ran.stdout))


def test_a_fingerprint_changes_with_names_modes_sizes_and_times(tmp_path: Path) -> None:
    source = make_rootfs(tmp_path / "source")
    seen = [fingerprint(source, Stop())]
    assert fingerprint(source, Stop()) == seen[0]
    changes: list[Callable[[], object]] = [
        lambda: (source / "etc/motd").chmod(0o600),
        lambda: (source / "etc/motd").write_text("other\n"),
        lambda: (source / "etc/motd").rename(source / "etc/motd2"),
        lambda: (source / "new").mkdir(),
        lambda: os.utime(source / "usr/bin/su", ns=(1, 1)),
    ]
    for change in changes:
        change()
        seen.append(fingerprint(source, Stop()))
    assert len(set(seen)) == len(seen)


def test_a_copy_can_be_stopped(tmp_path: Path) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        copy_rootfs(make_rootfs(tmp_path / "source"), tmp_path / "copy", ONE_ID, stop)
