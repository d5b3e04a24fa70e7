#!/bin/bash
set -e
export GIT_AUTHOR_NAME=Mender GIT_AUTHOR_EMAIL=mender@garden.example
export GIT_COMMITTER_NAME=Mender GIT_COMMITTER_EMAIL=mender@garden.example

git clone --quiet --branch main /app/garden.bundle /app/garden
cd /app/garden

# `git bundle list-heads` shows a ref outside heads and tags; a clone does not take it along.
git fetch --quiet /app/garden.bundle refs/lost/seeds
git cherry-pick FETCH_HEAD > /dev/null

git merge --no-edit origin/irrigation > /dev/null || true # conflicts in bed 3
cat > plan.txt << 'PLAN'
bed 1: beans, water 20 min
bed 2: leeks, water 10 min
bed 3: carrots, water 15 min
bed 4: rhubarb, water 5 min
PLAN
git add plan.txt
git commit --quiet --no-edit
