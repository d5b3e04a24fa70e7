#!/bin/bash
# The manifest must be the expected one; the tool must have its mode, and the image's ENV must reach the verifier too.

mkdir -p /logs/verifier

[ "$PWD" = /srv/depot ] &&
  [ "$DEPOT_MANIFEST" = /srv/depot/out/manifest.tsv ] &&
  [ "$(stat -c %a tools/stamp)" = 755 ] &&
  [ ! -e crates/crate-notes.draft ] &&
  [ -f out/manifest.tsv ] &&
  cmp /tests/manifest.tsv out/manifest.tsv

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
