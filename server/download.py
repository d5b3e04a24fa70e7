"""The default tasks' one download into the cache, however many servers and first resets want it at once."""

import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import filelock
import git

from tbench2_env.server.taskconfig import TaskError

#: Seconds that a second server waits for the first one's download.
_LOCK_TIMEOUT_S = 900
_DOWNLOAD_TIMEOUT_S = 60


def default_tasks(url: str, cache: Path) -> Path:
    """The folder of the tasks at `url` (a git repository, or a .zip archive of one) in the cache.

    Raises: TaskError naming the variable to set when they cannot be had.
    """
    target = cache / "terminal-bench-2"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(cache / "download.lock", timeout=_LOCK_TIMEOUT_S):
            if not target.is_dir():
                _download(url, target)
    except (git.GitCommandError, OSError, zipfile.BadZipFile) as error:
        reason = (error.stderr or "").strip() if isinstance(error, git.GitCommandError) else str(error)
        raise TaskError(
            f"the default tasks could not be fetched from {url}: {reason}; set TB2_TASKS_DIR to a checkout of "
            "terminal-bench-2, or TB2_REPO_URL to where they can be had"
        ) from None
    return target


def _download(url: str, target: Path) -> None:
    """Fetch beside the target and rename, so that a killed download leaves nothing half-made."""
    with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as folder:
        fresh = Path(folder, "tasks")
        if url.endswith(".zip"):
            _unzip(url, fresh)
        else:
            # No prompts: a wrong address must be an error, not a question for a password.
            git.Repo.clone_from(url, fresh, depth=1, env={"GIT_TERMINAL_PROMPT": "0"}).close()
        fresh.rename(target)


def _unzip(url: str, target: Path) -> None:
    archive = target.with_suffix(".zip")
    with urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT_S) as response, archive.open("wb") as file:
        shutil.copyfileobj(response, file)
    unpacked = target.with_suffix(".unpacked")
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(unpacked)
    # GitHub's archives hold one folder, named after the branch.
    (single,) = unpacked.iterdir()
    single.rename(target)
