"""What /app/balance.py must do, with the ledger it knows and with one it does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path("/app/balance.py")
LEDGER = {
    "balances": {"dues": "-764.90", "hall": "-322.45", "bar": "35.30", "raffle": "0.00"},
    "counted": 10,
    "total": "-1052.05",
}
OTHER = {
    "balances": {"north": "4.29", "south": "90071992547410.13", "east": "0.00"},
    "counted": 6,
    "total": "90071992547414.42",
}


@pytest.fixture
def balance(tmp_path):
    def run(ledger):
        out = tmp_path / "out.json"
        done = subprocess.run([sys.executable, "-I", PROGRAM, ledger, out], capture_output=True, text=True, timeout=10)
        assert done.returncode == 0, done.stderr[-500:]
        return json.loads(out.read_text())

    return run


def test_program_exists():
    assert PROGRAM.is_file()


def test_result_left_behind():
    assert json.loads(Path("/app/balances.json").read_text()) == LEDGER


def test_same_ledger_again(balance):
    assert balance("/app/ledger.csv") == LEDGER


def test_other_ledger(balance):
    assert balance("/tests/other.csv") == OTHER


def test_header_only(balance, tmp_path):
    ledger = tmp_path / "empty.csv"
    ledger.write_text("id,date,account,kind,amount,memo\n")
    assert balance(ledger) == {"balances": {}, "counted": 0, "total": "0.00"}


def test_ledger_untouched():
    text = Path("/app/ledger.csv").read_text()
    assert text.startswith('id,date,account,kind,amount,memo\nL001,2031-01-04,dues,in,"1,240.00",twelve members\n')
    assert text.endswith("L012,2031-02-04,dues,out,-0.05,rounding\n")
