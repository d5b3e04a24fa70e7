"""What a verifier trusts inside the worktree that the agent had: paths, and why, as data.

A verifier is `bash /tests/test.sh` and what such scripts run: coreutils, apt-get, curl, uv, pip, python and pytest.
Patterns are absolute, `~` is the home that verifiers have; `*` matches within one name, a last `**` everything below.
What is *not* here is left out on purpose: /etc/group, /etc/shadow and new users (tasks ask for them), services and
their configuration, ~/.ssh, conftest.py and pytest.ini of the working directory (see PYTEST).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trusted:
    """`patterns` are trusted as `reason`.

    `never`: a verifier does not take them from the agent, whatever TB2_TAMPER says, because no honest work needs a
    verifier to (`cleanstart`). `quiet`: and honest agents have them all the time, so it is nothing to report.
    """

    reason: str
    patterns: tuple[str, ...]
    never: bool = False
    quiet: bool = False


TRUSTED = (
    # No task installs one; a verifier's every program would run it.
    Trusted("the loader preloads it into every program", ("/etc/ld.so.preload",), never=True),
    # Test scripts fetch uv themselves and then source `env`, which the installer leaves as it finds it. Of uv's caches
    # it believes what is unpacked in them; without, it fetches anew.
    Trusted("uv's own programs, pythons and caches", (
        *(f"~/{folder}/{name}" for folder in (".local/bin", ".cargo/bin") for name in ("uv", "uvx", "env", "env.fish")),
        "~/.local/share/uv", "~/.cache/uv", "~/.cache/pip",
    ), never=True, quiet=True),
    # Test scripts say themselves where they install from; a task that wants pip configured means /etc/pip.conf.
    Trusted("read by pip or uv", (
        "~/.config/pip", "~/.pip", "~/.config/uv", "~/uv.toml", "/uv.toml",
    ), never=True, quiet=True),
    # With `output = /logs/verifier/reward.json` a harness's own curl forges the reward. What an agent wants of curl it
    # can say on its own command lines.
    Trusted("read by curl or wget", (
        "~/.curlrc", "~/.config/curlrc", "~/.wgetrc", "~/.netrc",
    ), never=True),
    Trusted("the loader finds libraries by it", ("/etc/ld.so.conf", "/etc/ld.so.conf.d/*")),
    Trusted("a folder of programs or libraries", ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")),
    Trusted("python's own start-up", ("/etc/python3*/**",)),
    # Beside the interpreter or one folder above it (docs.python.org, Modules/getpath.py).
    Trusted(
        "python finds its library by it",
        tuple(f"{folder}/{name}" for folder in ("/usr/bin", "/usr", "/usr/local/bin", "/usr/local")
              for name in ("pyvenv.cfg", "pybuilddir.txt")),
    ),
    Trusted("read by every bash or login", (
        "/etc/profile", "/etc/profile.d/*", "/etc/bash.bashrc", "/etc/bashrc", "/etc/environment",
        "~/.bashrc", "~/.profile", "~/.bash_profile", "~/.bash_login", "~/.bash_aliases", "~/.pam_environment",
    )),
    Trusted("read by pip, uv, curl, wget or git", (
        "/etc/pip.conf", "/etc/xdg/pip/**", "/etc/uv/**",
        "/etc/curlrc", "/etc/wgetrc",
        "/etc/gitconfig", "~/.gitconfig", "~/.config/git/**",
    )),
    Trusted("programs and libraries of the user", ("~/.local/bin/**", "~/.cargo/bin/**")),
    # Entries of other names in /etc/ssl/certs are not looked up by anybody: a task's own certificate may lie there.
    Trusted("what TLS clients trust", (
        "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/ssl/certs/ca-certificates.crt",
        "/etc/ssl/certs/????????.[0-9]",
        "/usr/lib/ssl/**", "/usr/share/ca-certificates/**", "/usr/local/share/ca-certificates/**",
    )),
    # It names libraries that every program loads which asks for a user or a host; no task needs another.
    Trusted("the libraries that find hosts and users", ("/etc/nsswitch.conf",), never=True),
    Trusted("how names of hosts and users are found", ("/etc/hosts", "/etc/resolv.conf")),
    Trusted("the users' shells and homes", ("/etc/passwd",)),
    Trusted("where apt gets packages from", (
        "/etc/apt/sources.list", "/etc/apt/sources.list.d/*", "/etc/apt/apt.conf", "/etc/apt/apt.conf.d/*",
        "/etc/apt/trusted.gpg", "/etc/apt/trusted.gpg.d/*", "/etc/apt/keyrings/*", "/etc/apt/preferences",
        "/etc/apt/preferences.d/*", "/etc/dpkg/**",
    )),
)  # fmt: skip

#: Read by pytest for tests in /tests: the folders above them are only / (docs.pytest.org, "rootdir"), whatever the
#: working directory is. Those of the working directory are work that tasks ask for.
PYTEST = Trusted("pytest reads it for /tests", tuple(
    f"/{name}" for name in ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml",
                            "pyproject.toml", "tox.ini", "setup.cfg", "setup.py")
), never=True)  # fmt: skip
#: `python3 -m pytest` imports these from the working directory before those that are installed. Others (json.py, ...)
#: it would take from there, too, but honest work has such names.
FROM_WORKDIR = Trusted("python -m pytest imports it from the working directory", tuple(
    f"{name}{suffix}" for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
    for suffix in ("", ".py", ".so")
))  # fmt: skip

_PROGRAMS = """
[[] awk base64 basename bash bunzip2 bzip2 cat chgrp chmod chown cmp comm cp curl cut dash date dd df diff dirname dpkg
du echo egrep env expr false fgrep file find gawk getent git grep gunzip gzip head hostname id install jq kill ldconfig
ln ls lsof make mawk md5sum mkdir mktemp mv nc netstat nohup od paste pgrep pkill printenv printf ps pwd readlink
realpath rm rmdir sed seq sh sha1sum sha256sum sha512sum sleep sort ss stat su sudo tac tail tar tee test
timeout touch tr true uname uniq unzip uv uvx wc wget which whoami xargs xxd xz yes zip
apt apt-* dpkg-* pip pip[0-9]* pipx py.test pytest python python[0-9]*
"""
#: Programs that verifiers run by name: one that is added to a folder of PATH is taken for theirs.
PROGRAMS = tuple(_PROGRAMS.split())
#: Of these a verifier runs the node's own, if the node has one and no package manager changed it, and none that stands
#: before it on PATH: no task asks for another bash or another cat, and these run before any test could notice.
CORE_PROGRAMS = (
    "[", "awk", "basename", "bash", "cat", "chmod", "chown", "cp", "cut", "dash", "dirname", "echo", "env", "expr",
    "false", "find", "gawk", "grep", "head", "id", "kill", "ln", "ls", "mawk", "mkdir", "mktemp", "mv", "printf",
    "ps", "pgrep", "pwd", "readlink", "realpath", "rm", "sed", "sh", "sleep", "sort", "stat", "tail", "tee", "test",
    "timeout", "touch", "tr", "true", "uname", "uniq", "wc", "which", "xargs",
)  # fmt: skip
#: What a harness fetches its tools with: the same.
FETCHING_PROGRAMS = ("curl", "wget", "uv", "uvx", "apt", "apt-get", "dpkg")
#: Of these, too, but a new one may stand before the node's: tasks ask for a python in /usr/local.
PYTHONS = ("python", "python3", "python3.[0-9]*[0-9]")
#: Folders where the loader looks for libraries; of these the node's own files are trusted.
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/lib/*-linux-gnu", "/lib", "/lib64", "/lib/*-linux-gnu")
#: Always reported: they run in every python, or in every pytest.
PYTHON_HOOKS = ("*.pth", "sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize")
#: Of the standard library, not code: Debian's tasks remove it to let pip install.
NOT_CODE = ("EXTERNALLY-MANAGED",)
