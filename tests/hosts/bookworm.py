"""A Debian bookworm, unpacked once to a folder that belongs to one unprivileged user and is then kept."""

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

#: User and group that own everything in it.
OWNER = 54321
#: What the suites' episodes and tests run, beyond the essential packages.
_PACKAGES = ("python3", "git", "curl", "ca-certificates", "procps", "psmisc", "gcc", "libc6-dev", "make", "xz-utils")
VARIABLE = "TB2_TEST_BOOKWORM"


def kept_at() -> Path:
    """`TB2_TEST_BOOKWORM`, else a folder in /var/tmp whose name changes with what is in it."""
    digest = hashlib.sha256(f"{OWNER} {_PACKAGES}".encode()).hexdigest()[:8]
    return Path(os.environ.get(VARIABLE) or f"/var/tmp/tbench2-bookworm-{digest}")


def folder(workshop: Path) -> Path:
    """The kept folder; made in `workshop`, on the same filesystem, if there is none. Not to be written to."""
    kept = kept_at()
    if not kept.exists():
        new = workshop / "bookworm"
        _build(new)
        with contextlib.suppress(OSError):  # somebody else was faster
            new.rename(kept)
    return kept


def copy(kept: Path, to: Path) -> None:
    """A copy that may be written to, but for the insides of files in /usr: copies take long, so they are links."""
    to.mkdir()
    for entry in kept.iterdir():
        links = ["--link"] if entry.name == "usr" else []
        subprocess.run(["cp", "--archive", *links, entry, to], check=True)


def _build(new: Path) -> None:
    sys.stderr.write(f"making the bookworm folder {kept_at()} with debootstrap; this takes a minute\n")
    build = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm", str(new)]
    # Its words only when it fails; a mount that it leaves ends with our mount namespace.
    done = subprocess.run(build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"debootstrap failed: {done.stdout.decode(errors='replace')[-2000:]}")
    useless = [*new.glob("var/cache/apt/archives/*.deb"), *new.glob("var/lib/apt/lists/*"), new / "proc", new / "sys"]
    subprocess.run(["rm", "-rf", *useless], check=True)
    for name in ("proc", "sys"):
        (new / name).mkdir()
    subprocess.run(["chown", "--recursive", "--no-dereference", f"{OWNER}:{OWNER}", new], check=True)
