import subprocess
import sys

import tbench2_env


def test_the_public_names() -> None:
    assert tbench2_env.__all__ == [
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
    assert all(hasattr(tbench2_env, name) for name in tbench2_env.__all__)


def test_importing_the_client_loads_nothing_of_a_server() -> None:
    heavy = ["openenv", "gradio", "fastapi", "uvicorn", "structlog", "tbench2_env.server", "tbench2_env.isolation"]
    program = f"import sys, tbench2_env; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
