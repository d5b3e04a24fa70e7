"""task.toml, typed: every version that Terminal-Bench-2 tasks have (see TASKS.md), unknown keys tolerated."""

import re
import tomllib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DEFAULT_VERIFIER_TIMEOUT_S = 900.0
DEFAULT_BUILD_TIMEOUT_S = 600.0
_HOST_VARIABLE = re.compile(r"\$\{\w+")


class TaskError(Exception):
    """A task cannot be used as it is; the text names the file, the key and the fix."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class VerifierTable(_Table):
    timeout_sec: float = Field(DEFAULT_VERIFIER_TIMEOUT_S, gt=0, allow_inf_nan=False)
    env: dict[str, str] = {}
    user: str | int | None = None
    #: Ours: false says that a 0 counts although nothing shows that the harness ran, see `harness.Script`.
    ctrf_required: bool = True


class AgentTable(_Table):
    timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False)
    user: str | int | None = None


class EnvironmentTable(_Table):
    build_timeout_sec: float = Field(DEFAULT_BUILD_TIMEOUT_S, gt=0, allow_inf_nan=False)
    docker_image: str | None = None
    workdir: str | None = Field(None, pattern="^/")
    env: dict[str, str] = {}
    cpus: float | None = Field(None, gt=0, allow_inf_nan=False)
    memory: str | None = None
    memory_mb: int | None = Field(None, gt=0)
    storage: str | None = None
    storage_mb: int | None = Field(None, gt=0)
    gpus: int = 0
    allow_internet: bool = True
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] = []
    healthcheck: dict[str, Any] | None = None
    mcp_servers: list[Any] = []


class SolutionTable(_Table):
    env: dict[str, str] = {}


class TaskConfig(_Table):
    """What the server, and the oracle, honour of task.toml. Timeouts are seconds, as in the file."""

    #: Free, and only shown: `tbench2 tasks list` has difficulty and category.
    metadata: dict[str, Any] = {}
    solution: SolutionTable = SolutionTable()
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    steps: list[Any] = []

    def unmet(self) -> list[str]:
        """Needs the task declares and this server meets on no host, a sentence each."""
        env, found = self.environment, []
        if env.gpus:
            found.append(f"environment.gpus = {env.gpus}: no GPU is passed into an episode")
        found += [f"environment.{key}: not supported" for key in ("healthcheck", "mcp_servers") if getattr(env, key)]
        found += [f"{table}.user = {user}: runs as root" for table, user in self._users() if user not in _ROOT]
        if self.steps:
            found.append("steps: not supported, the task runs as one step")
        return found + self._host_variables()

    def _users(self) -> list[tuple[str, str | int | None]]:
        return [("agent", self.agent.user), ("verifier", self.verifier.user)]

    def _host_variables(self) -> list[str]:
        tables = {"verifier": self.verifier.env, "environment": self.environment.env}
        return [
            f"{table}.env.{key} = {value}: the server's own variables are never passed on"
            for table, env in tables.items()
            for key, value in env.items()
            if _HOST_VARIABLE.search(value)
        ]


_ROOT = (None, "root", 0, "0", "")


def parse(text: str) -> TaskConfig:
    """Raises: TaskError naming the key that has a wrong value, or the line that is not TOML."""
    try:
        return TaskConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"task.toml is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise TaskError(f"task.toml: {key} = {first['input']!r}: {first['msg']}") from None
