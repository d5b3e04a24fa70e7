"""What the stores of one cache hold, and for which tasks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tbench2_env.server.images.store import Kind, LayerUsage, Store

_RECORD = "environment of "
_SHIFTED = re.compile(r"shift-(\d+)")


@dataclass(frozen=True)
class Use:
    """A task's environment as it was last prepared: `layers` are ids in the store, `source` says what it is."""

    task_id: str
    source: str
    layers: tuple[str, ...]

    @classmethod
    def from_record(cls, name: str, record: Mapping[str, object]) -> Self:
        layers = record.get("layers")
        ids = tuple(map(str, layers)) if isinstance(layers, list) else ()
        return cls(name.removeprefix(_RECORD), str(record.get("source", "")), ids)


def remember(store: Store, use: Use) -> None:
    """Keep for which task the layers are. Raises: StoreReadOnly, OSError."""
    store.put_record(_RECORD + use.task_id, {"source": use.source, "layers": list(use.layers)})


@dataclass(frozen=True)
class Inventory:
    """A store's layers, the least recently used first, and what they are for, by task."""

    store: Store
    layers: Sequence[LayerUsage]
    uses: Sequence[Use]

    @classmethod
    def of(cls, store: Store) -> Self:
        """Blocks: it looks at every layer's description."""
        names = [name for name in store.record_names() if name.startswith(_RECORD)]
        uses = [Use.from_record(name, store.get_record(name) or {}) for name in names]
        return cls(store, store.usage(), uses)

    def tasks(self, layer_id: str) -> list[str]:
        """Whose environments have the layer."""
        return [use.task_id for use in self.uses if layer_id in use.layers]

    def unused(self) -> list[str]:
        """Layers that are in no task's environment."""
        used = {layer_id for use in self.uses for layer_id in use.layers}
        return [layer.id for layer in self.layers if layer.id not in used]

    def own(self, use: Use) -> list[str]:
        """Layers of this environment that are in no other task's."""
        return [layer_id for layer_id in use.layers if self.tasks(layer_id) == [use.task_id]]

    def bytes(self, layer_ids: Iterable[str]) -> int:
        """Bytes on the disk that the layers take, each counted once; absent ones take none."""
        wanted = set(layer_ids)
        return sum(layer.bytes for layer in self.layers if layer.id in wanted)

    @property
    def bytes_without_sharing(self) -> int:
        """What the layers would take if no two environments had one in common."""
        return sum(self.bytes(use.layers) for use in self.uses) + self.bytes(self.unused())


def inventories(folder: Path) -> list[Inventory]:
    """Of every kind of store in the cache's folder of stores. Nothing is made there."""
    kinds = [(path, kind) for path in sorted(folder.glob("*")) if (kind := _kind(path.name)) is not None]
    return [Inventory.of(Store(path.parent, kind)) for path, kind in kinds]


def _kind(name: str) -> Kind | None:
    if name == "one-id":
        return Kind(0, False, "user")
    match = _SHIFTED.fullmatch(name)
    return None if match is None else Kind(int(match[1]), True, "trusted")
