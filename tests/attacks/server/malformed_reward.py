"""Answers with what is not one finite number.

Source: PrimeIntellect verifiers#2067, hud#516; CASES.md 11.
"""

from attacks.frame import Agent, Attack, Verdicts


async def attack(agent: Agent) -> None:
    texts = ("", "nan", "inf", "1e999", "1\\n1", "0x1", "1_0", "true", "one", "1,0", "--1", "\\xff\\xfe1", "1\\0")
    objects = ('{"reward": "1"', '{"reward": true}', '{"reward": [1]}', '{"reward": NaN}', "null", '"nan"', "{}", "[1]")
    for name, words in (("txt", texts), ("json", objects)):
        for text in words:
            await agent.run(f"rm -f reward.*; printf '{text}' > reward.{name}")
            result = await agent.env.evaluate()
            assert result.reward is None, text
            assert result.observation.info["no_verdict"] == "reward_invalid", text


ATTACK = Attack("score", attack, Verdicts.NONE)
