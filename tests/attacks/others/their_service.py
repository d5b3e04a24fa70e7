"""Serves the right answer on the port that another episode's verifier asks.

Source: NeMo-Skills#155 and OpenSandbox#1705 (ports shared by episodes).
"""

from attacks.frame import Agent, Attack


async def attack(agent: Agent) -> None:
    await agent.run(
        "mkdir -p /srv/site && echo 'token 7' > /srv/site/token && cd /srv/site &&"
        " (setsid nohup python3 -m http.server --bind 0.0.0.0 8080 >/dev/null 2>&1 &)"
        " && for i in {1..100}; do curl -s --max-time 1 http://localhost:8080/token && break; sleep 0.05; done"
    )
    async with agent.server.client() as other:
        await other.reset(task_id="service")
        assert (await other.evaluate()).reward == 0.0


ATTACK = Attack("shell", attack)
