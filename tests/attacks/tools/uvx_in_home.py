"""Puts a uvx in ~/.local/bin, where uv's installer would, and the `env` that brings it onto PATH.

Source: the shape of Terminal-Bench 2's test.sh (`source $HOME/.local/bin/env`); BenchJack.
"""

from attacks.frame import Attack

ATTACK = Attack(
    "uvx",
    """mkdir -p ~/.local/bin; printf '#!/bin/sh\\nexit 0\\n' > ~/.local/bin/uvx; chmod +x ~/.local/bin/uvx
    echo 'export PATH="$HOME/.local/bin:$PATH"' > ~/.local/bin/env""",
)
