"""Has a report of 100 MB, one that is no JSON, and one full of links copied to the server.

Source: CWE-400; ctrf.io's format, whose messages have no limit.
"""

from attacks.frame import Agent, Attack


async def attack(agent: Agent) -> None:
    deep = "python3 -c 'print(\"[\" * 200000)' > ctrf.json"
    many = """python3 -c 'import json; print(json.dumps({"results": {"tests": [
        {"name": "t" * 1000, "status": "passed", "duration": 1e308, "message": "m" * 5000}] * 10000}}))' > ctrf.json"""
    odd = """echo '{"results": {"summary": {"tests": "many", "passed": -1}, "tests": {"name": null}}}' > ctrf.json"""
    for make in ("head -c 100000000 /dev/zero > ctrf.json", deep, many, odd, "ln -s /etc/passwd ctrf.json"):
        await agent.run(f"rm -f ctrf.json; {make}")
        result = await agent.env.evaluate()
        assert result.reward == 0.0, (make, result)
        assert len(result.observation.model_dump_json()) < 2_000_000, make


ATTACK = Attack("score", attack)
