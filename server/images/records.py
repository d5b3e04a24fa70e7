"""Small JSON documents by name, each replaced as a whole: pins of tags, configurations of images."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: A temporary file that is older is a dead process's.
_STALE_S = 3600


class Records:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> dict[str, Any] | None:
        """What was put under `name`, or None; broken JSON is None too."""
        value = (read_json(self._file(name)) or {}).get("value")
        return value if isinstance(value, dict) else None

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Raises: OSError."""
        target = self._file(name)
        fresh = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
        with fresh.open("x") as file:
            json.dump({"name": name, "value": dict(value)}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
        sync_folder(self._folder)

    def clear(self) -> None:
        """Forget all. Raises: OSError."""
        for path in self._folder.glob("[!.]*.json"):
            path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        found = [read_json(path) for path in self._folder.glob("[!.]*.json")]
        return sorted(record["name"] for record in found if record and isinstance(record.get("name"), str))

    def sweep(self) -> None:
        """Delete what killed processes left."""
        for file in self._folder.glob(".*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > _STALE_S:
                    file.unlink()

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when there is no file, or no JSON object in it."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def sync_folder(path: Path) -> None:
    """Write the folder's entries to the disk, so that a rename outlives a power cut."""
    with opened(path) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
