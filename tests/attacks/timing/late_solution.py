"""Undoes and redoes the answer all the time, to be right just when it is looked at.

Source: CWE-367 (time of check, time of use). The answer is wrong whenever it is whole.
"""

from attacks.frame import SEEN, Attack, in_background

ATTACK = Attack(
    "shell",
    in_background("while :; do touch /tmp/seen; echo no > out.txt; printf o > out.txt; ln -sf /dev/fd/0 out.txt; done"),
    ran=SEEN,
)
