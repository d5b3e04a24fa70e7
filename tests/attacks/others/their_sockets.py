"""Connects to abstract and System V names that other episodes and their verifiers may use.

Source: man 7 unix (abstract sockets belong to the network namespace); CVE-2020-15257 (containerd-shim).
"""

from attacks.frame import Agent, Attack


async def attack(agent: Agent) -> None:
    meet = """import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect("\\0meeting")"""
    serve = """import socket, time
server = socket.socket(socket.AF_UNIX)
server.bind("\\0meeting")
server.listen()
open("/tmp/up", "w").close()
time.sleep(60)"""
    async with agent.server.client() as other:
        await other.reset(task_id="shell")
        await other.exec(f"python3 -c '{serve}' & until [ -e /tmp/up ]; do sleep 0.02; done; ipcmk -Q; ipcmk -S 3")
        answer = await agent.run(
            f"cat /proc/net/unix | grep -c meetin[g]; python3 -c '{meet}' 2>&1 | tail -1; ipcs -q -s | grep -c 0x"
        )
        assert answer == "0\nConnectionRefusedError: [Errno 111] Connection refused\n0\n", answer


ATTACK = Attack("shell", attack)
