"""A small root file system of its own, made of a few programs of this node, as images and bases are in tests."""

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

#: What tests of images run; sh is dash, where the node's is.
PROGRAMS = (
    "bash", "cat", "chmod", "chown", "cp", "env", "id", "ln", "ls", "mkdir", "mkfifo", "mktemp", "mv", "rm", "seq",
    "setsid", "sh", "sleep", "stat", "touch",
)  # fmt: skip


def make_rootfs(root: Path, programs: Iterable[str] = PROGRAMS) -> None:
    """Fill the folder `root`: programs with their shared libraries, users root and someone (33, also in crew, 44)."""
    for path in _with_libraries(tuple(programs)):
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.lstrip("/"))
    for link in (Path("/bin"), Path("/lib"), Path("/lib64")):
        if link.is_symlink():
            (root / link.name).symlink_to(link.readlink())
    (root / "home/someone").mkdir(parents=True)
    (root / "home/someone/note").write_text("of the image\n")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nsomeone:x:33:33::/home/someone:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\nsomeone:x:33:\ncrew:x:44:someone\n")
    (root / "etc/hosts").write_text("never seen\n")


@cache
def _with_libraries(names: tuple[str, ...]) -> list[str]:
    """Paths of programs, and of the libraries and the loader that they want; what lies behind /lib and the like."""
    programs = [found for name in names if (found := shutil.which(name, path="/usr/bin:/bin"))]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    wanted = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    return [str(path.parent.resolve() / path.name) for path in map(Path, (*programs, *sorted(wanted)))]
