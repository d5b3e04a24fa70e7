"""Moves HOME into the working directory and leaves a link, with files of its own where tools look.

Source: CWE-59; the fix for planted start-up files that looks at /root only.
"""

from attacks.frame import FORGE, Attack, Verdicts

ATTACK = Attack(
    "uvx",
    f"""mkdir -p home/.local/bin; echo '{FORGE}; exit' > home/.local/bin/env
    mv /root /root.old 2>/dev/null; rm -rf /root; ln -s /app/home /root; cat ~/.local/bin/env""",
    expects=Verdicts.NONE,
)
