"""User namespaces: maps, a namespace as an id map, root inside one."""

import errno
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import pytest

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation import userns

from .child import as_root
from .rig import BEST_RUNG, USER_NAMESPACES, children, own_descriptors

P = ParamSpec("P")


def in_user_namespaces(test: Callable[P, None]) -> Callable[P, None]:
    """Run the test in a process of its own. Where there are no user namespaces, it must say how to get them."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if USER_NAMESPACES:
            test(*args, **kwargs)
        else:
            with pytest.raises(OSError, match="user namespaces are switched off"):
                sc.clone(sc.CLONE_NEWUSER)

    return as_root(run)


@in_user_namespaces
def test_maps_of_users_and_groups() -> None:
    pid, pidfd = sc.clone(sc.CLONE_NEWUSER)
    if pid == 0:
        signal.pause()
    userns.write_maps("/proc", pid, BEST_RUNG.map_line)
    for name in ("uid_map", "gid_map"):
        assert Path(f"/proc/{pid}/{name}").read_text().split() == BEST_RUNG.map_line.split()
    with pytest.raises(OSError, match=rf"write\(/proc/{pid}/uid_map, '0 0 1\\n'\)") as caught:
        userns.write_maps("/proc", pid, "0 0 1\n")  # only once in a namespace's life
    assert caught.value.errno == errno.EPERM
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


@in_user_namespaces
def test_a_namespace_that_only_is_an_id_map(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = own_descriptors()
    ids = userns.open_mapped(BEST_RUNG.map_line)
    assert children(os.getpid()) == [], "no process stays in it"
    assert str(Path(f"/proc/self/fd/{ids}").readlink()).startswith("user:[")
    if BEST_RUNG.idmapped:
        tree = sc.open_tree(str(tmp_path))
        sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, ids)
        assert os.stat("file", dir_fd=tree).st_uid == 100_000
        os.close(ids)
        ids = tree
        assert os.stat("file", dir_fd=tree).st_gid == 100_000
    os.close(ids)
    assert own_descriptors() == before


@in_user_namespaces
def test_a_map_that_is_refused_leaves_nothing() -> None:
    before = own_descriptors()
    with pytest.raises(OSError, match=r"uid_map, 'nonsense'"):
        userns.open_mapped("nonsense")
    assert own_descriptors() == before
    assert children(os.getpid()) == []
