"""What root of an episode cannot do to the host, through the real server; isolation/test_confinement.py has the mounts.

Each attack is something that real root of the host may do.
"""

import asyncio
import os
import stat
import textwrap
import time
from pathlib import Path

import pytest

from support.processes import matching
from support.server import Server, eventually
from tbench2_env import Tbench2Env

#: x86_64 and aarch64 numbers of calls that libc has no function for.
_NUMBERS = {
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "bpf": (321, 280), "perf_event_open": (298, 241), "syslog": (103, 116), "add_key": (248, 217),
    "keyctl": (250, 219), "userfaultfd": (323, 282),
}  # fmt: skip
_MACHINE = 0 if os.uname().machine == "x86_64" else 1
_PRELUDE = """
import ctypes, errno, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        sys.exit(errno.errorcode[ctypes.get_errno()])
    return result
def call(number, *arguments):
    return check(libc.syscall(ctypes.c_long(number), *arguments))
"""
MODULE = "ctypes.create_string_buffer(bytes(64)), ctypes.c_ulong(64), b''"
#: struct perf_event_attr: a hardware counter of the kernel's own work, on every process of CPU 0.
PERF = "struct.pack('IIQ', 0, 128, 0) + bytes(112), -1, 0, -1, 0"
SYSTEM_CALLS = {
    "load a module": f"call({{init_module}}, {MODULE})",
    "load a module's file": "call({finit_module}, os.open('/bin/true', os.O_RDONLY), b'', 0)",
    "unload a module": "call({delete_module}, b'overlay', 0)",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "set the time of day": "check(libc.settimeofday(struct.pack('qq', int(time.time()), 0), None))",
    "set the time zone": "check(libc.settimeofday(None, struct.pack('ii', 0, 0)))",
    "adjust the clock": "check(libc.adjtimex(struct.pack('Iq', 1, 0) + bytes(256)))",  # ADJ_OFFSET
    "load a kernel": "call({kexec_load}, 0, 0, None, 0)",
    "load a program into the kernel": "call({bpf}, 5, struct.pack('IIQQ', 1, 2, 0, 0) + bytes(96), 120)",
    "make a map in the kernel": "call({bpf}, 0, struct.pack('IIII', 1, 4, 4, 1) + bytes(56), 72)",
    "watch the whole CPU": f"call({{perf_event_open}}, {PERF})",
    "clear the kernel's log": "call({syslog}, 5, None, 0)",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
    "a better niceness": "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "higher limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))",
    "lock all memory": "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 40, 1 << 40))",
}
#: Never with an effect on the host, should they be allowed: read, or opened and not written.
OPENED = [
    *("/proc/kcore", "/proc/sysrq-trigger", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/vda", "/dev/sda", "/dev/kmsg"),
    *("/dev/fuse", "/dev/loop-control", "/dev/mapper/control", "/dev/kvm", "/proc/sys/kernel/modprobe"),
    *("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sys/fs/file-max", "/proc/mtrr"),
    *("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state", "/sys/kernel/profiling"),
]  # fmt: skip


#: Prints which of the files can be opened for writing.
OPENABLE = """python3 -c '
import os, sys
for path in sys.argv[1:]:
    try: os.close(os.open(path, os.O_WRONLY)); print(path)
    except OSError: pass
' {}"""
#: Of the episode's own network, IPC, user and PID namespaces.
OWN_SYSCTLS = (
    *("/proc/sys/net/", "/proc/sys/fs/mqueue/", "/proc/sys/user/", "/proc/sys/kernel/ns_last_pid"),
    *(f"/proc/sys/kernel/{name}" for name in ("auto_msgmni", "msg", "sem", "shm", "pid_max")),
)


async def begun(env: Tbench2Env) -> Tbench2Env:
    await env.reset(task_id="ok")
    return env


def python(text: str) -> str:
    numbers = {name: pair[_MACHINE] for name, pair in _NUMBERS.items()}
    for name, number in numbers.items():
        text = text.replace("{" + name + "}", str(number))
    return f"python3 - <<'END'\n{_PRELUDE}{textwrap.dedent(text)}\nEND\n"


# ---------------------------------------------------------------- the kernel
async def test_system_calls_that_change_the_host(server: Server) -> None:
    async with server.client() as env:
        await begun(env)
        for name, call in SYSTEM_CALLS.items():
            answer = await env.exec(python(call))
            assert answer.info["exit_code"] == 1, (name, answer.output)
            said = answer.output.strip().splitlines()[-1]
            refused = "EPERM", "EACCES", "ENOSYS", "Operation not permitted", "PermissionError", "not allowed to raise"
            assert any(word in said for word in refused), (name, said)


async def test_files_of_the_kernel(server: Server) -> None:
    """None can be opened for writing, and the memory not even for reading."""
    async with server.client() as env:
        await begun(env)
        assert (await env.exec(OPENABLE.format(" ".join(OPENED)))).output == ""
        for path in ("/proc/kcore", "/dev/mem", "/dev/vda", "/dev/kmsg"):
            assert (await env.exec(f"head -c 1 {path}")).info["exit_code"] != 0, path


async def test_devices_cannot_be_made(server: Server) -> None:
    """Of the node's disk, of memory, of what nodes have in common."""
    disk = Path("/").stat().st_dev
    async with server.client() as env:
        await begun(env)
        for device in (f"b {os.major(disk)} {os.minor(disk)}", "c 1 1", "c 10 229", "b 7 0"):
            for folder in (".", "/dev", "/tmp", "/dev/shm"):
                answer = await env.exec(f"mknod {folder}/made {device} && head -c 1 {folder}/made")
                assert answer.info["exit_code"] != 0, (device, folder)
                assert "not permitted" in answer.output, (device, folder, answer.output)


async def test_what_the_kernel_says_of_itself_is_little(server: Server) -> None:
    async with server.client() as env:
        await begun(env)
        assert (await env.exec("dmesg")).info["exit_code"] != 0
        addresses = await env.exec("cut -d' ' -f1 /proc/kallsyms | sort -u | head -2")
        assert set(addresses.output.split()) <= {"0000000000000000"}
        assert (await env.exec("find /sys -writable -type f 2>/dev/null | head -1")).output == ""


async def test_writing_to_sysctls_and_sysfs(server: Server) -> None:
    """Every file of both; what can be opened for writing is the episode's own network and no more."""
    found = "$(find /proc/sys /sys -type f -perm /222 2>/dev/null)"
    async with server.client() as env:
        await begun(env)
        opened = (await env.exec(OPENABLE.format(found))).output.splitlines()
        assert [path for path in opened if not path.startswith(OWN_SYSCTLS)] == []


async def test_keys_of_the_host(server: Server) -> None:
    """The session keyring is the episode's own, and another episode's keys are nobody's."""
    add = python("print(call({add_key}, b'user', b'tbench2', b'secret', 6, -3))")
    look = python("print(call({keyctl}, 10, -3, b'user', b'tbench2', 0))")
    read = "buffer = ctypes.create_string_buffer(6)\nprint(call({keyctl}, 11, %s, buffer, 6), buffer.raw)"
    async with server.client() as a, server.client() as b:
        await begun(a)
        await begun(b)
        key = (await a.exec(add)).output.strip()
        assert key.isdigit()
        assert (await b.exec(look)).output.strip() == "ENOKEY"
        assert (await b.exec(python(read % key))).output.strip() in ("EACCES", "ENOKEY")
        # The kernel collects it soon after the command that had it.
        gone = "for i in {1..100}; do grep -q tbench2 /proc/keys || exit 0; sleep 0.05; done; exit 1"
        assert (await b.exec(gone)).info["exit_code"] == 0


# ---------------------------------------------------------------- processes
async def test_processes_of_the_host_are_neither_seen_nor_touched(server: Server) -> None:
    """By the numbers that they have outside: the server, its helpers, this test."""
    targets = [os.getpid(), server.pid, *server.descendants()]
    attack = """
        def told(attempt):
            try:
                attempt()
                return "done"
            except OSError as error:
                return errno.errorcode[error.errno]
        def trace(pid):
            if libc.ptrace(0x4206, pid, 0, 0) < 0:  # PTRACE_SEIZE
                raise OSError(ctypes.get_errno(), "")
        for pid in map(int, TARGETS):
            if os.path.exists(f"/proc/{pid}"):
                continue  # another process has that number here
            print(told(lambda: os.kill(pid, 0)), told(lambda: os.pidfd_open(pid)), told(lambda: trace(pid)),
                  told(lambda: os.sched_setaffinity(pid, {0})), told(lambda: os.getpgid(pid)))
    """
    async with server.client() as env:
        await begun(env)
        answer = await env.exec(python(attack.replace("TARGETS", repr(targets))))
        assert set(answer.output.splitlines()) == {"ESRCH ESRCH ESRCH ESRCH ESRCH"}
        assert server.process.poll() is None


@pytest.mark.parametrize("keep", ["setsid {} &", "nohup {} &", "(setsid setsid {} &) &", "setsid -f unshare -Urpf {}"])
async def test_nothing_outlives_the_episode(server: Server, keep: str) -> None:
    """However it is started, and with every signal ignored."""
    sleep = f"sleep {time.time():.6f}"
    async with server.client() as env:
        await begun(env)
        await env.exec("trap '' HUP TERM INT; " + keep.format(f"{sleep} >/dev/null 2>&1 </dev/null"))
        eventually(lambda: bool(matching(sleep)), 5)
    await asyncio.to_thread(eventually, lambda: not matching(sleep), 3)


async def test_there_is_nobody_who_would_start_it_later(server: Server) -> None:
    """A crontab, a job or a unit of an episode is a file in its worktree, and goes with that."""
    mark = Path("/tmp/tbench2-test-mark")
    async with server.client() as env:
        await begun(env)
        await env.exec(
            f"mkdir -p /etc/cron.d; echo '* * * * * root touch {mark}' >/etc/cron.d/x; cp /etc/cron.d/x /var/spool"
        )
        await env.exec("mkdir -p /etc/systemd/system /etc/profile.d; echo evil >/etc/profile.d/tbench2-test.sh")
        assert (await env.exec("ps -eo comm= | grep -cE 'cron|atd|systemd'")).output == "0\n"
    for path in ("/etc/cron.d/x", "/var/spool/x", "/etc/profile.d/tbench2-test.sh"):
        assert not Path(path).exists()


# ---------------------------------------------------------------- what the host sees of its files
async def test_a_setuid_program_is_nobodys_outside(server: Server) -> None:
    """Root of the episode is no user of the host, and none but root of the host gets to the file."""
    async with server.client() as env:
        await begun(env)
        await env.exec("cp /bin/bash rootbash; chmod 6755 rootbash; cp -p rootbash /usr/bin/rootbash")
        copies = [path for path in server.scratch.rglob("rootbash") if path.is_file()]
        assert len(copies) == 2
        for path in copies:
            info = path.stat()
            assert info.st_mode & stat.S_ISUID
            assert (info.st_uid, info.st_gid) == (100_000, 100_000)
        assert stat.S_IMODE(server.scratch.stat().st_mode) == 0o700
        assert server.scratch.stat().st_uid == 0
    assert not Path("/usr/bin/rootbash").exists()
