"""A verifier's clean start: which of the agent's changes it does not see.

Its environment is made anew and bash reads no start-up file for a script, so what is left are files that programs read
by themselves. Some of them no honest work needs a verifier to have (`trusted.Trusted.never`, with the reasons): these
it never sees. Others may be the very task (~/.bashrc, /etc/profile.d, a tool in /usr/local/bin, a python package): it
sees them and they are reported; with TB2_TAMPER=restore it sees what was there before the agent instead.
"""

import posixpath
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from tbench2_env.isolation.changes import Change, Kind
from tbench2_env.isolation.spec import Cover
from tbench2_env.server.tampered import Tampered

_Names = dict[str, set[str]]
#: Folders of HOME that honest agents keep on another disk, by a link; what is in them is then not hidden.
_MAY_BE_ELSEWHERE = (".cache",)


class CannotHide(Exception):
    """A change that verifiers must not see cannot be put out of their sight."""


@dataclass(frozen=True)
class Shared:
    """Folders that have no covers, because the agent's services and the tests meet there.

    In the root folder and in `home` itself files can be blanked; in `workdir` and below nothing is touched.
    """

    home: str
    workdir: str

    def has_blanks(self, folder: str) -> bool:
        return folder in ("/", self.home.rstrip("/"))

    def is_untouched(self, folder: str) -> bool:
        return self.workdir != "/" and f"{folder}/".startswith(f"{self.workdir.rstrip('/')}/")


def covers(found: Iterable[Tampered], shared: Shared, *, restore: bool) -> list[Cover]:
    """What the verifier's own mounts are to hide, to restore and to blank, folder by folder.

    Raises: CannotHide for what cannot be undone so, if verifiers must never see it; else it is reported only.
    """
    hidden: dict[str, set[str]] = {}
    restored: dict[str, set[str]] = {}
    blank: dict[str, set[str]] = {}
    for each in found:
        if not each.never and not restore:
            continue
        folder, name = posixpath.split(each.change.path)
        into = None if shared.is_untouched(folder) else _where(each.change, shared, (hidden, restored, blank))
        if into is not None:
            into.setdefault(folder, set()).add(name)
        elif each.never and name not in _MAY_BE_ELSEWHERE:
            raise CannotHide(each.change.path)
    made = [
        Cover(folder, *(tuple(sorted(names.get(folder, ()))) for names in (hidden, restored, blank)))
        for folder in sorted({*hidden, *restored, *blank})
    ]
    return [cover for cover in made if not _is_inside_hidden(cover.folder, hidden)]


def _where(change: Change, shared: Shared, lists: tuple[_Names, _Names, _Names]) -> _Names | None:
    """The list that a change belongs on; None: on none of them."""
    hidden, restored, blank = lists
    if change.kind in (Kind.UNREADABLE, Kind.RENAMED, Kind.REPLACED):
        return None
    if shared.has_blanks(posixpath.dirname(change.path)):
        is_file = change.now is not None and stat.S_ISREG(change.now.st_mode)
        return blank if is_file and change.before is None else None
    return hidden if change.before is None else restored


def _is_inside_hidden(folder: str, hidden: _Names) -> bool:
    while folder not in ("/", ""):
        folder, name = posixpath.split(folder)
        if name in hidden.get(folder, ()):
            return True
    return False
