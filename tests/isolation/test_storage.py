"""When a worktree is walked: not in vain, and not too late."""

import os
import time
from pathlib import Path

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Limits
from tbench2_env.isolation.storage import Drain, Storage

from .child import as_root, in_own_process, own_mounts

_MIB = 1 << 20


@as_root
def test_writes_that_deletions_hide_are_seen_later(tmp_path: Path) -> None:
    own_mounts()
    sc.mount("tmpfs", str(tmp_path), "tmpfs", options="size=64m")  # nobody else writes here
    os.chdir(tmp_path)
    Path("upper").mkdir()
    Path("other").write_bytes(bytes(32 * _MIB))
    drain = Drain()
    drain.look()
    storage = Storage("upper", Limits(storage_bytes=16 * _MIB), drain)
    storage.touched = True
    Path("other").unlink()
    Path("upper/large").write_bytes(bytes(20 * _MIB))
    drain.look()
    assert not storage.is_due()
    time.sleep(5.1)
    assert storage.is_due()
    assert storage.advance(1)
    assert storage.exceeded() == "storage"


@in_own_process
def test_an_idle_worktree_is_not_walked(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    Path("upper").mkdir()
    drain = Drain()
    drain.look()
    storage = Storage("upper", Limits(storage_bytes=_MIB), drain)
    assert not storage.is_due()
    drain.size += _MIB
    assert not storage.is_due(), "it is empty, so all of its limit is left"
    drain.size += 1
    time.sleep(0.2)
    assert storage.is_due(), "and it has rested"


@in_own_process
def test_a_worktree_that_is_gone_is_no_error(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    storage = Storage("upper", Limits(storage_bytes=_MIB), Drain())
    assert storage.advance(1)
    assert (storage.size, storage.exceeded()) == (0, None)
    storage.close()
