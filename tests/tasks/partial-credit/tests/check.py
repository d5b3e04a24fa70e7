"""Prints the verdict on /app/arrivals.txt as JSON."""

import json
import os
from pathlib import Path

due = int(os.environ["ARRIVALS_DUE"])
expected = Path("/tests/arrivals.txt").read_text().splitlines()
arrivals = Path("/app/arrivals.txt")
given = arrivals.read_text().splitlines() if arrivals.is_file() else []
right = sum(have == want for have, want in zip(given, expected, strict=False))
extra = max(0, len(given) - len(expected))
print(json.dumps({"reward": max(0, right - extra) / due, "right": right, "due": due, "extra": extra}))
