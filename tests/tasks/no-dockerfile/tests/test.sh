#!/bin/bash
# Looks only at paths relative to the working directory, wherever that is.

mkdir -p /logs/verifier

[ -f notes/todo.txt ] && [ -f notes/done.txt ] &&
  cmp /tests/todo.txt notes/todo.txt && cmp /tests/done.txt notes/done.txt

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
