"""A verifier's clean start: which of the agent's changes it does not see.

Its environment is made anew and bash reads no start-up file for a script, so what is left are files that programs read
by themselves. Some of them no honest work needs a verifier to have (`trusted.Trusted.never`, with the reasons): these
it never sees. Others may be the very task (~/.bashrc, /etc/profile.d, a tool in /usr/local/bin, a python package): it
sees them and they are reported; with TB2_TAMPER=restore it sees what was there before the agent instead.
"""

import posixpath
from collections.abc import Iterable

from tbench2_env.isolation.changes import Change, Kind
from tbench2_env.isolation.spec import Cover
from tbench2_env.server.tampered import Tampered


def covers(found: Iterable[Tampered], *, restore: bool) -> list[Cover]:
    """What the verifier's own mounts are to hide, and to restore, folder by folder.

    Of what lies in the root folder only files can be hidden. What a change of a folder as a whole (renamed, replaced,
    unreadable) brought cannot be undone here, and is reported only.
    """
    hidden: dict[str, set[str]] = {}
    restored: dict[str, set[str]] = {}
    for each in found:
        if each.never or restore:
            folder, name = posixpath.split(each.change.path)
            kind = _what_to_do(each.change)
            if kind is not None and name:
                (hidden if kind is Kind.ADDED else restored).setdefault(folder, set()).add(name)

    def sorted_names(of: dict[str, set[str]], folder: str) -> tuple[str, ...]:
        return tuple(sorted(of.get(folder, ())))

    made = [
        Cover(folder, sorted_names(hidden, folder), sorted_names(restored, folder))
        for folder in sorted({*hidden, *restored})
    ]
    return [cover for cover in made if not _is_inside_hidden(cover.folder, hidden)]


def _what_to_do(change: Change) -> Kind | None:
    """ADDED: hide it; MODIFIED: restore it; None: neither can be done."""
    if change.kind in (Kind.UNREADABLE, Kind.RENAMED, Kind.REPLACED):
        return None
    return Kind.ADDED if change.before is None else Kind.MODIFIED


def _is_inside_hidden(folder: str, hidden: dict[str, set[str]]) -> bool:
    while folder not in ("/", ""):
        folder, name = posixpath.split(folder)
        if name in hidden.get(folder, ()):
            return True
    return False
