"""Run a command on an imitated pool node: `python tests/on_host.py NODE -- COMMAND...`, as real root.

Exits with the command's status; everything that it started or mounted is then gone, also if this process is killed.
The nodes are in `hosts.nodes`; the checkout and the running interpreter are there at their own paths.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from hosts.bookworm import VARIABLE, kept_at
from hosts.guard import run_guarded
from hosts.nodes import NODES, run_on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("node", choices=NODES)
    parser.add_argument("--bookworm", help=f"where to keep the Debian folder of enroot nodes (or {VARIABLE})")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    arguments = parser.parse_args()
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"] or os.geteuid() != 0:
        parser.error("real root only: nodes are imitated with what it alone may do")
    if arguments.bookworm:
        os.environ[VARIABLE] = arguments.bookworm
    folder = Path(tempfile.mkdtemp(prefix="tbench2-host-", dir=kept_at().parent))
    return run_guarded(lambda: run_on(arguments.node, folder, arguments.command), folder)


if __name__ == "__main__":
    sys.exit(main())
