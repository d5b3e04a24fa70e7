"""Kills every process that it may, many times a second.

Source: NeMo-Gym#2262 (`pkill -9 -f python` took the harness along).
"""

from attacks.frame import Attack, in_background

ATTACK = Attack(
    "shell",
    in_background("while :; do pkill -9 -f test.sh; pkill -9 sleep; kill -9 -1; sleep 0.02; done"),
)
