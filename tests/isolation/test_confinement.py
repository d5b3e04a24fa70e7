"""What an agent may not do to the mounts and to the host, at no time and least of all while a verifier runs."""

import pytest

from .rig import BEST_RUNG, ENV, Rig
from .scene import NOT_ALLOWED, Scene, is_refused, python_attack

# ---------------------------------------------------------------- its mounts
REFUSED = [
    *("rmdir /tests", "rmdir /logs/verifier", "rmdir /logs", "rm -rf /tests", "rm -rf /logs/verifier", "rm -rf /logs"),
    *("rmdir /logs/toolchain", "mv /logs/toolchain /srv", "umount -l /logs/toolchain", "touch /logs/toolchain/x"),
    *("mv /tests /srv", "mv /logs /srv", "mv /logs/verifier /logs/v", "mv -T /srv /tests"),
    *("umount /tests", "umount -l /tests", "umount /logs/verifier", "umount -l /logs", "umount -l /"),
    *("mount -o remount,rw /tests", "mount -o remount,bind,rw /tests", "mount -o remount,bind,rw /logs/verifier"),
    *("mount -t tmpfs x /tests", "mount -t tmpfs x /mnt", "mount --bind /srv /logs/verifier", "mount --bind / /mnt"),
    *("mount --move /tests /mnt", "mount --make-rshared /", "mount -t proc x /mnt", "mount -t overlay x /mnt"),
    *("echo 1 >/logs/verifier/reward.txt", "ln -s /srv /logs/verifier/x", "touch /tests/x", "chmod 777 /logs/verifier"),
    *("mknod /srv/b b 7 0", "mknod /srv/c c 1 1", "hostname x", "domainname x"),
    *("echo x >/proc/sys/kernel/hostname", ": >>/proc/sys/kernel/core_pattern", ": >>/proc/sys/vm/drop_caches"),
    *("cat /proc/1/environ", "ls /proc/1/root/"),
    *("ls -l /proc/1/ns/user", "nsenter -t 1 -m true", "kill -KILL 1", "cat /proc/1/maps", "cat /proc/1/fd/0"),
]


async def test_what_an_agent_may_not_do(scene: Scene) -> None:
    for attack in REFUSED:
        done = await scene.attack(attack)
        assert done.status != 0, attack
        assert is_refused(done), (attack, done)


async def test_all_of_it_before_the_verifier_starts(rig: Rig) -> None:
    scene = Scene(rig, sandbox := await rig.create())
    for attack in REFUSED:
        assert (await rig.sh(sandbox, attack + "\nexit", env=ENV | {"T": "1"})).status != 0, attack
    waiting = "cd /tests; exec 4</tests 5</logs/verifier; cat secret <&4; inotifywait /tests 2>/dev/null; echo up; "
    waiter = rig.start_sh(
        sandbox, waiting + "until cat secret ./secret /proc/self/fd/[45]/secret; do read -t 0.02; done 2>/dev/null"
    )
    await waiter.said("up")
    await scene.start_verifier()
    await scene.finish()
    assert not waiter.process.exited.done(), "it has seen something"
    assert scene.secret not in waiter.output


SYSTEM_CALLS = {
    "reboot": "check(libc.reboot(0x1234))",  # there is no such command
    "sethostname": "check(libc.sethostname(b'x', 1))",
    "setdomainname": "check(libc.setdomainname(b'x', 1))",
    "pivot_root": "check(libc.pivot_root(b'/srv', b'/srv'))",
    "swapon": "check(libc.swapon(b'/etc/passwd', 0))",
    "swapoff": "check(libc.swapoff(b'/nowhere'))",
    "acct": "check(libc.acct(b'/nowhere'))",
    "vhangup": "check(libc.vhangup())",
    "fanotify of contents": "check(libc.fanotify_init(4, 0))",
    "open_by_handle_at": "check(libc.open_by_handle_at(-100, (ctypes.c_char * 136)(8, 0, 0, 0, 1), 0))",
    "owner of the mounts": "check(libc.setns(fcntl.ioctl(os.open('/proc/self/ns/mnt', os.O_RDONLY), 0xB701), 0))",
    "parent namespace": "fcntl.ioctl(os.open('/proc/self/ns/user', os.O_RDONLY), 0xB702)",
}


async def test_system_calls_that_are_refused(scene: Scene) -> None:
    for name, call in SYSTEM_CALLS.items():
        done = await scene.attack(python_attack(call))
        assert done.status != 0, name
        # Without user namespaces the owner is the agent's own, which nobody can enter.
        own = name == "owner of the mounts" and not BEST_RUNG.user_namespaces
        assert ("Invalid argument" if own else "Operation not permitted") in done.output, (name, done)


FORGED = (
    "mount -t tmpfs x /tests; mount -t tmpfs x /logs/verifier; "
    "echo forged >/tests/secret; echo 1 >/logs/verifier/reward.txt"
)
#: What unshare(1) says where an agent may make none.
NO_NAMESPACES = (*NOT_ALLOWED, "no space left on device")
#: In a mount namespace of the agent's own: attack, and whether it is refused there. If not, it changes nothing outside.
IN_OWN_NAMESPACE = [
    (FORGED, False),
    ("umount /tests", True),
    ("umount -l /logs/verifier", True),
    ("umount -l /logs", True),
    ("rmdir /tests", True),
    ("mv /logs /srv", True),
    ("mount -o remount,bind,rw /tests", True),
    ("mount --bind / /mnt", True),
    ("mount --rbind / /mnt && umount -l /mnt/tests", True),
    ("mount --rbind / /mnt && rmdir /mnt/logs/verifier", True),
    ("mount --move / /mnt", True),
    ("mount -t tmpfs x /mnt && mkdir /mnt/u /mnt/w && "
     "mount -t overlay x -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w,userxattr /mnt", True),
    ("mount -t proc x /proc", True),
    ("nsenter -t $T -m true", True),
    ("cat /proc/$T/root/tests/secret", True),
    ("kill -KILL $T", True),
]  # fmt: skip


@pytest.mark.parametrize(
    "unshare", ["unshare --mount", "unshare --user --map-root-user --mount --propagation unchanged"]
)
async def test_namespaces_of_the_agents_own(scene: Scene, unshare: str) -> None:
    if not BEST_RUNG.user_namespaces:
        done = await scene.attack(f"{unshare} true")
        assert done.status != 0
        assert is_refused(done, NO_NAMESPACES), done
        return
    for attack, refused in IN_OWN_NAMESPACE:
        done = await scene.attack(f'{unshare} bash -c "$SCRIPT"', SCRIPT=attack + "\nexit")
        assert (done.status != 0) is refused, (attack, done)
        assert not refused or is_refused(done), (attack, done)


async def test_mounts_that_an_agent_keeps_in_its_own_namespace(scene: Scene) -> None:
    keeping = scene.rig.start_sh(
        scene.sandbox, f"unshare --user --map-root-user --mount bash -c '{FORGED}; echo up; read'"
    )
    if not BEST_RUNG.user_namespaces:
        assert is_refused(await keeping.done(), NO_NAMESPACES)
        return
    await keeping.said("up")
    await scene.finish()
    keeping.process.kill()
    await keeping.done()
    await scene.start_verifier()
