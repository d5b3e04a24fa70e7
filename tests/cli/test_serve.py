"""`tbench2 serve` and `tbench2 doctor`: the server's own program, under other names."""

import json
import signal
import urllib.request
from pathlib import Path

from support.server import eventually, free_port

from .conftest import Program


def test_serve_until_it_is_told_to_stop(tmp_path: Path, small_tasks: Path) -> None:
    port = free_port()

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    with Program(tmp_path, small_tasks).start("serve", "--host", "127.0.0.1", "--port", str(port)) as process:
        try:
            eventually(healthy, 30)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert not list((tmp_path / "scratch").iterdir())


def test_doctor(tmp_path: Path, small_tasks: Path) -> None:
    done = Program(tmp_path, small_tasks).run("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["works"] is True
