"""Exits 0 if a new interactive bash of root has what the instruction asks for."""

import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROBLEMS = []


def interactive(script: str, path: str = PLAIN_PATH) -> str:
    """The standard output of a new interactive bash in a session of its own, so that job control cannot stop it."""
    done = subprocess.run(
        ["bash", "-ic", script], env={"HOME": "/root", "PATH": path, "TERM": "dumb"}, cwd=folder, timeout=8,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    )  # fmt: skip
    return done.stdout


def check(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        PROBLEMS.append(f"FAILED: {what}: {found!r}, not {wanted!r}")


with tempfile.TemporaryDirectory() as folder:
    spaced = Path(folder, "bird notes")
    spaced.mkdir()
    check("output of a new shell", interactive("true"), "")
    check("FIELD_NOTES", interactive("""bash --norc -c 'printf %s "$FIELD_NOTES"'"""), "/root/field-notes")
    check("the kinds of jot and mkcd", interactive("type -t jot mkcd").split(), ["alias", "function"])
    interactive(f"FIELD_NOTES='{spaced}'\njot two herons\njot one wren")
    today = spaced / "today.txt"
    check("today.txt", today.read_text() if today.is_file() else None, "two herons\none wren\n")
    check("mkcd", interactive("mkcd 'new pond/reed bed' && pwd"), f"{folder}/new pond/reed bed\n")
    for path in (PLAIN_PATH, f"{PLAIN_PATH}:/root/bin"):
        entries = interactive('. /root/.bashrc; . /root/.bashrc; printf %s "$PATH"', path).split(":")
        check("the first of PATH", entries[0], "/root/bin")
        check("/root/bin in PATH", entries.count("/root/bin"), 1)
        check("the rest of PATH", set(PLAIN_PATH.split(":")) - set(entries), set())

print("\n".join(PROBLEMS))
sys.exit(1 if PROBLEMS else 0)
