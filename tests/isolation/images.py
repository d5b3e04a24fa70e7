"""Stored layers as overlayfs takes them, among them a small image of its own."""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.rootfs import make_rootfs
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Network, Rung, SandboxSpec

from .rig import ROOT_IS_OVERLAY, Rig, fresh_name

#: Overlayfs takes no whiteouts, so that no layer can be kept on it.
STORE = "/tmp" if ROOT_IS_OVERLAY else "/var/tmp"
_PROGRAMS = ("bash", "cat", "chmod", "chown", "id", "ln", "ls", "mkdir", "mkfifo", "mv", "rm", "stat", "touch")


class Layers:
    """Makes layers in a folder of the host, owned and marked as a rung wants them."""

    def __init__(self, folder: Path, rung: Rung) -> None:
        self.folder, self._rung = folder, rung

    def add(
        self, files: Mapping[str, str] = {}, *, gone: Iterable[str] = (), opaque: Iterable[str] = (), name: str = ""
    ) -> str:
        """A layer's root. `gone` are whiteouts, `opaque` folders that hide what is below."""
        root = self.folder / (name or fresh_name())
        root.mkdir()
        for path in opaque:
            (root / path).mkdir(parents=True)
            os.setxattr(root / path, f"{self._rung.xattr_prefix}.overlay.opaque", b"y")
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        for path in gone:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.mknod(root / path, stat.S_IFCHR, os.makedev(0, 0))
        return self._own(root)

    def image(self) -> str:
        """A small root of its own with a folder /opt/t to change."""
        root = self.folder / fresh_name()
        make_rootfs(root, _PROGRAMS)
        (root / "opt/t/folder").mkdir(parents=True)
        for name in ("opt/t/kept", "opt/t/changed", "opt/t/removed", "opt/t/folder/a", "opt/t/folder/b"):
            (root / name).write_text(f"{Path(name).name}\n")
        return self._own(root)

    def _own(self, root: Path) -> str:
        if self._rung.has_id_range:
            shift = self._rung.owner_shift
            for path in (root, *root.rglob("*")):
                os.chown(path, shift, shift, follow_symlinks=False)
        return str(root)


async def create(
    rig: Rig, stored: Iterable[str], *layers: str, over_node: bool = False, building: bool = False
) -> Sandbox:
    return await rig.create_as(
        SandboxSpec(fresh_name(), layers, Network.PRIVATE, stored=tuple(stored), over_node=over_node, building=building)
    )
