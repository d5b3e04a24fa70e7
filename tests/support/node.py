"""The node that the tests run on: this machine, or an imitated one (tests/on_host.py), which says which it is."""

import os

from tbench2_env.isolation import probe
from tbench2_env.isolation.spec import RUNGS

NODE = os.environ.get("TB2_TEST_NODE", "")
_ENROOT = NODE.startswith("enroot-")
#: Rungs of the ladder that this node allows, best first. Nobody's spawner is in a user namespace that we are not in.
RUNGS_HERE = (
    [RUNGS["5"]]
    if NODE == "nobody"
    else [probe.resolve(name) for name in {"no-userns": ["3"], "": ["1", "2", "3", "4"]}.get(NODE, ["E"])]
)
BEST_RUNG = RUNGS_HERE[0]
#: Whether chown, set*id and setgroups answer success without doing anything.
IDS_ARE_FAKED = _ENROOT
ROOT_IS_OVERLAY = NODE == "enroot-overlay"
