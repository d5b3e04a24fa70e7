"""Settings: the variables, their defaults, and what is said of a wrong one."""

from pathlib import Path

import pytest

from tbench2_env.server.settings import Settings, SettingsError

VARIABLES = [str(field.validation_alias) for field in Settings.model_fields.values()]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = Settings.from_environment()
    assert settings.mode == "local"
    assert settings.tasks_dir is None
    assert settings.output_dir == Path("/tmp/tbench2_env_runs")
    assert settings.cache_dir == Path("/tmp/tbench2_env_runs/repo_cache")
    assert settings.default_task_id == "headless-terminal"
    assert settings.command_timeout_s == 20
    assert settings.max_concurrent_envs == 8
    assert settings.enable_web_interface is False
    assert settings.task_workdir is None
    assert "terminal-bench-2" in settings.repo_url


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_variable_is_as_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    assert Settings.from_environment() == Settings()


def test_every_variable_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "TB2_MODE": "LOCAL", "TB2_TASKS_DIR": "/t", "TB2_OUTPUT_DIR": "/o", "TB2_CACHE_DIR": "/c", "TB2_REPO_URL": "u",
        "TB2_DEFAULT_TASK_ID": "d", "TB2_COMMAND_TIMEOUT_S": "0.5", "TB2_TASK_WORKDIR": "/w",
        "MAX_CONCURRENT_ENVS": "64",
        "TB2_WITHHOLD_TESTS": "1", "ENABLE_WEB_INTERFACE": "true", "TB2_KEEP_RUNS": "0", "TB2_SCRATCH_DIR": "/s",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings = Settings.from_environment()
    assert (settings.mode, settings.tasks_dir, settings.output_dir) == ("local", Path("/t"), Path("/o"))
    assert (settings.cache_dir, settings.repo_url, settings.default_task_id) == (Path("/c"), "u", "d")
    assert (settings.command_timeout_s, settings.task_workdir, settings.max_concurrent_envs) == (0.5, "/w", 64)
    assert (settings.enable_web_interface, settings.keep_runs, settings.scratch_candidates) == (True, 0, ["/s"])


def test_upstreams_other_variables_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMEL_RUNTIME", "docker")
    monkeypatch.setenv("TB2_SOMETHING_NEW", "x")
    assert Settings.from_environment() == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TB2_MODE", "docker"),
        ("TB2_COMMAND_TIMEOUT_S", "soon"),
        ("TB2_COMMAND_TIMEOUT_S", "0"),
        ("TB2_COMMAND_TIMEOUT_S", "-1"),
        ("TB2_COMMAND_TIMEOUT_S", "nan"),
        ("TB2_COMMAND_TIMEOUT_S", "inf"),
        ("TB2_EPISODE_TIMEOUT_S", "soon"),
        ("TB2_EPISODE_TIMEOUT_S", "-1"),
        ("TB2_EPISODE_TIMEOUT_S", "nan"),
        ("TB2_EPISODE_TIMEOUT_S", "inf"),
        ("MAX_CONCURRENT_ENVS", "0"),
        ("MAX_CONCURRENT_ENVS", "2.5"),
        ("MAX_CONCURRENT_ENVS", "many"),
        ("TB2_KEEP_RUNS", "-1"),
        ("TB2_OUTPUT_LIMIT_BYTES", "1"),
        ("ENABLE_WEB_INTERFACE", "perhaps"),
        ("TB2_TASK_WORKDIR", "app"),
        ("TB2_LOG_FORMAT", "xml"),
        ("TB2_TAMPER", "perhaps"),
        ("TB2_NICE", "-1"),
        ("TB2_NICE", "20"),
    ],
)
def test_a_wrong_value_names_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        Settings.from_environment()


def test_all_wrong_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_CONCURRENT_ENVS", "x")
    monkeypatch.setenv("TB2_COMMAND_TIMEOUT_S", "x")
    with pytest.raises(SettingsError, match="TB2_COMMAND_TIMEOUT_S") as caught:
        Settings.from_environment()
    assert "MAX_CONCURRENT_ENVS" in str(caught.value)
    assert "TB2_COMMAND_TIMEOUT_S" in str(caught.value)
