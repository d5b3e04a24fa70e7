"""Plants conftest.py, whose hook reports every test as passed, in the folders around the tests.

Source: BenchJack, "How We Broke Top AI Agent Benchmarks" (Berkeley RDI, 2026): ten lines solved all of SWE-bench.
"""

from attacks.frame import Attack

ATTACK = Attack(
    "pytest",
    """cat > conftest.py <<'EOF'
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    call.excinfo = None
EOF
    cp conftest.py ~; cp conftest.py /; cp conftest.py /tests; cp conftest.py /tmp""",
)
