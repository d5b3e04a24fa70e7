"""Configuration: the only reader of the process environment. Read once, at the composition root, then frozen."""

import tempfile
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tbench2_env.isolation.spec import RUNGS
from tbench2_env.server.images.bases import parse_bases
from tbench2_env.server.images.registry import parse_registries

DEFAULT_REPO_URL = "https://github.com/laude-institute/terminal-bench-2.git"


class SettingsError(Exception):
    """A variable has a value that cannot be served; the text names it and the fix."""


class Settings(BaseSettings):
    """The server's variables. Durations are seconds, sizes bytes; an empty variable counts as unset."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, populate_by_name=True, extra="ignore")

    mode: str = Field("local", validation_alias="TB2_MODE")
    tasks_dir: Path | None = Field(None, validation_alias="TB2_TASKS_DIR")
    output_dir: Path = Field(Path("/tmp/tbench2_env_runs"), validation_alias="TB2_OUTPUT_DIR")
    own_cache_dir: Path | None = Field(None, validation_alias="TB2_CACHE_DIR")
    repo_url: str = Field(DEFAULT_REPO_URL, validation_alias="TB2_REPO_URL")
    default_task_id: str = Field("headless-terminal", validation_alias="TB2_DEFAULT_TASK_ID")
    command_timeout_s: float = Field(20.0, gt=0, le=86_400, validation_alias="TB2_COMMAND_TIMEOUT_S")
    output_limit_bytes: int = Field(1 << 20, ge=1024, validation_alias="TB2_OUTPUT_LIMIT_BYTES")
    task_workdir: str | None = Field(None, validation_alias="TB2_TASK_WORKDIR")
    withhold_tests: str | None = Field(None, validation_alias="TB2_WITHHOLD_TESTS")
    keep_runs: int = Field(1000, ge=0, validation_alias="TB2_KEEP_RUNS")
    isolation: str = Field("auto", pattern=f"^(auto|{'|'.join(RUNGS)})$", validation_alias="TB2_ISOLATION")
    network: str = Field(
        "auto", pattern="^(auto|private|egress|host)$", validate_default=True, validation_alias="TB2_NETWORK"
    )
    limits: str = Field("task", pattern="^(task|off)$", validation_alias="TB2_LIMITS")
    nice: int = Field(5, ge=0, le=19, validation_alias="TB2_NICE")
    tamper: str = Field("report", pattern="^(report|drop|restore)$", validation_alias="TB2_TAMPER")
    scratch_dir: Path | None = Field(None, validation_alias="TB2_SCRATCH_DIR")
    environment: str = Field("auto", pattern="^(auto|build|image)$", validation_alias="TB2_ENVIRONMENT")
    bases: str = Field("", validation_alias="TB2_BASES")
    registry: str = Field("docker.io", validation_alias="TB2_REGISTRY")
    base_fallback: str = Field("node", pattern="^(node|refuse)$", validation_alias="TB2_BASE_FALLBACK")
    docker_config: Path = Field(Path("~/.docker"), validation_alias="DOCKER_CONFIG")
    store_max_gb: float | None = Field(None, gt=0, allow_inf_nan=False, validation_alias="TB2_STORE_MAX_GB")
    max_concurrent_envs: int = Field(8, ge=1, validate_default=True, validation_alias="MAX_CONCURRENT_ENVS")
    #: Sandboxes that are kept ready for resets to come, in all; 0: none.
    warm: int = Field(8, ge=0, le=4096, validation_alias="TB2_WARM")
    enable_web_interface: bool = Field(False, validation_alias="ENABLE_WEB_INTERFACE")
    queue_timeout_s: float = Field(0.0, ge=0, le=86_400, validation_alias="TB2_QUEUE_TIMEOUT_S")
    own_idle_timeout_s: float | None = Field(None, ge=0, validation_alias="TB2_IDLE_TIMEOUT_S")
    episode_timeout: str = Field("0", validation_alias="TB2_EPISODE_TIMEOUT_S")
    auth_token: SecretStr | None = Field(None, validation_alias="TB2_AUTH_TOKEN")
    log_format: str = Field("console", pattern="^(console|json)$", validation_alias="TB2_LOG_FORMAT")

    @field_validator("mode")
    @classmethod
    def _only_local(cls, mode: str) -> str:
        if mode.lower() != "local":
            raise ValueError(
                f"{mode!r} is not served: this server isolates episodes itself and needs no Docker; "
                "unset TB2_MODE or set it to local"
            )
        return "local"

    @field_validator("bases")
    @classmethod
    def _names_and_paths(cls, text: str) -> str:
        parse_bases(text)
        return text

    @field_validator("registry")
    @classmethod
    def _hosts(cls, text: str) -> str:
        parse_registries(text)
        return text

    @field_validator("episode_timeout")
    @classmethod
    def _seconds_or_task(cls, text: str) -> str:
        try:
            good = text == "task" or 0 <= float(text) < float("inf")
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"{text!r} is neither a number of seconds (0: off) nor task")
        return text

    @field_validator("network")
    @classmethod
    def _network_without_isolation(cls, network: str, info: ValidationInfo) -> str:
        if info.data.get("isolation") != "none":
            return network
        if network not in ("auto", "host"):
            raise ValueError(f"{network!r} needs isolation: unset TB2_NETWORK, or TB2_ISOLATION=none")
        return "host"

    @field_validator("max_concurrent_envs")
    @classmethod
    def _one_without_isolation(cls, most: int, info: ValidationInfo) -> int:
        if info.data.get("isolation") == "none" and most != 1:
            raise ValueError(f"{most} episodes need isolation: with TB2_ISOLATION=none, set MAX_CONCURRENT_ENVS=1")
        return most

    @field_validator("task_workdir")
    @classmethod
    def _absolute(cls, workdir: str | None) -> str | None:
        if workdir is not None and not workdir.startswith("/"):
            raise ValueError(f"{workdir!r} is not absolute: give a path as seen inside an episode, such as /app")
        return workdir

    def idle_timeout_s(self, *, http: bool) -> float | None:
        """Seconds after which an idle episode is reaped; None: never. A WebSocket's life is its connection's."""
        timeout_s = self.own_idle_timeout_s if self.own_idle_timeout_s is not None else (3600.0 if http else 0.0)
        return timeout_s or None

    def episode_timeout_s(self, agent_timeout_s: float | None) -> float | None:
        """Seconds that an episode may live; None: for ever. `agent_timeout_s` is what the task asks for."""
        if self.episode_timeout == "task":
            return agent_timeout_s
        return float(self.episode_timeout) or None

    @property
    def cache_dir(self) -> Path:
        """Absolute: the helpers, whose working directory is another, mount what is in it."""
        return (self.own_cache_dir or self.output_dir / "repo_cache").absolute()

    @property
    def scratch_candidates(self) -> list[str]:
        """Where worktrees may go, best first: a real filesystem, then memory."""
        if self.scratch_dir is not None:
            return [str(self.scratch_dir)]
        return [f"{folder}/tbench2_env_scratch" for folder in ("/var/tmp", tempfile.gettempdir(), "/dev/shm")]

    @classmethod
    def from_environment(cls) -> Self:
        """Raises: SettingsError, one line for each variable that cannot be served."""
        try:
            return cls()
        except ValidationError as error:
            lines = [
                f"{_variable(each['loc'])}: {each['msg'].removeprefix('Value error, ')}" for each in error.errors()
            ]
            raise SettingsError("; ".join(lines)) from None


def _variable(location: tuple[int | str, ...]) -> str:
    """The variable's name, also where it is a default that cannot be served."""
    field = Settings.model_fields.get(str(location[0]))
    return str(location[0] if field is None else field.validation_alias)
