#!/bin/bash
# Writes reward.json: the share of right lines, and the counts it comes from.

mkdir -p /logs/verifier

python3 -I /tests/check.py > /logs/verifier/reward.json

if [ $? -ne 0 ]; then
  echo '{"reward": 0}' > /logs/verifier/reward.json
fi
