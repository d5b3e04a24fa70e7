"""Has the verifier print 300 MB and then what looks like a verdict.

Source: UKGovernmentBEIS/inspect_ai#3534, idegym#286 (output without bounds).
"""

from attacks.frame import Agent, Attack


async def attack(agent: Agent) -> None:
    before = agent.server.rss_bytes()
    await agent.run("truncate -s 200M app.log; ln -s app.log more.log")
    assert (await agent.env.evaluate()).reward == 0.0
    assert agent.server.rss_bytes() < before + (128 << 20)


ATTACK = Attack("score", attack, alone=True)
