"""Wrappers raise with the call, its arguments and, where a host's setting is to blame, which one."""

import ctypes
import errno
import os
import re
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tbench2_env.isolation import syscalls as sc

from .child import as_root, drop_capabilities, in_own_process, own_mounts, own_user_namespace
from .rig import USER_NAMESPACES, own_descriptors

BAD_FD = 999


def names(folder_fd: int) -> list[str]:
    return sorted(path.name for path in Path(f"/proc/self/fd/{folder_fd}").iterdir())


@pytest.mark.parametrize(
    ("call", "number", "text"),
    [
        (lambda: sc.setns(BAD_FD, sc.CLONE_NEWNS), errno.EBADF, "setns(fd 999, 0x20000): Bad file descriptor"),
        (lambda: sc.setns(0, sc.CLONE_NEWNS), errno.EINVAL, "setns(fd 0, 0x20000): Invalid argument"),
        (lambda: sc.unshare(1), errno.EINVAL, "unshare(0x1): Invalid argument"),
        (
            lambda: sc.mount("a", "/no/b", "tmpfs", 6, "c=d"),
            errno.ENOENT,
            "mount(a, /no/b, tmpfs, 0x6, 'c=d'): No such",
        ),
        (lambda: sc.mount("/no/a", "/", flags=sc.MS_BIND), errno.ENOENT, "mount(/no/a, /, bind, 0x1000, ''): No such"),
        (lambda: sc.mount("x", "/proc", "nofs"), errno.ENODEV, "mount(x, /proc, nofs, 0x0, ''): No such device"),
        (lambda: sc.umount("/usr"), errno.EINVAL, "umount2(/usr): Invalid argument"),
        (lambda: sc.pivot_root("/no", "/no/old"), errno.ENOENT, "pivot_root(/no, /no/old): No such file"),
        (lambda: sc.prctl(-1, 7), errno.EINVAL, "prctl(-1, 7): Invalid argument"),
        (lambda: sc.syncfs(BAD_FD), errno.EBADF, "syncfs(fd 999): Bad file descriptor"),
        (lambda: sc.open_tree("/no"), errno.ENOENT, "open_tree(/no): No such file"),
        (lambda: sc.open_tree("/", 1 << 20), errno.EINVAL, "open_tree(/): Invalid argument"),
        (lambda: sc.move_mount(BAD_FD, "/mnt"), errno.EBADF, "move_mount(/mnt): Bad file descriptor"),
        (lambda: sc.mount_setattr(BAD_FD, 1), errno.EBADF, "mount_setattr(fd 999, 0x1): Bad file descriptor"),
        (lambda: sc.mount_detached("nofs", []), errno.ENODEV, "fsopen(nofs): No such device"),
        (lambda: sc.clone(0x10000), errno.EINVAL, "clone(0x10000): Invalid argument"),
        (lambda: sc.landlock_scope(1 << 40), errno.EINVAL, "landlock_create_ruleset(): Invalid argument"),
    ],
)
@as_root
def test_an_error_names_the_call_and_its_arguments(call: Callable[[], object], number: int, text: str) -> None:
    with pytest.raises(OSError, match=re.escape(text)) as caught:
        call()
    assert caught.value.errno == number


@as_root
def test_no_overlayfs_comes_with_advice() -> None:
    with pytest.raises(OSError, match="load the module overlay"):
        sc.mount_detached("nofs", [])


@pytest.mark.parametrize(
    "call",
    [
        lambda: sc.unshare(sc.CLONE_NEWNS),
        lambda: sc.mount("x", "/tmp", "tmpfs"),
        lambda: sc.mount_detached("tmpfs", []),
        lambda: sc.open_tree("/"),
    ],
)
@in_own_process
def test_a_missing_capability_comes_with_advice(call: Callable[[], object]) -> None:
    drop_capabilities()
    with pytest.raises(OSError, match=r"lacks CAP_SYS_ADMIN .*--cap-add SYS_ADMIN") as caught:
        call()
    assert caught.value.errno == errno.EPERM


@pytest.mark.parametrize("call", [lambda: sc.clone(sc.CLONE_NEWUSER), lambda: sc.unshare(sc.CLONE_NEWUSER)])
@in_own_process
def test_switched_off_user_namespaces_come_with_advice(call: Callable[[], object]) -> None:
    if USER_NAMESPACES:
        own_user_namespace()
        Path("/proc/sys/user/max_user_namespaces").write_text("0\n")  # this namespace's own
    with pytest.raises(OSError, match=r"user\.max_user_namespaces") as caught:
        call()
    assert caught.value.errno == errno.ENOSPC


@as_root
def test_a_detached_filesystem_lives_as_long_as_its_descriptor() -> None:
    before = own_descriptors()
    mounted = Path("/proc/self/mountinfo").read_text()
    fd = sc.mount_detached("tmpfs", [("mode", "700"), ("size", "1m")], sc.MOUNT_ATTR_NOEXEC)
    try:
        assert Path("/proc/self/mountinfo").read_text() == mounted
        assert os.stat(fd).st_mode & 0o7777 == 0o700  # noqa: PTH116 - a descriptor
        os.close(os.open("a", os.O_CREAT | os.O_RDWR, dir_fd=fd))
        assert names(fd) == ["a"]
        space = os.statvfs(f"/proc/self/fd/{fd}")
        assert space.f_blocks * space.f_frsize == 1 << 20
    finally:
        os.close(fd)
    assert own_descriptors() == before


@as_root
def test_the_kernels_own_explanation_is_passed_on() -> None:
    before = own_descriptors()
    with pytest.raises(OSError, match=r"(?i)unknown parameter.*nonsense.*options \[\('nonsense', '1'\)\]") as caught:
        sc.mount_detached("tmpfs", [("nonsense", "1")])
    assert caught.value.errno == errno.EINVAL
    assert own_descriptors() == before


@as_root
def test_a_flag_is_not_a_string(tmp_path: Path) -> None:
    """`volatile` has no value, `lowerdir` has."""
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options: list[tuple[str, str | None]] = [
        (f"{name}dir", str(tmp_path / name)) for name in ("lower", "upper", "work")
    ]
    os.close(sc.mount_detached("overlay", [*options, ("volatile", None)]))
    with pytest.raises(OSError, match="volatile"):
        sc.mount_detached("overlay", [*options, ("volatile", "x")])


@as_root
def test_attributes_of_a_detached_mount() -> None:
    fd = sc.mount_detached("tmpfs", [])
    try:
        sc.mount_setattr(fd, sc.MOUNT_ATTR_RDONLY)
        with pytest.raises(OSError, match="Read-only file system"):
            os.mkdir("x", dir_fd=fd)
    finally:
        os.close(fd)


@as_root
def test_moving_a_mount_into_place_and_away(tmp_path: Path) -> None:
    own_mounts()
    fd = sc.mount_detached("tmpfs", [])
    os.mkdir("inside", dir_fd=fd)
    sc.move_mount(fd, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    clone = sc.open_tree(str(tmp_path))
    sc.umount(str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert names(clone) == ["inside"]


@as_root
def test_clone3_answers_with_pid_and_pidfd() -> None:
    pid, pidfd = sc.clone(sc.CLONE_NEWPID)
    if pid == 0:
        os._exit(7 if os.getpid() == 1 and pidfd == -1 else 1)
    assert f"Pid:\t{pid}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    assert os.waitid(os.P_PIDFD, pidfd, os.WEXITED).si_status == 7  # type: ignore[union-attr]


def test_landlock_abi_is_the_kernels() -> None:
    major, minor = (int(number) for number in os.uname().release.split(".")[:2])
    assert sc.landlock_abi() >= (6 if (major, minor) >= (6, 12) else 0)


@in_own_process
def test_no_landlock_is_version_0() -> None:
    # struct seccomp_data: the number of the call is at offset 0; answer ENOSYS to landlock_create_ruleset (444).
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x0005_0000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF_0000)]
    filters = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    install_seccomp(filters, len(program))
    assert sc.landlock_abi() == 0


def install_seccomp(filters: bytes, length: int) -> None:
    buffer = ctypes.create_string_buffer(filters)
    header = struct.pack("HxxxxxxQ", length, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


@as_root
def test_the_landlock_scope_confines_signals_and_abstract_sockets() -> None:
    parent, name = os.getppid(), f"\0tbench2-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as outside, socket.socket(socket.AF_UNIX) as client:
        outside.bind(name)
        outside.listen()
        os.kill(parent, 0)
        sc.landlock_scope(sc.LANDLOCK_SCOPE_SIGNAL | sc.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET)
        with pytest.raises(PermissionError):
            os.kill(parent, 0)
        with pytest.raises(PermissionError):
            client.connect(name)
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGKILL)  # its own are not out of scope
    os.waitpid(child, 0)
