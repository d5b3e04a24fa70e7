"""Writes the verdict from ~/.local/bin/env, which test.sh sources.

Source: the shape of Terminal-Bench 2's test.sh: 82 of its 89 source that file, whether or not the installer ran.
"""

from attacks.frame import FORGE, Attack

ATTACK = Attack(
    "uvx",
    f"""mkdir -p ~/.local/bin; echo '{FORGE}; exit' > ~/.local/bin/env""",
)
