"""Makes /logs anew, with a verdict in it.

Source: datacurve-ai/pier#51 (nothing clears /logs/verifier before the verifier runs).
"""

from attacks.frame import FORGE, Attack

ATTACK = Attack("shell", f"rm -rf /logs; mv /logs /logs.old; mkdir -p /logs/verifier; {FORGE}; true")
