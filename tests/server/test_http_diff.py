"""GET /episodes/ID/diff: what an episode changed, and one changed file's content."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import Server
from support.talk import begin, execute, problem

EMPTY: dict[str, Any] = {"added": [], "modified": [], "deleted": [], "unreadable": [], "truncated": False}


def _exec(client: httpx.Client, episode: str, command: str) -> None:
    answer = execute(client, episode, command)
    assert answer["exit_code"] == 0, answer


def _diff(client: httpx.Client, episode: str) -> dict[str, Any]:
    response = client.get(f"{episode}/diff")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def _get(client: httpx.Client, episode: str, path: str) -> httpx.Response:
    return client.get(f"{episode}/diff", params={"path": path})


def test_a_new_episode_has_changed_nothing(client: httpx.Client, episode: str) -> None:
    assert _diff(client, episode) == EMPTY


def test_what_was_changed(client: httpx.Client, episode: str) -> None:
    _exec(client, episode, "echo ok > out.txt; chmod 640 out.txt; echo '1.2.3.4 x' > /etc/hosts; rm /usr/bin/env")
    _exec(client, episode, "mkdir d; ln -s /etc/passwd d/link; mkfifo d/pipe; chmod 700 /opt")
    diff = _diff(client, episode)
    assert diff["added"][:2] == [
        {"path": "/app/d", "type": "folder", "size": diff["added"][0]["size"], "mode": "755", "kind": "added",
         "origin": None, "quoted": None},
        {"path": "/app/d/link", "type": "link", "size": 11, "mode": "777", "kind": "added", "origin": None,
         "quoted": None},
    ]  # fmt: skip
    found = {
        name: [(entry["path"], entry["kind"]) for entry in diff[name]] for name in ("added", "modified", "deleted")
    }
    assert found == {
        "added": [(path, "added") for path in ("/app/d", "/app/d/link", "/app/d/pipe", "/app/out.txt")],
        "modified": [("/etc/hosts", "modified"), ("/opt", "metadata")],
        "deleted": [("/usr/bin/env", "deleted")],
    }
    assert (diff["added"][3]["size"], diff["added"][3]["mode"]) == (3, "640")
    assert diff["modified"][0]["size"] == 10
    assert diff["deleted"][0]["size"] == Path("/usr/bin/env").stat().st_size
    assert (diff["unreadable"], diff["truncated"]) == ([], False)


def test_one_files_content(client: httpx.Client, episode: str) -> None:
    content = bytes(range(256)) * 3000
    client.put(f"{episode}/files", params={"path": "data"}, content=content)
    _exec(client, episode, "chmod 600 /usr/bin/env; echo '1.2.3.4 x' >> /etc/hosts")
    for path in ("data", "/app/data", "/app/../app//data", "../app/data"):
        response = _get(client, episode, path)
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.content == content
    assert _get(client, episode, "/etc/hosts").content.endswith(b"1.2.3.4 x\n")
    # Only its mode was changed: the overlay has no data of it.
    assert _get(client, episode, "/usr/bin/env").content == Path("/usr/bin/env").read_bytes()


def test_what_has_no_content(client: httpx.Client, episode: str) -> None:
    _exec(client, episode, "rm /usr/bin/env; rm -rf /usr/share/doc; mkdir d; ln -s /etc/hosts link; mkfifo pipe")
    for path in ("/etc/hosts", "nothing", "/usr/bin/env", "/usr/share/doc/x", "link/x", "/bin/env", "x" * 300, "."):
        problem(_get(client, episode, path), 404, "NOT_CHANGED")
    for path in ("d", "link", "pipe", "/", "..", "/app/", "a\0b", "x" * 5000, ""):
        assert "path" in problem(_get(client, episode, path), 422, "VALIDATION_ERROR")["detail"]


def test_paths_stay_in_the_episode(server: Server, client: httpx.Client, episode: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    _exec(client, episode, f"ln -s {tmp_path} folder; ln -s {tmp_path}/secret file; ln -s / root; mkdir x")
    for path in (
        f"{tmp_path}/secret",
        "folder/secret",
        "file",
        f"root{tmp_path}/secret",
        f"../../../..{tmp_path}/secret",
    ):
        assert _get(client, episode, path).status_code in (404, 422)
    for host_path in (server.log, server.tasks / "ok/tests/test.sh", "/proc/self/environ", "/tests/test.sh"):
        problem(_get(client, episode, str(host_path)), 404, "NOT_CHANGED")
    listed = str(_diff(client, episode))
    assert "secret" not in listed.replace(str(tmp_path), "")


@pytest.mark.parametrize("name", [b"with space", b"new\nline", b"gr\xc3\xbcn", b"%41", b"-rf", b"a\xffb?&#+"])
def test_unusual_names(client: httpx.Client, episode: str, name: bytes) -> None:
    escaped = "".join(f"\\x{byte:02x}" for byte in name)
    _exec(client, episode, f"printf x > $'{escaped}'")
    [entry] = _diff(client, episode)["added"]
    assert entry["path"] == "/app/" + name.decode(errors="replace")
    is_text = name.decode(errors="replace").encode() == name
    assert (entry["quoted"] is None) is is_text
    if is_text:
        assert _get(client, episode, entry["path"]).content == b"x"
    else:
        assert client.get(f"{episode}/diff?path={entry['quoted']}").content == b"x"


def test_a_long_list_is_cut_and_says_so(client: httpx.Client, episode: str) -> None:
    _exec(client, episode, "mkdir many; cd many; touch {1..10500}")
    diff = _diff(client, episode)
    assert len(diff["added"]) == 10_000
    assert diff["truncated"] is True


def test_a_running_command_is_not_waited_for(client: httpx.Client, episode: str) -> None:
    client.post(f"{episode}/exec?wait=0", json={"command": "echo x > begun; sleep 60"})
    while not _diff(client, episode)["added"]:
        pass
    assert _get(client, episode, "begun").status_code == 200


def test_no_episode(client: httpx.Client) -> None:
    problem(client.get("/episodes/nothing/diff"), 404, "UNKNOWN_EPISODE")
    episode = f"/episodes/{begin(client)}"
    client.delete(episode)
    for query in ("", "?path=/etc/hosts"):
        problem(client.get(f"{episode}/diff{query}"), 409, "EPISODE_ENDED")
