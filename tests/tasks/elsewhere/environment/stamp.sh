#!/bin/sh
# Prints the stamp of one file: code, season, and the start of its SHA-256.
: "${DEPOT_CODE:?is not set}" "${DEPOT_SEASON:?is not set}"
[ -f "$1" ] || exit 2
echo "$DEPOT_CODE-$DEPOT_SEASON-$(sha256sum < "$1" | cut -c 1-12)"
