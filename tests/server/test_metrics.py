"""What /metrics and the log tell, and that it is true."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server import MakeServer, Server, eventually
from support.talk import begin, http, metric, soon, wire
from support.tasks import TOML, make_task

KINDS = {
    "tbench2_slots_active": "gauge",
    "tbench2_slots": "gauge",
    "tbench2_queued": "gauge",
    "tbench2_warm": "gauge",
    "tbench2_helper_restarts": "gauge",
    "tbench2_scratch_bytes": "gauge",
    "tbench2_resets": "counter",
    "tbench2_sandboxes": "counter",
    "tbench2_rejections": "counter",
    "tbench2_verdicts": "counter",
    "tbench2_ends": "counter",
    "tbench2_seconds": "histogram",
    "tbench2_loop_lag_seconds": "histogram",
}
VERDICTS = {
    "reward_1": "echo 1 > /logs/verifier/reward.txt",
    "reward_0": "echo 0 > /logs/verifier/reward.txt",
    "reward_other": "echo 0.5 > /logs/verifier/reward.txt",
    "tests_missing": None,
    "reward_missing": "true",
    "reward_invalid": "echo nan > /logs/verifier/reward.txt",
    "verifier_timeout": "sleep 99",
}


@pytest.fixture
def metered(make_server: MakeServer, tmp_path: Path) -> Server:
    folder = tmp_path / "verdict-tasks"
    make_task(folder, "ok")
    for name, test in VERDICTS.items():
        toml = TOML.replace("30.0", "0.5") if name == "verifier_timeout" else TOML
        make_task(folder, name.replace("_", "-"), test, toml=toml)
    return make_server({"MAX_CONCURRENT_ENVS": "2", "TB2_LOG_FORMAT": "json"}, tasks=folder)


def test_the_names_and_kinds(metered: Server) -> None:
    response = httpx.get(f"{metered.url}/metrics", trust_env=False)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    kinds = {name: family.type for name, family in families.items() if not name.endswith("_created")}
    assert kinds == KINDS
    assert all(family.documentation for name, family in families.items() if name in KINDS)
    assert metric(metered, "tbench2_slots") == 2
    eventually(lambda: metric(metered, "tbench2_loop_lag_seconds_count") >= 5, 3)


def test_every_verdict_moves_its_counter(metered: Server) -> None:
    with http(metered) as client:
        for done, name in enumerate(VERDICTS):
            episode_id = begin(client, name.replace("_", "-"))
            assert metric(metered, "tbench2_verdicts_total", outcome=name) == 0
            client.post(f"/episodes/{episode_id}/evaluate")
            assert metric(metered, "tbench2_verdicts_total", outcome=name) == 1
            client.delete(f"/episodes/{episode_id}")
            assert metric(metered, "tbench2_seconds_count", phase="evaluate") == done + 1
    assert metric(metered, "tbench2_ends_total", reason="deleted") == len(VERDICTS)


async def test_slots_resets_rejections_and_time(metered: Server) -> None:
    with http(metered) as client:
        first = begin(client)
        assert metric(metered, "tbench2_slots_active") == 1
        async with wire(metered) as session:
            await session.reset()
            assert metric(metered, "tbench2_slots_active") == 2
            assert client.post("/episodes", json={"task_id": "ok"}).status_code == 429
            async with wire(metered) as turned_away:
                assert (await turned_away.hear())["data"]["code"] == "CAPACITY_REACHED"
            assert metric(metered, "tbench2_rejections_total", reason="capacity") == 2
            await session.step(command="sleep 0.3")
        await soon(lambda: metric(metered, "tbench2_slots_active") == 1, 2)
        assert metric(metered, "tbench2_resets_total", outcome="ok") == 2
        assert metric(metered, "tbench2_seconds_count", phase="reset") == 2
        assert metric(metered, "tbench2_seconds_count", phase="exec") == 1
        assert 0.3 <= metric(metered, "tbench2_seconds_sum", phase="exec") < 3
        assert metric(metered, "tbench2_seconds_bucket", le="0.2", phase="exec") == 0
        assert client.post("/episodes", json={"task_id": "nope"}).status_code == 404
        assert metric(metered, "tbench2_slots_active") == 1
        client.delete(f"/episodes/{first}")


def test_bytes_in_scratch_come_and_go(metered: Server) -> None:
    with http(metered) as client:
        episode_id = begin(client)
        before = metric(metered, "tbench2_scratch_bytes")
        client.post(f"/episodes/{episode_id}/exec", json={"command": "head -c 30M /dev/urandom > f; sync f"})
        assert metric(metered, "tbench2_scratch_bytes") - before >= 30_000_000
        client.delete(f"/episodes/{episode_id}")
        eventually(lambda: metric(metered, "tbench2_scratch_bytes") <= before, 5)


def test_every_log_line_is_json_and_names_the_episode(metered: Server) -> None:
    with http(metered) as client:
        episode_id = begin(client)
        client.post(f"/episodes/{episode_id}/exec", json={"command": f"echo {Server.SECRET} never-in-the-log"})
        client.delete(f"/episodes/{episode_id}")

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in metered.log.read_text().splitlines()]

    eventually(lambda: any(line["event"] == "episode ended" for line in lines()), 3)
    assert all({"event", "level", "timestamp"} <= set(line) for line in lines())
    about = [line for line in lines() if line["event"].startswith("episode ")]
    assert [line["event"] for line in about] == ["episode began", "episode ended"]
    assert all((line["episode_id"], line["task_id"]) == (episode_id, "ok") for line in about)
    assert about[-1]["end"] == "deleted"
    assert "never-in-the-log" not in metered.log.read_text()
    assert Server.SECRET not in metered.log.read_text()


async def test_scrapes_do_not_disturb_episodes(metered: Server) -> None:
    """A scrape walks the scratch, in a thread."""
    async with wire(metered) as session:
        await session.reset()
        await session.step(command="mkdir d; cd d; seq 10000 | xargs touch")

        async def scrape() -> None:
            for _ in range(3):
                await asyncio.to_thread(metric, metered, "tbench2_scratch_bytes")

        scrapes = [asyncio.create_task(scrape()) for _ in range(4)]
        slowest_s = 0.0
        while not all(task.done() for task in scrapes):
            begun = time.monotonic()
            await session.step(command="true")
            slowest_s = max(slowest_s, time.monotonic() - begun)
        assert slowest_s < 1.5
        await asyncio.gather(*scrapes)


async def test_lines_of_the_libraries_are_json_too(metered: Server) -> None:
    """uvicorn tells of clients that speak no HTTP."""
    for data in (
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", metered.port)
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()
    lines = metered.log.read_text().splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert json.loads(line)["event"], line
