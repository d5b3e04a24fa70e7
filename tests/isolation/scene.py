"""The scene of an attack: a sandbox in which a verifier is in the middle of its work."""

import secrets
import textwrap

from tbench2_env.isolation.sandbox import Sandbox

from .rig import AS_ANOTHER_USER, ENV, Done, Rig, Running, unshare

#: What the kernel or mount(8) says, in lower case.
NOT_ALLOWED = ("operation not permitted", "permission denied", "must be superuser", "must be root")
REFUSALS = (
    *NOT_ALLOWED,
    "device or resource busy",
    "read-only file system",
    "invalid argument",
    "bad superblock",
    "not mounted",
)

#: Holds the secret in a file, a descriptor, the environment, memory and the working directory; has a child of another
#: user; looks at everything again when it may go on.
VERIFIER = f"""
exec 7</tests/secret
secret=$(cat /tests/secret)
cd /tests
{AS_ANOTHER_USER} sleep 3000 &
child=$!
echo 0 >/logs/verifier/reward.txt
until [ "$(cat /proc/$child/comm)" = sleep ]; do :; done
echo "pid $$ child $child"
read -r go || exit 11
[ "$(cat /tests/secret)" = "$secret" ] && [ "$(cat <&7)" = "$secret" ] && [ "$SECRET" = "$secret" ] || exit 12
[ "$(ls -A /tests /logs/verifier | tr '\\n' ' ')" = "/logs/verifier: reward.txt  /tests: secret test.sh " ] || exit 13
[ "$(cat /logs/verifier/reward.txt)" = 0 ] || exit 14
grep -q '^State:.S' /proc/$child/status && kill $child || exit 15
cp /tests/secret /logs/verifier/seen || exit 16
exit 0
"""
#: As much as possible the same, made by the agent.
REHEARSAL = """
exec 7</srv/secret
cd /srv
sleep 3000 &
echo "pid $$ child $!"
read -r go
"""


PRELUDE = """
    import ctypes, fcntl, os, signal, socket, sys
    libc = ctypes.CDLL(None, use_errno=True)
    target = int(os.environ["T"])
    def check(result):
        if result < 0:
            sys.exit(os.strerror(ctypes.get_errno()))
        return result
"""


def python(code: str, *arguments: str) -> str:
    """A shell script that runs `code`."""
    return f"python3 - {' '.join(arguments)} <<'END'\n{textwrap.dedent(code)}\nEND\n"


def python_attack(code: str) -> str:
    """A shell script that runs `code`, where `target` is the attacked process and `check` ends with a call's error."""
    return python(textwrap.dedent(PRELUDE) + textwrap.dedent(code))


def is_refused(done: Done, words: tuple[str, ...] = REFUSALS) -> bool:
    return any(word in done.output.lower() for word in words)


class Target:
    """A process to be attacked, its child, and the folder where it has its secret."""

    def __init__(self, running: Running, folder: str, pids: str) -> None:
        self.running = running
        _, pid, _, child = pids.split()
        self.env = ENV | {"T": pid, "C": child, "D": folder}


class Scene:
    """A sandbox in which a verifier is in the middle of its work."""

    def __init__(self, rig: Rig, sandbox: Sandbox) -> None:
        self.rig, self.sandbox = rig, sandbox
        self.secret = f"SECRET-{secrets.token_hex(8)}"
        self.layer = rig.layer(test=VERIFIER, tests={"secret": self.secret})
        self.verifier: Target

    async def start_verifier(self) -> None:
        running = self.rig.start_verifier(self.sandbox, self.layer, env=ENV | {"SECRET": self.secret})
        self.verifier = Target(running, "/tests", await running.said("\n"))

    async def attack(self, script: str, **env: str) -> Done:
        """Run the agent's script against the verifier."""
        return await self._run(script, self.verifier.env | env)

    async def rehearse(self, script: str) -> Done:
        """Run it against a process that the agent is mighty over: in a user namespace of its own, where it can be."""
        await self.rig.sh(self.sandbox, "echo rehearsed >/srv/secret")
        start = f'exec {unshare("--user --map-root-user --mount")} bash -c "$SCRIPT"'
        running = self.rig.start_sh(self.sandbox, start, env=ENV | {"SCRIPT": REHEARSAL, "SECRET": "rehearsed"})
        target = Target(running, "/srv", await running.said("\n"))
        done = await self._run(script, target.env)
        running.process.kill()
        await running.done()
        return done

    async def _run(self, script: str, env: dict[str, str]) -> Done:
        done = await self.rig.sh(self.sandbox, script + "\nexit", env=env)
        assert self.secret not in done.output
        return done

    async def finish(self) -> None:
        """The verifier comes to its own result, and the next one too."""
        await self.check_result()
        await self.start_verifier()
        await self.check_result()

    async def check_result(self) -> None:
        """Let the verifier go on to its end; nothing of its files may differ."""
        self.verifier.running.say()
        assert (await self.verifier.running.done()).status == 0
        results = {path.name: path.read_text() for path in self.sandbox.verifier_folder.iterdir()}
        assert results == {"reward.txt": "0\n", "seen": self.secret}
        tests = {path.name: path.read_text() for path in (self.rig.spawner.layers / self.layer / "tests").iterdir()}
        assert tests == {"test.sh": VERIFIER, "secret": self.secret}
