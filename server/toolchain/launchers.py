"""What test scripts meet of a kit in an episode: the programs uv and uvx, their configuration, apt's, pip's index."""

import html
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tbench2_env.server.toolchain.kit import PLACE, Manifest

#: Tells the launchers how to run uv (OFFLINE, ONLINE, PLAIN); unset: as if there were no kit.
MODE = "_TB2_UV"
#: All from the kit · what the kit has, else from the network · neither Pythons nor wheels of the kit.
OFFLINE, ONLINE, PLAIN = "offline", "online", "plain"
BIN, INDEX, APT_CONFIG, NOTHING = f"{PLACE}/bin", f"{PLACE}/index", f"{PLACE}/apt.conf", f"{PLACE}/nothing"
#: Of the verifier alone, gone with it, and on one filesystem with what uv makes of it.
_CACHE = "/logs/verifier/.uv"

# By option and not by environment variable: the tests that uvx starts may have business of their own with uv and an
# index on localhost. To them uv is as it would be without a kit.
_LAUNCHER = """\
#!/bin/sh
mode=${mode_variable} {mode_variable}=
export {mode_variable}
case $mode in
offline | online) ;;
plain) exec {place}/uv/{name} --cache-dir {cache} "$@" ;;
*) unset UV_PYTHON_INSTALL_DIR UV_TOOL_DIR; exec {place}/uv/{name} "$@" ;;
esac
# The C library of this episode: 2.N.
libc=$({loader} --version 2>/dev/null)
libc=${{libc#*version 2.}}
libc=${{libc%%[!0-9]*}}
level=0
for least in {levels}; do
    if [ "${{libc:-0}}" -ge "$least" ]; then level=$least; fi
done
export UV_PYTHON_INSTALL_DIR={place}/python/level-$level UV_TOOL_DIR={cache}/tools
exec {place}/uv/{name} --config-file {place}/$mode.toml --cache-dir {cache} "$@"
"""
_TOML = f'find-links = ["{PLACE}/wheels"]\n'
# Without a network all that apt-get can do is to say so: at once, and not after three attempts. Nor does it help to
# upgrade what is there from packages that happen to lie in its cache.
_APT = """\
Acquire::Retries "0";
Acquire::http::Timeout "2";
Acquire::https::Timeout "2";
APT::Get::Upgrade "false";
"""


def write(folder: Path, manifest: Manifest) -> None:
    """Make them in a kit's folder. Raises: OSError."""
    (folder / "bin").mkdir()
    levels = " ".join(map(str, manifest.levels))
    for name in ("uv", "uvx"):
        text = _LAUNCHER.format(
            name=name, place=PLACE, cache=_CACHE, levels=levels, mode_variable=MODE, loader=manifest.loader or "false"
        )
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / f"{ONLINE}.toml").write_text(_TOML)
    (folder / f"{OFFLINE}.toml").write_text(f'{_TOML}offline = true\nno-index = true\npython-downloads = "never"\n')
    (folder / "apt.conf").write_text(_APT)
    _write_index(folder / "index", manifest.wheels)


def _write_index(folder: Path, wheels: Iterable[str]) -> None:
    projects: dict[str, list[str]] = {}
    for wheel in sorted(wheels):
        projects.setdefault(str(parse_wheel_filename(wheel)[0]), []).append(wheel)
    folder.mkdir()
    for project, names in projects.items():
        links = "".join(f'<a href="../../wheels/{html.escape(name)}">{html.escape(name)}</a>\n' for name in names)
        (folder / project).mkdir()
        (folder / project / "index.html").write_text(f"<!DOCTYPE html>\n{links}")
