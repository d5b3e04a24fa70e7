#!/bin/bash
# Looks at the repository only through git, with a configuration of its own.

mkdir -p /logs/verifier

export GIT_CONFIG_GLOBAL=/tests/gitconfig GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_CEILING_DIRECTORIES=/app
main_in_bundle=b929f497bc13857517f55f587d5991fd59341836
irrigation=97873a66d67a181472dde5b14e958bfb8190d2c6

failures=0
check() { # what it is about, command...
  local what=$1
  shift
  if "$@"; then echo "ok: $what"; else echo "FAILED: $what"; failures=$((failures + 1)); fi
}
garden() { git -C /app/garden "$@"; }

on_main() { [ "$(garden symbolic-ref HEAD)" = refs/heads/main ]; }
clean() { local out; out=$(garden status --porcelain --untracked-files=all) && [ -z "$out" ]; }
idle() {
  local dir
  dir=$(garden rev-parse --absolute-git-dir) || return 1
  for state in MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD rebase-merge rebase-apply; do
    [ ! -e "$dir/$state" ] || return 1
  done
}
has() { garden merge-base --is-ancestor "$1" refs/heads/main; }
holds() { garden cat-file blob "refs/heads/main:$1" | cmp - "/tests/$1"; }
same() { # a file that nobody was to touch: still the blob it is in the bundle
  local blob
  blob=$(garden rev-parse --verify "refs/heads/main:$1") &&
    [ "$blob" = "$(garden rev-parse --verify "$main_in_bundle:$1")" ]
}
names() {
  [ "$(garden ls-tree -r --name-only refs/heads/main | tr '\n' ' ')" = "README.md plan.txt seeds.txt tools.txt " ]
}

if [ -d /app/garden/.git ]; then
  check "main is checked out" on_main
  check "the working tree is clean" clean
  check "no operation is in progress" idle
  check "main keeps its commits" has $main_in_bundle
  check "irrigation is merged" has $irrigation
  check "plan.txt is resolved" holds plan.txt
  check "seeds.txt is back" holds seeds.txt
  check "README.md is untouched" same README.md
  check "tools.txt is untouched" same tools.txt
  check "main holds the four files" names
else
  echo "FAILED: /app/garden is not a repository"
  failures=1
fi

[ $failures -eq 0 ]

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
