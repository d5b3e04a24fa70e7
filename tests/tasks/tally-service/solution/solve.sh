#!/bin/bash
set -e
cat > /app/tally.py << 'PY'
import re
import secrets
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

TOKEN = secrets.token_hex(16)
counts, lock = Counter(), Lock()


class Tally(BaseHTTPRequestHandler):
    def answer(self, status, body=""):
        data = f"{body}\n".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def serve(self, step):
        word = re.fullmatch("/tally/([a-z]+)", self.path)
        if word:
            with lock:
                counts[word[1]] += step
                count = counts[word[1]]
            self.answer(200, count)
        elif self.path == "/token" and not step:
            self.answer(200, TOKEN)
        else:
            self.answer(404)

    def do_GET(self):
        self.serve(0)

    def do_POST(self):
        self.serve(1)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64


server = Server(("127.0.0.1", 0), Tally)  # port 0: the kernel picks a free one
Path("/app/token.txt").write_text(f"{TOKEN}\n")
Path("/app/port.part").write_text(f"{server.server_address[1]}\n")
Path("/app/port.part").rename("/app/port.txt")
server.serve_forever()
PY
rm -f /app/port.txt
nohup setsid python3 /app/tally.py > /dev/null 2>&1 < /dev/null &
for _ in $(seq 25); do
  [ ! -s /app/port.txt ] || break
  sleep 0.1
done
[ -s /app/port.txt ]
