#!/bin/bash
# The file must be byte for byte the expected one.

mkdir -p /logs/verifier

[ -f /app/note.txt ] && [ ! -L /app/note.txt ] && cmp /app/note.txt /tests/note.txt

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
