"""Pieces of work as data: what the agent does, and what the task's test then wants to see."""

from dataclasses import dataclass
from enum import StrEnum


class Needs(StrEnum):
    """What not every node has."""

    NOTHING = ""
    IDS = "other user ids"
    DEBIAN = "other user ids, and packages from Debian's mirror"


@dataclass(frozen=True)
class Work:
    """`commands` are carried out one by one; then every line of `check`, run by the verifier, must succeed.

    Before the work the check must fail. `undone` work is itself a change of what verifiers trust: they do not see it
    with TB2_TAMPER=restore.
    """

    commands: tuple[str, ...]
    check: str
    needs: Needs = Needs.NOTHING
    undone: bool = False


def _install(*packages: str) -> str:
    """apt-get with little patience, so that a node without a way out fails soon and says so."""
    patience = "-o Acquire::Retries=1 -o Acquire::http::Timeout=15"
    return (
        f"export DEBIAN_FRONTEND=noninteractive; apt-get {patience} update -q 2>&1 | tail -2 && apt-get {patience}"
        f" install -qy --no-install-recommends {' '.join(packages)} > /tmp/apt.log 2>&1 || {{ tail -5 "
        f"/tmp/apt.log; false; }}"
    )


#: `wait_for COMMAND`: until it succeeds, ten seconds at most. Before the work nothing is to be waited for: what a check
#: wants first is there without any service.
_WAIT = 'wait_for() { for i in {1..200}; do "$@" >/dev/null 2>&1 && return; sleep 0.05; done; return 1; }\n'

_SERVER_PY = """
import http.server, os, pathlib
pathlib.Path("/run/app.pid").write_text(str(os.getpid()))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open("/var/log/app.log", "a") as log:
            log.write(self.path + "\\n")
        body = pathlib.Path("/data/value").read_bytes()
        self.send_response(200), self.end_headers(), self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 5328), Handler).serve_forever()
"""

WORKS = {
    "a tool in /usr/local/bin": Work(
        ("printf '#!/bin/bash\\necho \"hello $1\"\\n' > /usr/local/bin/greet; chmod +x /usr/local/bin/greet",),
        '[ "$(greet you)" = "hello you" ]\n[ "$(command -v greet)" = /usr/local/bin/greet ]',
    ),
    "an edited ~/.bashrc": Work(
        ("echo 'alias deploy=\"echo deployed\"; export EDITOR=ed' >> ~/.bashrc",),
        "grep -q EDITOR=ed ~/.bashrc\n"
        '[ "$(bash -ic deploy 2>/dev/null)" = deployed ]\n[ "$(bash -ic \'echo $EDITOR\' 2>/dev/null)" = ed ]',
    ),
    "PATH set in /etc/profile.d": Work(
        (
            "mkdir -p /opt/suite/bin; printf '#!/bin/sh\\necho suite 3\\n' > /opt/suite/bin/suite; "
            "chmod +x /opt/suite/bin/*",
            "echo 'export PATH=/opt/suite/bin:$PATH SUITE_HOME=/opt/suite' > /etc/profile.d/suite.sh",
        ),
        '[ "$(bash -lc suite)" = "suite 3" ]\n[ "$(bash -lc \'echo $SUITE_HOME\')" = /opt/suite ]',
        undone=True,
    ),
    "git and ssh set up in HOME": Work(
        (
            "git config --global user.name Ines; git config --global alias.st 'status --short'",
            "mkdir -m 700 ~/.ssh; ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519; echo 'Host x' > ~/.ssh/config",
        ),
        '[ "$(git config --global user.name)" = Ines ]\n[ "$(stat -c %a ~/.ssh/id_ed25519)" = 600 ]\n'
        "ssh-keygen -lf ~/.ssh/id_ed25519.pub | grep -q ED25519\ngrep -qx 'Host x' ~/.ssh/config",
        undone=True,
    ),
    "a service that is alive at the grade": Work(
        (
            f"mkdir -p /server /data; echo 42 > /data/value; cat > /server/app.py <<'EOF'{_SERVER_PY}EOF",
            "cd /server; nohup python3 app.py >/dev/null 2>&1 &",
        ),
        _WAIT + "[ -e /server/app.py ]\nwait_for curl -sf http://localhost:5328/\n"
        '[ "$(curl -s http://localhost:5328/asked)" = 42 ]\n'
        "pid=$(cat /run/app.pid)\nkill -0 $pid\npgrep -f app.py | grep -qx $pid\n"
        "tr '\\0' ' ' < /proc/$pid/cmdline | grep -q 'python3 app.py'\n"
        '[ "$(readlink /proc/$pid/cwd)" = /server ]\ngrep -q /asked /var/log/app.log\n'
        "ss -Hltn 'sport = :5328' | grep -q 127.0.0.1",
    ),
    "a loop like cron's": Work(
        (
            "mkdir -p /data; cat > /usr/local/sbin/ticker <<'EOF'\n#!/bin/bash\n"
            "while :; do date +%s%N >> /data/ticks; sleep 0.1; done\nEOF\nchmod +x /usr/local/sbin/ticker",
            "setsid ticker >/dev/null 2>&1 </dev/null & disown; until [ -s /data/ticks ]; do sleep 0.01; done",
        ),
        "before=$(wc -l < /data/ticks)\nfor i in {1..50}; do sleep 0.1; "
        "[ $(wc -l < /data/ticks) -gt $((before + 1)) ] && break; done\n"
        "[ $(wc -l < /data/ticks) -gt $((before + 1)) ]",
    ),
    "a chroot jail": Work(
        (
            "mkdir -p /jail/{bin,etc,tmp}; cp /bin/bash /bin/cat /jail/bin/; echo inside > /jail/etc/where",
            "for lib in $(ldd /bin/bash /bin/cat | grep -o '/[^ :]*so[^ ]*'); do mkdir -p /jail${lib%/*}; "
            "cp -L $lib /jail$lib; done",
        ),
        '[ "$(chroot /jail /bin/cat /etc/where)" = inside ]\nchroot /jail /bin/bash -c \'[ ! -e /usr/bin/python3 ]\'',
    ),
    "a python package rebuilt into the system": Work(
        (
            "mkdir -p lib/tally; echo 'def count(n): return n + 1' > lib/tally/__init__.py; "
            "cat > lib/setup.py <<'EOF'\n"
            "from setuptools import setup\nsetup(name='tally', version='2.0', packages=['tally'])\nEOF\n"
            "cd lib && python3 setup.py -q install --root / --single-version-externally-managed 2>&1 | tail -3",
        ),
        "cd /\npython3 -c 'import tally; assert tally.count(1) == 2'\n"
        "python3 -c 'import importlib.metadata as m; assert m.version(\"tally\") == \"2.0\"'",
        undone=True,
    ),
    "a C extension in a virtual environment": Work(
        (
            "python3 -m venv --without-pip --system-site-packages venv; mkdir src; cat > src/fast.c <<'EOF'\n"
            "int twice(int n) { return 2 * n; }\nEOF\ngcc -shared -fPIC -O2 -o venv/fast.so src/fast.c",
            "at=$(venv/bin/python -c 'import site; print(site.getsitepackages()[0])'); cat > $at/fast.py <<'EOF'\n"
            "import ctypes\ntwice = ctypes.CDLL('/app/venv/fast.so').twice\nEOF",
        ),
        '[ "$(venv/bin/python -c \'import fast; print(fast.twice(21))\')" = 42 ]\n'
        '! python3 -c "import fast" 2>/dev/null',
    ),
    "a library for everybody, by ldconfig": Work(
        (
            "echo 'int answer(void) { return 42; }' > answer.c; "
            "gcc -shared -fPIC -o /usr/local/lib/libanswer.so answer.c; ldconfig",
            "printf '#include <stdio.h>\\nint answer(void);\\nint main(void) { printf(\"%%d\\\\n"
            "\", answer()); }\\n' > main.c;"
            " gcc -o /usr/local/bin/answer main.c -lanswer",
        ),
        '[ "$(answer)" = 42 ]\nldconfig -p | grep -q libanswer.so',
    ),
    "a project with its own conftest.py and pytest.ini": Work(
        (
            "printf '[pytest]\\npythonpath = src\\n' > pytest.ini; mkdir -p src tests",
            "echo 'import sys; sys.modules.setdefault(\"settings\", sys)' > conftest.py; "
            "echo 'def f(): return 7' > src/thing.py",
        ),
        "export PYTHONPATH=/tests/kit\ncp /tests/hidden_test.py /app/tests/test_thing.py\n"
        "python3 -m pytest -q -p no:cacheprovider tests/test_thing.py",
    ),
    "a database file that is in use": Work(
        (
            "mkdir -p /data; cat > keep.py <<'EOF'\nimport sqlite3, time\n"
            "db = sqlite3.connect('/data/shop.db', isolation_level=None)\ndb.execute('pragma journal_mode=wal')\n"
            "db.execute('create table sales (price int)')\n"
            "db.executemany('insert into sales values (?)', [(4,), (38,)])\n"
            "open('/run/ready', 'w').close()\ntime.sleep(1000)\nEOF\nnohup python3 keep.py >/dev/null 2>&1 &"
            " for i in {1..200}; do [ -e /run/ready ] && break; sleep 0.05; done; ls /data",
        ),
        "ls /data/shop.db-wal\n[ \"$(python3 -c 'import sqlite3; "
        'print(*sqlite3.connect("/data/shop.db").execute("select sum(price) from sales").fetchone())\')" = 42 ]',
    ),
    "an entry in /etc/hosts": Work(
        ("mkdir site; echo up > site/index.html; (cd site; nohup python3 -m http.server 80 >/dev/null 2>&1 &)",
         "echo '127.0.0.1 shop.internal' >> /etc/hosts"),
        _WAIT + "grep -q shop.internal /etc/hosts\nwait_for curl -sf http://shop.internal/\n"
        '[ "$(curl -s http://shop.internal/)" = up ]',
        undone=True,
    ),
    "a certificate that is trusted": Work(
        (
            "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 9 -subj /CN=localhost"
            " -addext subjectAltName=DNS:localhost 2>/dev/null; cp cert.pem /usr/local/share/ca-certificates/own.crt",
            "update-ca-certificates 2>&1 | tail -1; "
            "nohup openssl s_server -quiet -accept 8443 -cert cert.pem -key key.pem"
            " -WWW >/dev/null 2>&1 & echo up > index.html",
        ),
        _WAIT + "ls /usr/local/share/ca-certificates/own.crt\nwait_for curl -sf https://localhost:8443/index.html\n"
        "curl -s https://localhost:8443/index.html | grep -q up",
        undone=True,
    ),
    "users and groups, as mailman wants them": Work(
        (
            "groupadd mailman; useradd --system --create-home --home-dir /var/lib/mailman3 --gid mailman "
            "--shell /bin/sh mailman",
            "mkdir -p /etc/mailman3 /var/mail; echo x > /var/mail/ann; chown mailman:mailman /var/mail/ann; "
            "chmod 640 /var/mail/ann",
        ),
        '[ "$(su mailman -c "id -un; id -gn" | xargs)" = "mailman mailman" ]\n'
        '[ "$(stat -c %U:%G /var/mail/ann)" = mailman:mailman ]\n'
        "getent passwd mailman | grep -q /var/lib/mailman3\n"
        "! su nobody -s /bin/sh -c 'cat /var/mail/ann' 2>/dev/null",
        Needs.IDS,
    ),
    "a git server with a user git": Work(
        (
            "useradd --create-home --shell /usr/bin/git-shell git; mkdir -p /srv/git",
            "git init -q --bare -b main /srv/git/shop.git; chown -R git:git /srv/git",
            "setsid su git -s /bin/bash -c 'exec git daemon --reuseaddr --export-all --enable=receive-pack "
            "--base-path=/srv/git'"
            " >/dev/null 2>&1 & cat > /srv/git/shop.git/hooks/post-receive <<'EOF'\n#!/bin/sh\n"
            "echo deployed > /srv/git/deployed\nEOF\n"
            "chmod +x /srv/git/shop.git/hooks/post-receive",
        ),
        _WAIT + "ls /srv/git\ncd $(mktemp -d)\nwait_for git ls-remote git://localhost/shop.git\n"
        "git clone -q git://localhost/shop.git\ncd shop\n"
        "echo x > f\ngit add f\ngit -c user.name=t -c user.email=t@t commit -qm f\ngit push -q origin HEAD:main\n"
        '[ "$(cat /srv/git/deployed)" = deployed ]\n[ "$(stat -c %U /srv/git/deployed)" = git ]\n'
        'pgrep -u git git-daemon',
        Needs.IDS,
    ),
    "a package of Debian's": Work(
        (_install("hello"),),
        '[ "$(hello)" = "Hello, world!" ]\ndpkg -s hello | grep -q "install ok installed"',
        Needs.DEBIAN,
    ),
    "sshd and a user with a password": Work(
        (
            _install("openssh-server"),
            "useradd -m -s /bin/bash ann; echo 'ann:secret-1' | chpasswd; mkdir -p /run/sshd",
            "sed -i 's/^#*PasswordAuthentication.*/PasswordAuthentication yes/' /etc/ssh/sshd_config; "
            "/usr/sbin/sshd -p 2222",
        ),
        "printf '#!/bin/sh\\necho secret-1\\n' > /tmp/pass; chmod +x /tmp/pass\n"
        "export SSH_ASKPASS=/tmp/pass SSH_ASKPASS_REQUIRE=force\n"
        "out=$(setsid ssh -p 2222 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null ann@localhost "
        "'id -un; pwd')\n"
        '[ "$(echo $out)" = "ann /home/ann" ]',
        Needs.DEBIAN,
    ),
    "nginx with a configuration of its own": Work(
        (
            _install("nginx-light"),
            "mkdir -p /var/www/shop; echo '<h1>shop</h1>' > /var/www/shop/index.html; "
            "cat > /etc/nginx/conf.d/shop.conf <<'EOF'\n"
            "log_format brief '$request_uri $status';\nserver { listen 8080; root /var/www/shop;\n"
            " access_log /var/log/nginx/shop.log brief; error_page 404 /index.html; }\nEOF\nnginx -t 2>&1; nginx",
        ),
        _WAIT + "ls /var/www/shop\nwait_for curl -sf http://localhost:8080/\n"
        "curl -s http://localhost:8080/nothing | grep -q shop\n"
        "grep -qx '/nothing 404' /var/log/nginx/shop.log\npgrep -u www-data nginx\n"
        "nginx -T 2>/dev/null | grep -q 'listen 8080'",
        Needs.DEBIAN,
    ),
}  # fmt: skip
