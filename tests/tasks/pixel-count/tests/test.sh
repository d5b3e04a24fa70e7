#!/bin/bash
# want.bin is a symlink to fixtures/histogram.bin: the verifier's copy of tests/ must keep both whole.

mkdir -p /logs/verifier

[ -f /app/histogram.bin ] && cmp /tests/want.bin /app/histogram.bin

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
