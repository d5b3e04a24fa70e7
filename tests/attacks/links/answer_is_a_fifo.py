"""Answers with a FIFO that nobody feeds: the verifier waits until its time is out, which is no verdict.

Source: CWE-1322 (a blocking call on what somebody else controls); CASES.md 10.
"""

from attacks.frame import Attack, Verdicts

ATTACK = Attack("impatient", "mkfifo out.txt", Verdicts.NONE)
