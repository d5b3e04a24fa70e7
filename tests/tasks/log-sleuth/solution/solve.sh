# A comment before the #! line, as some real tasks have it: run by name this would be ENOEXEC, `bash solve.sh` is fine.
#!/bin/bash
python3 - << 'PY'
import json
from collections import Counter

lines = open("/app/access.log").read().splitlines()
entries = [fields for fields in (line.split(" ") for line in lines) if len(fields) == 6]
failed, broke_in = Counter(), {}
for number, (_, client, method, path, status, _) in enumerate(entries):
    if (method, path) == ("POST", "/login"):
        if status == "200" and failed[client] >= 8:
            broke_in[client] = number
        failed[client] = failed[client] + 1 if status == "401" else 0
((intruder, since),) = broke_in.items()
report = {
    "requests": len(entries),
    "broken": len(lines) - len(entries),
    "bytes_ok": sum(int(size) for *_, status, size in entries if status == "200"),
    "busiest_minute": Counter(entry[0][:16] for entry in entries).most_common(1)[0][0],
    "intruder": intruder,
    "taken": [e[3] for e in entries[since:] if (e[1], e[2], e[4]) == (intruder, "GET", "200")],
}
with open("/app/report.json", "w") as out:
    json.dump(report, out)
PY
