"""Looks for other episodes' files, and the server's, by every path that mounts and processes tell.

Source: NeMo-Gym#2457 and OpenHands agent-sdk#4802 (another session's files in reach).
"""

from attacks.frame import Agent, Attack


async def attack(agent: Agent) -> None:
    async with agent.server.client() as other:
        await other.reset(task_id="shell")
        await other.exec(
            "echo THE-OTHERS > /app/mine; echo THE-OTHERS > /tmp/mine; echo THE-OTHERS > ~/mine; sleep 60 &"
        )
        scratch, runs = agent.server.scratch, agent.server.runs
        found = await agent.run(
            f"""cat /proc/mounts /proc/*/mountinfo | tr ' ,:=' '\\n' | grep ^/ | sort -u > /tmp/paths
            ls -d {scratch} {runs} {agent.server.tasks}; ls /proc/1/root/..{scratch}; ls -d /proc/*/root{scratch}
            xargs -a /tmp/paths -I% sh -c 'ls -d %/*/upper % 2>/dev/null' | grep -E 'tbench2-|upper'
            for at in / /proc/1/root /proc/1/cwd /proc/self/fd/*; do ls $at/..; done | grep tbench2
            grep -rlsE 'THE-[O]THERS' /app /tmp /root /run /var/tmp /dev/shm /mnt /srv; true"""
        )
        assert not [line for line in found.splitlines() if "cannot access" not in line], found


ATTACK = Attack("shell", attack)
