"""The mask: the lower layer between the node's root and a task's, in a small tmpfs that all worktrees share.

It holds whiteouts over what an episode must not see, opaque folders that it has to itself, and a few files. It hides
the host and gives private folders at no cost per episode. Paths are relative to the ground's folder, the spawner's
working directory.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from tbench2_env.isolation.spec import HOSTNAME, PRIVATE_FOLDERS, SYSTEM_FOLDERS, Rung

_HOSTS = f"127.0.0.1\tlocalhost {HOSTNAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
#: Larger files of /etc are not copied where /etc is a copy: none of any use there is.
_COPIED_FILE_MAX_BYTES = 16 << 20
#: Links of a folder without folders: its name and its "."; file systems that do not count have other numbers, mostly 1.
_LEAF_LINKS = 2


def build(rung: Rung, hide: tuple[str, ...], own_folders: tuple[str, ...]) -> None:
    """Fill the mask; `own_folders` are the top-level folders that have an overlay each."""
    if own_folders:
        _name_system_folders(rung, own_folders)
    else:
        hide_new_names()
    for path, mode in PRIVATE_FOLDERS.items():
        _add_private_folder(rung, path, mode)
    for host_path in sorted({os.path.realpath(path) for path in hide}):
        _hide(rung, host_path)
    if own_folders:
        _copy_etc(rung)
    if rung.foreign:
        for name in own_folders:
            _take_folders(name)
    for relative, text in {**identity_files(), **apt_files(rung)}.items():
        _add_file(rung, relative, text)
    for name in (".bashrc", ".profile"):
        _add_file(rung, f"root/{name}", _read_or_empty(f"/etc/skel/{name}"))


def set_nameservers(rung: Rung, nameservers: Sequence[str]) -> None:
    """What resolv.conf says in worktrees to come."""
    _add_file(rung, "etc/resolv.conf", resolv_conf(nameservers))


def resolv_conf(nameservers: Sequence[str]) -> str:
    return "".join(f"nameserver {address}\n" for address in nameservers)


def identity_files() -> dict[str, str]:
    """Files of /etc that every episode has of its own: path below the root -> text."""
    resolv = _read_or_empty("/etc/resolv.conf")
    return {"etc/hosts": _HOSTS, "etc/hostname": HOSTNAME + "\n", "etc/resolv.conf": resolv}


def apt_files(rung: Rung) -> dict[str, str]:
    """Where an episode has one id only, apt must not try to download as a user of its own: that is fatal to it."""
    return {} if rung.has_id_range else {"etc/apt/apt.conf.d/99tbench2": 'APT::Sandbox::User "root";\n'}


def own(rung: Rung, path: str, uid: int = 0, gid: int = 0) -> None:
    """Give `path` to an id as the episode sees it."""
    if rung.has_id_range:
        os.chown(path, uid + rung.owner_shift, gid + rung.owner_shift, follow_symlinks=False)


def system_folders() -> list[str]:
    """The system folders that this node has, symbolic links to others among them."""
    return sorted(name for name in SYSTEM_FOLDERS if os.path.isdir(f"/{name}"))


def hide_new_names() -> bool:
    """White out top-level names that are neither system folders nor private ones; again at each create, cheaply.

    Answers whether there were new ones.
    """
    top = {path.split("/")[0] for path in PRIVATE_FOLDERS}
    names = [name for name in os.listdir("base") if name not in SYSTEM_FOLDERS and name not in top]
    return sum(_whiteout(name) for name in names) > 0


def is_hidden_already(path: str) -> bool:
    """Whether an absolute host path lies in a folder that no episode sees anyway."""
    relative = path.lstrip("/")
    inside = any(relative == folder or relative.startswith(folder + "/") for folder in PRIVATE_FOLDERS)
    return inside or relative.split("/")[0] not in SYSTEM_FOLDERS


def _hide(rung: Rung, path: str) -> None:
    if is_hidden_already(path) or _is_below_whiteout(path):
        return
    _add_parents(rung, path.lstrip("/"))
    _whiteout(path.lstrip("/"))


def _is_below_whiteout(path: str) -> bool:
    masked = (f"shared/mask/{parent}" for parent in Path(path.lstrip("/")).parents[:-1])
    return any(_is_whiteout(each) for each in masked)


def _is_whiteout(path: str) -> bool:
    return os.path.lexists(path) and stat.S_ISCHR(os.lstat(path).st_mode)


def _whiteout(relative: str) -> bool:
    """Whether there was none yet."""
    with contextlib.suppress(FileExistsError):
        os.mknod(f"shared/mask/{relative}", stat.S_IFCHR, os.makedev(0, 0))
        return True
    return False


# ---------------------------------------------------------------- folders
def _add_private_folder(rung: Rung, relative: str, mode: int) -> None:
    _add_parents(rung, relative)
    path = f"shared/mask/{relative}"
    os.mkdir(path)
    os.chmod(path, mode)
    own(rung, path)
    os.setxattr(path, f"{rung.xattr_prefix}.overlay.opaque", b"y")


def _add_parents(rung: Rung, relative: str) -> None:
    """Folders above a masked path look as they do below it: a merged folder's attributes are the topmost's."""
    for parent in reversed(Path(relative).parents[:-1]):
        _add_like_below(rung, str(parent))


def _add_like_below(rung: Rung, relative: str) -> None:
    path = f"shared/mask/{relative}"
    if not os.path.lexists(path):
        info = os.stat(f"/{relative}") if os.path.isdir(f"/{relative}") else None
        os.mkdir(path)
        os.chmod(path, stat.S_IMODE(info.st_mode) if info else 0o755)
        own(rung, path, info.st_uid if info else 0, info.st_gid if info else 0)


def _name_system_folders(rung: Rung, own_folders: tuple[str, ...]) -> None:
    """Mount points for the folders that have an overlay each, and the node's links to them (/bin -> usr/bin)."""
    for name in system_folders():
        if name in own_folders:
            _add_like_below(rung, name)
        else:
            os.symlink(os.readlink(f"/{name}"), f"shared/mask/{name}")


def _take_folders(name: str) -> None:
    """Make all folders of the node's `name` ours, so that files can be made, replaced and removed in them.

    There may be tens of thousands, hence nothing but one stat and one mkdir for each, and only those are opened that
    have folders in them.
    """
    umask = os.umask(0)
    folders = [name]
    while folders:
        parent = folders.pop()
        with contextlib.suppress(OSError), os.scandir(f"/{parent}") as entries:  # of no use to who may not read it
            folders += [f"{parent}/{entry.name}" for entry in entries if _take(parent, entry)]
    os.umask(umask)


def _take(parent: str, entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder with more below: what is hidden or private is left as it is."""
    relative = f"{parent}/{entry.name}"
    if not entry.is_dir(follow_symlinks=False) or relative in PRIVATE_FOLDERS:
        return False
    info = entry.stat(follow_symlinks=False)
    try:
        os.mkdir(f"shared/mask/{relative}", stat.S_IMODE(info.st_mode))
    except FileExistsError:
        return not _is_whiteout(f"shared/mask/{relative}")
    return info.st_nlink != _LEAF_LINKS


# ---------------------------------------------------------------- files
def _copy_etc(rung: Rung) -> None:
    """What of /etc this user may read, in folders, regular files and links, whatever is mounted there."""
    for parent, folders, files in os.walk("/etc"):
        if _is_below_whiteout(f"{parent}/any"):
            folders.clear()
            continue
        for path in (f"{parent}/{name}" for name in (*folders, *files)):
            if os.path.isdir(path) and not os.path.islink(path):
                _add_like_below(rung, path.lstrip("/"))
            else:
                _copy(path, f"shared/mask{path}")


def _copy(source: str, target: str) -> None:
    info = os.lstat(source)
    copied = stat.S_ISLNK(info.st_mode) or (stat.S_ISREG(info.st_mode) and info.st_size <= _COPIED_FILE_MAX_BYTES)
    if copied and not os.path.lexists(target) and (stat.S_ISLNK(info.st_mode) or os.access(source, os.R_OK)):
        shutil.copy2(source, target, follow_symlinks=False)


def _add_file(rung: Rung, relative: str, text: str) -> None:
    _add_parents(rung, relative)
    write_file(rung, Path("shared/mask", relative), text)


def write_file(rung: Rung, path: Path, text: str) -> None:
    """A file of root's for everybody to read, in the place of what has the name; the folder is there."""
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    own(rung, str(path))


def _read_or_empty(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
