"""The kinds of pool node that are imitated. Each is entered by a process of real root, which then is on that node.

nobody          user and group 65534, no other groups, no capabilities, on this machine as it is
enroot-ext4     a container of enroot 4.1.2 (`enroot start --root --rw`), its image unpacked to a folder
enroot-overlay  the same, started from an image file: the container's root is an overlay
no-userns       real root, and no user namespace can be made (by a filter: see `filters.refuse_user_namespaces`)

In an enroot container one unprivileged user owns every file and is root of a user namespace with that single id.
Processes, network, IPC and hostname are the node's, and so are /proc, /sys and /dev; nothing can be gained by setuid
programs; chown, set*id and setgroups answer success without doing anything.
"""

import os
from collections.abc import Callable
from pathlib import Path

from hosts import bookworm, filters, mounts
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import userns

NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Makes the calling process one on the node; `folder` is an empty folder for the node's files. Answers with the
#: environment variables that differ there.
Enter = Callable[[Path], dict[str, str]]


def enter_nobody(folder: Path) -> dict[str, str]:
    mounts.private_namespace()
    mounts.give(mounts.suite_folders(), NOBODY)
    home, tmp = folder / "home", folder / "tmp"
    for made in (home, tmp, folder):
        made.mkdir(exist_ok=True)
        os.chown(made, NOBODY, NOBODY)
    _become(NOBODY)
    return {"HOME": str(home), "TMPDIR": str(tmp), "USER": "nobody", "LOGNAME": "nobody"}


def enter_enroot_ext4(folder: Path) -> dict[str, str]:
    return _enter_enroot(folder, on_overlay=False)


def enter_enroot_overlay(folder: Path) -> dict[str, str]:
    return _enter_enroot(folder, on_overlay=True)


def _enter_enroot(folder: Path, *, on_overlay: bool) -> dict[str, str]:
    mounts.private_namespace()
    image, root, tmpfs = bookworm.folder(folder), folder / "root", folder / "tmpfs"
    if on_overlay:
        root.mkdir()
    else:
        bookworm.copy(image, root)
    tmpfs.mkdir()
    for made in (folder, root, tmpfs):
        os.chown(made, bookworm.OWNER, bookworm.OWNER)
    mounts.give(mounts.suite_folders(), bookworm.OWNER)
    _become(bookworm.OWNER)
    _become_root_of_user_namespace()
    mounts.mount_container_root(root, image if on_overlay else None, tmpfs)
    mounts.enter_container(root, mounts.suite_folders())
    sc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    filters.fake_ids()
    # Scratch cannot be on an overlay: there it goes to the tmpfs on /tmp.
    return {"HOME": "/root", "TMPDIR": "/tmp" if on_overlay else "/var/tmp", "USER": "root", "LOGNAME": "root"}


def enter_without_user_namespaces(folder: Path) -> dict[str, str]:
    """Forks: the caller comes back as the child, and its parent answers for the filter."""
    listener = filters.refuse_user_namespaces()
    pid = os.fork()
    if pid:
        filters.answer_clone3(listener, os.pidfd_open(pid))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    os.close(listener)
    return {"TMPDIR": str(folder)}


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    sc.prctl(sc.PR_SET_DUMPABLE, 1)  # after a change of ids /proc/self is root's


def _become_root_of_user_namespace() -> None:
    uid = os.getuid()
    mounts.private_namespace(sc.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    userns.write_maps("/proc", os.getpid(), f"0 {uid} 1\n")


NODES: dict[str, Enter] = {
    "nobody": enter_nobody,
    "enroot-ext4": enter_enroot_ext4,
    "enroot-overlay": enter_enroot_overlay,
    "no-userns": enter_without_user_namespaces,
}


def run_on(node: str, folder: Path, command: list[str]) -> None:
    """Replace this process by `command` on the node, in the folder that the checkout is in."""
    changes = NODES[node](folder)
    os.chdir(mounts.CHECKOUT)
    os.execvpe(command[0], command, os.environ | {"PATH": _PATH, "TB2_TEST_NODE": node} | changes)
