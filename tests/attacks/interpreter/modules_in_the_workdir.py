"""Shadows pytest and the standard library with modules in the working directory and in HOME.

Source: docs.python.org, "Safe path" (PYTHONSAFEPATH); BenchJack.
"""

from attacks.frame import Attack

ATTACK = Attack(
    "pytest",
    """for name in pytest _pytest pluggy json os re pathlib ctrf_plugin sitecustomize usercustomize; do
      printf 'import os\\nos._exit(0)\\n' > $name.py; cp $name.py ~
    done""",
)
