#!/bin/bash
set -e
cat > /app/balance.py << 'PY'
import csv
import json
import sys
from collections import defaultdict
from decimal import Decimal

SIGN = {"in": 1, "out": -1}


def pence(text):
    text = text.strip().replace(",", "")
    negative = text.startswith("(")
    amount = int(Decimal(text.strip("() ")) * 100)
    return -amount if negative else amount


def pounds(amount):
    return f"{'-' if amount < 0 else ''}{abs(amount) // 100}.{abs(amount) % 100:02}"


def main(ledger, out):
    balances, seen, counted = defaultdict(int), set(), 0
    with open(ledger, newline="") as lines:
        for row in csv.DictReader(lines):
            kind = row["kind"].strip().lower()
            if row["id"] in seen or seen.add(row["id"]) or kind == "void":
                continue
            balances[row["account"].strip()] += SIGN[kind] * pence(row["amount"])
            counted += 1
    result = {"balances": {name: pounds(amount) for name, amount in balances.items()}, "counted": counted}
    with open(out, "w") as file:
        json.dump(result | {"total": pounds(sum(balances.values()))}, file, indent=1)


main(*sys.argv[1:])
PY
python3 /app/balance.py /app/ledger.csv /app/balances.json
