"""Takes the rights away from the fixed paths and makes them immutable.

Source: chattr(1); issue reports of verifiers that end as root without CAP_DAC_OVERRIDE (charliecloud#498).
"""

from attacks.frame import Attack

ATTACK = Attack(
    "shell",
    "chmod 000 /tests /logs /logs/verifier; chattr +i /logs /logs/verifier /tests; chown 1000 /logs /tests; true",
)
