"""Answers with a number of 50 MB, a sparse file of terabytes, and JSON of a million brackets.

Source: PrimeIntellect verifiers#1401; CWE-400. CASES.md 11.
"""

from attacks.frame import Agent, Attack, Verdicts


async def attack(agent: Agent) -> None:
    for make in (
        "head -c 50000000 /dev/zero | tr '\\0' 1 > reward.txt",
        "truncate -s 200M reward.txt",
        "head -c 60000 /dev/zero | tr '\\0' [ > reward.json",
        "printf '{\"reward\": 1%060000d}' 0 > reward.json",
        "(echo '{\"reward\": 1, \"x\": '; head -c 60000 /dev/zero | tr '\\0' 9; echo '}') > reward.json",
    ):
        await agent.run(f"rm -f reward.*; {make}")
        assert (await agent.env.evaluate()).reward is None, make


ATTACK = Attack("score", attack, Verdicts.NONE)
