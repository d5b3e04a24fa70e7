#!/bin/bash
set -e
cd /app
sed -i 's/^#define TIDE_H$/&\n\n#include <stddef.h>/' tide.h
sed -i 's/realloc(readings, room)/realloc(readings, room * sizeof *readings)/' main.c
sed -i '/^size_t highest/,/^}/s/>=/>/' tide.c
sed -i '/^size_t lowest/,/^}/{s/int count/size_t count/; s/int least = 0/int least = readings[0].height_cm/}' tide.c
sed -i 's/return longest;/return run > longest ? run : longest;/' tide.c
cc -std=c11 -Wall -Wextra -Werror -O1 -o /app/tide /app/main.c /app/tide.c
