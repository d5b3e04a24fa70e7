"""Client of a Terminal-Bench-2 environment server.

Public names only; they need nothing but pydantic and websockets, so that a rollout worker can import them
inside an inference image. The server is `tbench2_env.server`, an extra of the same distribution.
"""

from tbench2_env.client import Tbench2Env
from tbench2_env.errors import (
    BadRequest,
    CapacityReached,
    ConnectionClosed,
    EpisodeBusy,
    EpisodeEnded,
    ExecutionFailed,
    ReplyTimeout,
    ServerGone,
    Tbench2Error,
    Unauthorized,
    UnknownEpisode,
    UnknownTask,
    WireCode,
)
from tbench2_env.http import Tbench2HttpEnv
from tbench2_env.models import StepResult, Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.sync import SyncTbench2Env, SyncTbench2HttpEnv

__all__ = [
    "BadRequest",
    "CapacityReached",
    "ConnectionClosed",
    "EpisodeBusy",
    "EpisodeEnded",
    "ExecutionFailed",
    "ReplyTimeout",
    "ServerGone",
    "StepResult",
    "SyncTbench2Env",
    "SyncTbench2HttpEnv",
    "Tbench2Action",
    "Tbench2Env",
    "Tbench2Error",
    "Tbench2HttpEnv",
    "Tbench2Observation",
    "Tbench2State",
    "Unauthorized",
    "UnknownEpisode",
    "UnknownTask",
    "WireCode",
]
