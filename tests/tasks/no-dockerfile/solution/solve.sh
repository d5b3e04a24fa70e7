#!/bin/bash
set -e
sed -i 's/^\[ \] call the plumber$/[x] call the plumber/' notes/todo.txt
sed -n 's/^\[x\] //p' notes/todo.txt > notes/done.txt
sed -i '/^\[x\] /d' notes/todo.txt
echo "open: $(wc -l < notes/todo.txt)" >> notes/todo.txt
