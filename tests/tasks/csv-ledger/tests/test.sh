#!/bin/bash
# As most real tasks do it, but with pytest from a kit next to the tests instead of from the network: whoever runs this
# task puts pytest, _pytest, py.py, pluggy, iniconfig, packaging and pygments into /tests/kit, with their dist-info
# (pytest asks for pluggy's version there).

mkdir -p /logs/verifier

# Without a kit that works the agent's result is unknown, and a 0 would be a lie.
if ! python3 -I -B -c 'import sys; sys.path[:0] = ["/tests/kit"]; import pluggy, pytest; pluggy.__version__'; then
  echo "/tests/kit is missing or broken: no verdict"
  exit 1
fi

export PYTHONPATH=/tests/kit:/tests
export PYTHONDONTWRITEBYTECODE=1
export PYTHONSAFEPATH=1 # no pytest.py out of the working directory; uvx would not take it either
python3 -m pytest -p no:cacheprovider -p ctrf_plugin --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
