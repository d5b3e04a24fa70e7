"""task.toml of every version that TASKS.md counts."""

from typing import Any

import pytest

from support.server import Server
from tbench2_env import ExecutionFailed
from tbench2_env.server.taskconfig import DEFAULT_VERIFIER_TIMEOUT_S, TaskConfig, TaskError, parse

from .conftest import AddTask

VERSION_2_0 = """
version = "1.0"
[metadata]
author_name = "A"
author_email = "a@b.c"
difficulty = "medium"
category = "software-engineering"
tags = ["coding", "c"]
expert_time_estimate_min = 10.0
junior_time_estimate_min = 40
[verifier]
timeout_sec = 1800.0
[agent]
timeout_sec = 900
[environment]
build_timeout_sec = 600.0
docker_image = "example/image:20251031"
cpus = 2
memory = "4G"
storage = "10G"
"""
VERSION_2_1 = """
schema_version = "1.1"
artifacts = []
[task]
name = "terminal-bench/x"
description = "d"
keywords = []
[[task.authors]]
name = "A"
[verifier]
timeout_sec = 360.0
[verifier.env]
MODEL = "m"
[agent]
timeout_sec = 360.0
[environment]
memory_mb = 2048
storage_mb = 10240
gpus = 1
allow_internet = false
mcp_servers = [{ name = "x" }]
[environment.env]
A = "1"
[solution.env]
KEY = "k"
"""
NEWEST = """
schema_version = "1.4"
steps = [{ name = "one" }]
[agent]
user = "agent"
[verifier]
user = "root"
env = { KEY = "${API_KEY}" }
[environment]
network_mode = "allowlist"
allowed_hosts = ["mirror.example"]
workdir = "/workspace"
healthcheck = { command = "true" }
[later]
unknown = 1
"""


def test_version_2_0() -> None:
    config = parse(VERSION_2_0)
    assert (config.verifier.timeout_sec, config.agent.timeout_sec, config.environment.cpus) == (1800.0, 900.0, 2)
    assert config.unmet() == []


def test_version_2_1() -> None:
    config = parse(VERSION_2_1)
    assert (config.verifier.env, config.environment.env) == ({"MODEL": "m"}, {"A": "1"})
    assert {line.split(":")[0] for line in config.unmet()} == {
        "environment.gpus = 1",
        "environment.mcp_servers",
    }


def test_the_newest() -> None:
    config = parse(NEWEST)
    assert config.environment.workdir == "/workspace"
    assert {line.split(":")[0] for line in config.unmet()} == {
        "environment.healthcheck",
        "agent.user = agent",
        "steps",
        "verifier.env.KEY = ${API_KEY}",
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "[metadata]\n", "[verifier]\n", "[something]\nelse = [1, 2]\n"])
def test_what_is_not_said_has_a_default(text: str) -> None:
    assert parse(text) == TaskConfig()
    assert parse(text).verifier.timeout_sec == DEFAULT_VERIFIER_TIMEOUT_S
    assert parse(text).unmet() == []


@pytest.mark.parametrize("value", ["public"])
def test_a_public_network_is_met(value: str) -> None:
    assert parse(f'[environment]\nnetwork_mode = "{value}"\n').unmet() == []


WRONG: dict[str, Any] = {
    "verifier.timeout_sec": "[verifier]\ntimeout_sec = 0\n",
    "verifier.timeout_sec ": "[verifier]\ntimeout_sec = -1.5\n",
    "verifier.timeout_sec  ": '[verifier]\ntimeout_sec = "soon"\n',
    "verifier.timeout_sec   ": "[verifier]\ntimeout_sec = nan\n",
    "verifier.timeout_sec    ": "[verifier]\ntimeout_sec = inf\n",
    "agent.timeout_sec": "[agent]\ntimeout_sec = 0\n",
    "verifier.env": "[verifier]\nenv = 1\n",
    "verifier.env.A": "[verifier.env]\nA = [1]\n",
    "environment.workdir": '[environment]\nworkdir = "app"\n',
    "environment.network_mode": '[environment]\nnetwork_mode = "some"\n',
    "environment.cpus": '[environment]\ncpus = "many"\n',
    "verifier": "verifier = 1\n",
    "steps": "steps = 1\n",
    "line": "[verifier\n",
}


@pytest.mark.parametrize(("key", "text"), WRONG.items())
def test_a_wrong_value_is_named(key: str, text: str) -> None:
    with pytest.raises(TaskError, match=r"task\.toml") as caught:
        parse(text)
    assert key.strip() in str(caught.value)


# ---------------------------------------------------------------- over the server
async def test_reset_tells_what_the_task_says(server: Server, add_task: AddTask) -> None:
    task = add_task(None, toml=VERSION_2_0)
    async with server.client() as env:
        info = (await env.reset(task_id=task)).observation.info
        assert (info["verifier_timeout_sec"], info["agent_timeout_sec"], info["command_timeout_s"]) == (1800, 900, 20)
        assert any(line.startswith("base image ") for line in info["unmet"])
        assert info["isolation"]["limits"]["memory"]["bytes"] == 4 << 30


async def test_a_broken_task_is_the_servers_error_and_named(server: Server, add_task: AddTask) -> None:
    broken = add_task(None, toml="[verifier]\ntimeout_sec = 0\n")
    async with server.client() as env:
        with pytest.raises(ExecutionFailed, match=f"{broken}.*verifier.timeout_sec"):
            await env.reset(task_id=broken)
        assert (await env.reset(task_id="ok")).observation.success
