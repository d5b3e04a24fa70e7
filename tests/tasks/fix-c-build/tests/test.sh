#!/bin/bash
# The agent's binary must be there, and a build of its sources must answer the hidden cases.

mkdir -p /logs/verifier

if [ -x /app/tide ]; then
  python3 -I /tests/check.py
else
  echo "FAILED: /app/tide is not there"
  false
fi

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
