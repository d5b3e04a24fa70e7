"""The kernel's interface: constants and structs under their kernel names, one thin wrapper per system call.

Every wrapper raises `OSError` through `_check`, which names the call, its arguments and, for the errors that hosts
are set up to give, the setting that frees it. Numbers are those that x86_64 and aarch64 share; where the two differ
(mount, unshare, pivot_root, ...) the call goes through libc.
"""

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

# linux/sched.h
CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
CLONE_VM = 0x0000_0100
CLONE_PIDFD = 0x0000_1000
CLONE_PARENT = 0x0000_8000

# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x4_0000
MNT_DETACH = 2
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 0x4, 0x40
FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC = 1, 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
MOUNT_ATTR_IDMAP = 0x0010_0000
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000

TMPFS_MAGIC, OVERLAYFS_SUPER_MAGIC = 0x0102_1994, 0x794C_7630  # linux/magic.h
# linux/openat2.h
RESOLVE_NO_XDEV, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x1, 0x4, 0x8

# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36

# linux/landlock.h; scopes exist since ABI 6 (Linux 6.12)
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET, LANDLOCK_SCOPE_SIGNAL = 1, 2

_PROT_READ, _PROT_EXEC, _MAP_PRIVATE, _MAP_FAILED = 1, 4, 2, ctypes.c_void_p(-1).value  # sys/mman.h
# sigset_t of the C library
_SIG_SETMASK, _ALL_SIGNALS, _NO_SIGNALS = 2, b"\xff" * 128, bytes(128)

KEYCTL_JOIN_SESSION_KEYRING = 1  # linux/keyctl.h

_SYS = {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "openat2": 437, "mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_restrict_self": 446,
}  # fmt: skip

_CLONE = {"x86_64": 56, "aarch64": 220}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.pivot_root.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)

_USERNS_ADVICE = (
    "user namespaces are switched off on this host: raise the sysctl user.max_user_namespaces, set "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where they exist, or allow "
    "unshare and clone in the container's seccomp profile; root with CAP_SYS_ADMIN can do without"
)
_ADMIN_ADVICE = (
    "the process lacks CAP_SYS_ADMIN in its user namespace, or a seccomp or AppArmor profile blocks the call: run as "
    "root with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined --security-opt systempaths=unconfined) or inside an unprivileged user namespace (enroot)"
)
_APPARMOR_ADVICE = (
    "an AppArmor profile allows the user namespace but nothing in it: set kernel.apparmor_restrict_unprivileged_userns"
    "=0, or run unconfined (docker: --security-opt apparmor=unconfined)"
)
_PROC_ADVICE = (
    "parts of /proc are masked or read-only in this container, and the kernel then gives no fresh one: unmask it "
    "(docker, podman: --security-opt systempaths=unconfined)"
)
_UPPER_ADVICE = (
    "worktrees cannot lie on overlayfs, NFS or Lustre: let the scratch folder (TB2_SCRATCH_DIR) be on a local disk or "
    "a tmpfs"
)
#: (call, or what it was called for; error) -> what frees it.
_ADVICE = {
    ("new user namespace", errno.EPERM): _USERNS_ADVICE,
    ("new user namespace", errno.ENOSPC): _USERNS_ADVICE,
    ("new user namespace", errno.EUSERS): _USERNS_ADVICE,
    ("id map", errno.EPERM): _APPARMOR_ADVICE,
    ("id map", errno.EACCES): _APPARMOR_ADVICE,
    ("clone", errno.EPERM): _ADMIN_ADVICE,
    ("unshare", errno.EPERM): _ADMIN_ADVICE,
    ("mount", errno.EPERM): _ADMIN_ADVICE,
    ("mount", errno.EACCES): _APPARMOR_ADVICE,
    ("mount proc", errno.EPERM): _PROC_ADVICE,
    ("fsopen", errno.EPERM): _ADMIN_ADVICE,
    ("fsmount", errno.EPERM): _ADMIN_ADVICE,
    ("open_tree", errno.EPERM): _ADMIN_ADVICE,
    ("fsopen", errno.ENODEV): "the kernel has no overlayfs: load the module overlay",
    ("fsconfig upperdir", errno.EINVAL): _UPPER_ADVICE,
    ("fsconfig lowerdir+", errno.EINVAL): "a stack of many layers needs Linux 6.5",
}


def advice(what: str, number: int) -> str:
    """What frees a refused call, in brackets; empty when there is nothing to say."""
    found = _ADVICE.get((what, number))
    return f" ({found})" if found else ""


def _check(result: int, call: str, detail: object = "", what: str = "") -> int:
    """`what` the call was for, where that matters to who reads of its failure."""
    if result >= 0:
        return result
    number = ctypes.get_errno()
    raise OSError(number, f"{call}({detail}): {os.strerror(number)}{advice(what or call, number)}")


def _syscall(call: str, *args: object, detail: object = "", what: str = "") -> int:
    ctypes.set_errno(0)
    return _check(_libc.syscall(ctypes.c_long(_SYS[call]), *args), call, detail, what)


def _long(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)


def clone(flags: int) -> tuple[int, int]:
    """Fork into new namespaces: (pid, pidfd) in the parent, (0, -1) in the child.

    Not fork + unshare, because the child must be PID 1 of its namespace and the caller must stay outside its user
    namespace; and not clone3, which containers' seccomp profiles hide because they cannot look into its arguments.
    """
    pidfd = ctypes.c_int(-1)
    # The third argument of both machines' clone, where CLONE_PIDFD puts the descriptor; the rest is zero (clone(2)).
    arguments = (_long(flags | CLONE_PIDFD | signal.SIGCHLD), None, ctypes.byref(pidfd), None, None)
    result = _libc.syscall(_long(_CLONE[os.uname().machine]), *arguments)
    pid = _check(result, "clone", f"0x{flags:x}", _what(flags, "clone"))
    return pid, pidfd.value if pid else -1


def cloned(result: int, flags: int) -> int:
    """The pid that a clone of our own answered with. Raises: OSError."""
    if result < 0:
        ctypes.set_errno(-result)
    return _check(result, "clone", f"0x{flags:x}", _what(flags, "clone"))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare", f"0x{flags:x}", _what(flags, "unshare"))


def _what(flags: int, call: str) -> str:
    return "new user namespace" if flags & CLONE_NEWUSER else call


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns", f"fd {fd}, 0x{kind:x}")


def mount(source: str, target: str, fstype: str = "", flags: int = 0, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), fstype.encode() or None, flags, options.encode() or None)
    detail = f"{source}, {target}, {fstype or 'bind'}, 0x{flags:x}, {options!r}"
    _check(result, "mount", detail, "mount proc" if fstype == "proc" else "")


def umount(target: str, flags: int = MNT_DETACH) -> None:
    _check(_libc.umount2(target.encode(), flags), "umount2", target)


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.pivot_root(new_root.encode(), put_old.encode()), "pivot_root", f"{new_root}, {put_old}")


def prctl(option: int, value: int = 0, argument: int = 0) -> None:
    _check(_libc.prctl(option, value, argument, 0, 0), "prctl", f"{option}, {value}")


def message_with_descriptors(lay: Callable[[bytes], int], payload: bytes, fds: Sequence[int]) -> int:
    """The address of a struct msghdr with SCM_RIGHTS for sendmsg(2); `lay` puts bytes into memory at an address."""
    rights = struct.pack(f"Qii{len(fds)}i", 16 + 4 * len(fds), socket.SOL_SOCKET, socket.SCM_RIGHTS, *fds)  # cmsghdr
    vector = struct.pack("2Q", lay(payload), len(payload))
    return lay(struct.pack("Qi4xQQQQi4x", 0, 0, lay(vector), 1, lay(rights), len(rights), 0))


def filesystem_type(path: str) -> int:
    """The magic number of the file system that `path` is on (statfs(2), linux/magic.h)."""
    buffer = ctypes.create_string_buffer(512)
    _check(_libc.statfs(path.encode(), buffer), "statfs", path)
    return int(struct.unpack_from("l", buffer)[0]) & 0xFFFF_FFFF


def syncfs(fd: int) -> None:
    """Write everything of the file system that `fd` is on to its disk."""
    _check(_libc.syncfs(fd), "syncfs", f"fd {fd}")


def open_folder_beneath(folder_fd: int, path: bytes) -> int:
    """The folder `path` below `folder_fd`, whatever somebody makes of the components of `path` at this moment."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    resolve = RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
    how = struct.pack("3Q", flags, 0, resolve)  # struct open_how: flags, mode, resolve
    return _syscall("openat2", _long(folder_fd), path, how, _long(len(how)), detail=path)


def open_tree(path: str, flags: int = OPEN_TREE_CLONE) -> int:
    """A detached, non-recursive clone of the mount at `path`, rooted there."""
    return _syscall("open_tree", _long(AT_FDCWD), path.encode(), _long(flags | OPEN_TREE_CLOEXEC), detail=path)


def move_mount(mount_fd: int, target: str) -> None:
    _syscall(
        "move_mount", _long(mount_fd), b"", _long(AT_FDCWD), target.encode(), _long(MOVE_MOUNT_F_EMPTY_PATH),
        detail=target,
    )  # fmt: skip


def mount_setattr(mount_fd: int, attr_set: int, userns_fd: int = 0, *, recursive: bool = False) -> None:
    """Change a detached mount: read-only, nosuid, ... or idmapped by the user namespace `userns_fd`."""
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    attr = struct.pack("4Q", attr_set, 0, 0, userns_fd)  # struct mount_attr: set, clr, propagation, userns_fd
    _syscall(
        "mount_setattr", _long(mount_fd), b"", _long(flags), attr, _long(len(attr)),
        detail=f"fd {mount_fd}, 0x{attr_set:x}",
    )  # fmt: skip


def mount_detached(fstype: str, options: Sequence[tuple[str, str | None]], attr: int = 0) -> int:
    """A new filesystem as a detached mount (fsopen, fsconfig, fsmount); returns its descriptor.

    Raises `OSError` with the kernel's own explanation, which it leaves to be read from the fsopen descriptor.
    """
    context = _syscall("fsopen", fstype.encode(), _long(FSOPEN_CLOEXEC), detail=fstype)
    try:
        for key, value in options:
            _fsconfig(context, FSCONFIG_SET_STRING if value is not None else FSCONFIG_SET_FLAG, key, value)
        _fsconfig(context, FSCONFIG_CMD_CREATE, None, None)
        return _syscall("fsmount", _long(context), _long(FSMOUNT_CLOEXEC), _long(attr), detail=fstype)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}{_kernel_log(context)}; options {list(options)}") from None
    finally:
        os.close(context)


def _fsconfig(context: int, command: int, key: str | None, value: str | None) -> None:
    encoded = [None if text is None else text.encode() for text in (key, value)]
    detail, what = f"{key}={value}", f"fsconfig {key}"
    _syscall("fsconfig", _long(context), _long(command), *encoded, _long(0), detail=detail, what=what)


def _kernel_log(context: int) -> str:
    try:
        lines = os.read(context, 4096).decode(errors="replace")
    except OSError:
        return ""
    return f" [{lines.strip()}]"


def map_code(fd: int, size: int) -> int:
    """Map a file's beginning for good, to be executed; answers with its address."""
    address = _libc.mmap(None, size, _PROT_READ | _PROT_EXEC, _MAP_PRIVATE, fd, 0)
    _check(-1 if address in (None, _MAP_FAILED) else 0, "mmap", f"fd {fd}, PROT_READ | PROT_EXEC")
    return int(address)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """All signals wait that can; none did before."""
    _libc.sigprocmask(_SIG_SETMASK, _ALL_SIGNALS, None)
    try:
        yield
    finally:
        _libc.sigprocmask(_SIG_SETMASK, _NO_SIGNALS, None)


def restore_thread_signals() -> None:
    """Give the two signals that the C library keeps to itself, and refuses to touch, their default action."""
    rt_sigaction = {"x86_64": 13, "aarch64": 134}.get(os.uname().machine)
    if rt_sigaction is not None:
        default = bytes(32)  # struct sigaction of the kernel: handler SIG_DFL, no flags, no restorer, an empty mask
        for number in (32, 33):
            _libc.syscall(_long(rt_sigaction), _long(number), default, None, _long(8))


def leave_session_keyring() -> None:
    """Join a new, empty session keyring. Keyrings are inherited, and whoever has one can read its keys.

    Where the call is refused (docker's seccomp profile) it is refused to those who come after, too; at the quota of
    keys of an unprivileged user, the keyring that the spawner joined, equally empty of the host's keys, is kept.
    """
    keyctl = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    if keyctl is not None:
        _libc.syscall(_long(keyctl), _long(KEYCTL_JOIN_SESSION_KEYRING), None)


def landlock_abi() -> int:
    """The kernel's landlock version, 0 when it has none."""
    try:
        return _syscall("landlock_create_ruleset", None, _long(0), _long(LANDLOCK_CREATE_RULESET_VERSION))
    except OSError:
        return 0


def landlock_scope(scoped: int) -> None:
    """Confine signals and abstract sockets of this process and its children to themselves.

    No file access is handled, so mounts inside the episode's own namespaces stay possible.
    """
    ruleset = struct.pack("3Q", 0, 0, scoped)  # struct landlock_ruleset_attr: fs, net, scoped
    fd = _syscall("landlock_create_ruleset", ruleset, _long(len(ruleset)), _long(0))
    try:
        _syscall("landlock_restrict_self", _long(fd), _long(0))
    finally:
        os.close(fd)
