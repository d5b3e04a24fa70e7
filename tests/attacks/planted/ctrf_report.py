"""Plants a report in which every test has passed.

Source: Terminal-Bench 2's own scripts, which write /logs/verifier/ctrf.json beside the reward.
"""

from attacks.frame import Attack

ATTACK = Attack(
    "pytest",
    """echo '{"results": {"summary": {"tests": 1, "passed": 1, "failed": 0}, "tests": []}}' > /logs/verifier/ctrf.json
    true""",
)
