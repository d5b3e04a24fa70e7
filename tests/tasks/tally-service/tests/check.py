"""Exits 0 if the service on the port in /app/port.txt is this episode's own and counts rightly."""

import re
import secrets
import string
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path

WAIT_S = 5.0  # for a service that was started a moment ago


def line(path: str, pattern: str) -> str:
    """The only line of a file, or exits: a service without its two files is no service."""
    text = Path(path).read_text() if Path(path).is_file() else ""
    if not re.fullmatch(pattern + r"\n?", text):
        sys.exit(f"FAILED: {path} is {text[:80]!r}")
    return text.strip()


def ask(method: str, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(1000).decode().removesuffix("\n")
    finally:
        connection.close()


def ready() -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            return ask("GET", "/token") == (200, token)
        except (OSError, HTTPException):
            time.sleep(0.1)
    return False


token = line("/app/token.txt", "[a-z0-9]{16,64}")
port = int(line("/app/port.txt", "[1-9][0-9]{1,4}"))
if not ready():
    sys.exit(f"FAILED: nobody on port {port} answers with the token")
mine, other = ("".join(secrets.choice(string.ascii_lowercase) for _ in range(12)) for _ in range(2))
seen = [ask("GET", f"/tally/{mine}"), *(ask("POST", f"/tally/{mine}") for _ in range(3)), ask("GET", f"/tally/{other}")]
with ThreadPoolExecutor(8) as pool:
    burst = {status for status, _ in pool.map(lambda _: ask("POST", f"/tally/{other}"), range(24))}
seen += [ask("GET", f"/tally/{other}"), ask("GET", f"/tally/{mine}")]
if seen != [(200, count) for count in ("0", "1", "2", "3", "0", "24", "3")] or burst != {200}:
    sys.exit(f"FAILED: counted {seen}, {burst}")
if ask("GET", "/nothing/here")[0] != 404:
    sys.exit("FAILED: an unknown path is not a 404")
