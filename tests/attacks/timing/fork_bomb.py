"""Forks without end while it is graded, so that the verifier can start nothing.

Source: NemoClaw#809 and tracecat#3142 (one hog's failure became everybody's).
"""

from attacks.frame import Attack, Verdicts, in_background

ATTACK = Attack(
    "impatient", in_background("b() { touch /tmp/seen; b | b & }; b; sleep 1"), Verdicts.ZERO_OR_NONE, alone=True
)
