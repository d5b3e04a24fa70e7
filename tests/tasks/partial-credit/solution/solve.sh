#!/bin/bash
cd /app
while read -r name clock minutes; do
  hour=${clock%:*} minute=${clock#*:}
  at=$((10#$hour * 60 + 10#$minute + minutes))
  days=$((at / 1440))
  printf '%s %02d:%02d' "$name" $((at / 60 % 24)) $((at % 60))
  [ $days -eq 0 ] || printf ' +%d' $days
  echo
done < departures.txt > arrivals.txt
