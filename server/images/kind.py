"""How the files of stored layers are owned and marked, which depends on the rung that will use them."""

import os
from dataclasses import dataclass
from typing import Self

from tbench2_env.isolation.spec import Rung
from tbench2_env.server.images.layer import Owner


@dataclass(frozen=True)
class Kind:
    """Kinds do not mix, so each has a store of its own.

    `owner_shift` is added to ids of the image. `has_ids` false: everything belongs to our own uid, and chown is not
    tried. `xattr_prefix`: "trusted", or "user" in a user namespace.
    """

    owner_shift: int
    has_ids: bool
    xattr_prefix: str

    @classmethod
    def of(cls, rung: Rung) -> Self:
        return cls(rung.owner_shift, rung.has_id_range, rung.xattr_prefix or "trusted")

    @property
    def name(self) -> str:
        return f"shift-{self.owner_shift}" if self.has_ids else "one-id"

    @property
    def opaque(self) -> str:
        """The attribute of an opaque folder that overlayfs looks for; its value is "y"."""
        return f"{self.xattr_prefix}.overlay.opaque"

    @property
    def owner(self) -> Owner:
        return Owner(self.owner_shift, self.has_ids)

    def image_ids(self, info: os.stat_result) -> tuple[int, int]:
        """(uid, gid) in the image of what is on the disk."""
        return (info.st_uid - self.owner_shift, info.st_gid - self.owner_shift) if self.has_ids else (0, 0)
