"""Git checkouts made by a test."""

import subprocess
from pathlib import Path

_CONFIG = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    """Run git in `folder`; answers with what it prints."""
    done = subprocess.run(
        ["git", *_CONFIG, "-c", "safe.directory=*", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit_all(folder: Path) -> str:
    """Make `folder` a repository, if it is none, and commit all that is in it; answers with the commit's id."""
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "tasks")
    return git(folder, "rev-parse", "HEAD")
