#!/bin/bash
set -e
cd "$DEPOT_HOME"
mkdir -p "$(dirname "$DEPOT_MANIFEST")"
find crates shelf -type f -print0 | while IFS= read -r -d '' file; do
  printf '%s\t%s\n' "$file" "$(tools/stamp "$file")"
done | LC_ALL=C sort > "$DEPOT_MANIFEST"
