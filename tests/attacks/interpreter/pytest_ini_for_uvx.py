"""The same against a pytest that uvx brings: its environment is out of reach, its configuration is not.

Source: docs.pytest.org, "Initialization: determining rootdir and configfile"; BenchJack.
"""

from dataclasses import replace

from attacks.interpreter import pytest_ini_at_the_root

ATTACK = replace(pytest_ini_at_the_root.ATTACK, task="uvx")
