"""The frame: a thin layer over an image of its own, which has what an episode needs at fixed places whatever the image
holds: mount points, and the files of /etc that say who and where it is. As the mask, it is in the ground's tmpfs.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tbench2_env.isolation import mask
from tbench2_env.isolation.spec import Rung

_ROOT = "shared/frame"
#: Merged with the image's own, whose content shows; a merged folder's mode is the topmost's.
_FOLDERS = {
    "etc": 0o755, "logs": 0o755, "root": 0o700, "run": 0o755, "tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
#: Mounted over, so that nothing of the image's is in them.
_MOUNT_POINTS = {
    "proc": 0o555, "sys": 0o555, "dev": 0o755, "tests": 0o755, "logs/verifier": 0o755, "logs/toolchain": 0o755,
}  # fmt: skip


def build(rung: Rung) -> None:
    for path, mode in {"": 0o755, **_FOLDERS, **_MOUNT_POINTS}.items():
        _add_folder(rung, f"{_ROOT}/{path}", mode)
        if path in _MOUNT_POINTS:
            os.setxattr(f"{_ROOT}/{path}", f"{rung.xattr_prefix}.overlay.opaque", b"y")
    for path, text in {**mask.identity_files(), **mask.apt_files(rung)}.items():
        _add_file(rung, path, text)


def set_nameservers(rung: Rung, nameservers: Sequence[str]) -> None:
    """What resolv.conf says in episodes to come."""
    _add_file(rung, "etc/resolv.conf", mask.resolv_conf(nameservers))


def _add_folder(rung: Rung, path: str, mode: int) -> None:
    os.mkdir(path)
    os.chmod(path, mode)
    mask.own(rung, path)


def _add_file(rung: Rung, relative: str, text: str) -> None:
    path = Path(_ROOT, relative)
    for parent in reversed(path.parents):
        if not parent.exists():
            _add_folder(rung, str(parent), 0o755)
    mask.write_file(rung, path, text)
