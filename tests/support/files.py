"""Folders compared byte by byte."""

import hashlib
import os
from pathlib import Path


def picture(folder: Path) -> dict[str, tuple[int, str]]:
    """Mode and content (a digest, or a link's target) of everything below `folder`."""
    return {str(path.relative_to(folder)): (path.lstat().st_mode, _content(path)) for path in folder.rglob("*")}


def _content(path: Path) -> str:
    if path.is_symlink():
        return os.readlink(path)  # noqa: PTH115
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
