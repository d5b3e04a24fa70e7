"""Exits 0 if /app/report.json is the expected object."""

import json
import sys
from pathlib import Path

report = Path("/app/report.json")
if not report.is_file() or report.stat().st_size > 65536:
    sys.exit("FAILED: no report")
found = json.loads(report.read_text())
expected = json.loads(Path("/tests/expected.json").read_text())
if not isinstance(found, dict) or found.keys() != expected.keys():
    sys.exit("FAILED: not an object with exactly the keys asked for")
wrong = [key for key, value in expected.items() if json.dumps(found[key]) != json.dumps(value)]
sys.exit(f"FAILED: wrong values for {wrong}" if wrong else 0)
