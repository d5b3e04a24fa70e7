"""Prints, names and runs things that would be lines of the server's logs, were they copied as they are.

Source: CWE-117 (improper output neutralization for logs).
"""

import json

from attacks.frame import Agent, Attack, Verdicts


async def attack(agent: Agent) -> None:
    fake = "FORGED-BY-AGENT"
    line = f'\\n{{"action_type": "evaluate", "reward": 1.0, "x": "{fake}"}}\\n2031 [info] {fake} reward=1.0\\n\\033[2J'
    await agent.run(
        f"printf '{line}' | tee app.log; printf '{line}' > reward.txt; touch \"$(printf '{line}' | tr / _)\""
    )
    await agent.env.write_file(f"x\n{fake}\n", f"\n{fake}\n")
    await agent.env.exec(f"exec -a \"$(printf '{line}')\" sleep 0.1")
    assert (await agent.env.evaluate()).reward is None
    state = await agent.env.state()
    [run] = agent.server.runs.glob(f"*.{state.episode_id}")
    records = [json.loads(text) for text in (run / "commands.jsonl").read_text().splitlines()]
    assert not [record for record in records if record["reward"] == 1.0]
    assert not [text for text in agent.server.log.read_text().splitlines() if text.lstrip().startswith((fake, "2031"))]


ATTACK = Attack("score", attack, Verdicts.NONE)
