"""Watches /tests, /logs and the answer with inotify, to copy and to write in the moment that they are used.

Source: man 7 inotify; the time-of-check window of CVE-2018-15664.
"""

from attacks.frame import FORGE, SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    "echo no > out.txt; "
    + python_daemon(f"""
watch = libc.inotify_init1(0)
for path in (b"/tests", b"/logs", b"/logs/verifier", b"/app", b"/", b"/dev/shm", b"/tmp"):
    libc.inotify_add_watch(watch, path, 0xFFF)
while events := os.read(watch, 65536):
    open("/tmp/seen", "w").close()
    os.system("cat /tests/* >> /tmp/loot; {FORGE}; {FORGE} 2>/dev/null")
"""),
    ran=SEEN,
)
