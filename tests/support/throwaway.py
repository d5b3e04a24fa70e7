"""Run a program on a copy of this node that is thrown away: `python throwaway.py FOLDER [--nobody] -- PROGRAM...`.

Its root is an overlay of ours with the upper in memory, FOLDER is shared with us. The program replaces this process. It
may do what root may, or nobody, but without CAP_SYS_ADMIN and in a chroot, so that no namespace can be made there.
"""

import argparse
import os
from pathlib import Path

from tbench2_env.isolation import capabilities
from tbench2_env.isolation import syscalls as sc

THROWAWAY = str(Path(__file__))
NOBODY = 65534


def enter(shared: Path, *, nobody: bool) -> None:
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", flags=sc.MS_REC | sc.MS_PRIVATE)
    memory = shared / "memory"
    memory.mkdir(exist_ok=True)
    sc.mount("tmpfs", str(memory), "tmpfs", options="mode=755")
    root, upper, work = (memory / name for name in ("root", "upper", "work"))
    for folder in (root, upper, work):
        folder.mkdir()
    sc.mount("overlay", str(root), "overlay", options=f"lowerdir=/,upperdir={upper},workdir={work}")
    for place in ("/proc", "/sys", "/dev", str(shared)):
        sc.mount(place, f"{root}{place}", flags=sc.MS_BIND | (0 if place == str(shared) else sc.MS_REC))
    if nobody:  # the interpreter may be in root's home
        for closed in ("/root", *map(str, shared.parents)):
            Path(f"{root}{closed}").chmod(0o755)
    os.chroot(root)
    os.chdir("/")
    sc.prctl(sc.PR_CAPBSET_DROP, capabilities.SYS_ADMIN)
    if nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shared", type=Path)
    parser.add_argument("--nobody", action="store_true")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    enter(arguments.shared, nobody=arguments.nobody)
    os.execvp(arguments.command[0], arguments.command)


if __name__ == "__main__":
    main()
