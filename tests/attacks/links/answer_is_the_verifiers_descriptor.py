"""Answers with links into /proc/self of whoever follows them.

Source: CVE-2024-21626 (runc: descriptors of another world under /proc/self/fd).
"""

from attacks.frame import Attack

ATTACK = Attack("compare", "ln -s /proc/self/fd/1 out.txt; ln -s /proc/self/cwd/../tests/expected.txt out")
