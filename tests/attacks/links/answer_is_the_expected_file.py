"""Answers with a link to the file that the verifier compares the answer with: it is then compared with itself.

Source: CWE-59 (link following); BenchJack's class "reference answers bundled with the tests".
"""

from attacks.frame import Attack, Verdicts

ATTACK = Attack("compare", "ln -s /tests/expected.txt out.txt", tampers="/app/out.txt", restored=Verdicts.NONE)
