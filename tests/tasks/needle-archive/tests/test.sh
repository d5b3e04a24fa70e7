#!/bin/bash
# Code and way must both be right.

mkdir -p /logs/verifier

[ -f /app/found.txt ] && [ -f /app/vault.zip ] && cmp /tests/found.txt /app/found.txt

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
