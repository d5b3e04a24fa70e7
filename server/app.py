"""The composition root: settings, services, routes, and `python3 -m tbench2_env.server.app --port N`."""

import argparse
import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from tbench2_env.isolation.sandbox import SandboxError
from tbench2_env.server import http, ws
from tbench2_env.server.services import Services
from tbench2_env.server.settings import Settings, SettingsError
from tbench2_env.server.telemetry import configure_logging

log = structlog.get_logger()

#: Seconds that open connections get to end once the server is told to stop.
_SHUTDOWN_GRACE_S = 2
# A trainer's event loop may be busy for long: a session is not to be dropped for a late pong. Lost peers are noticed
# by the kernel at the next answer.
_PING_INTERVAL_S, _PING_TIMEOUT_S = 20.0, 300.0


def create_app(services: Services) -> FastAPI:
    """The application over running services."""
    app = FastAPI(title="tbench2_env", version=http.VERSION, description=http.DESCRIPTION)
    http.add_routes(app)
    ws.add_routes(app, services)
    if services.settings.enable_web_interface:
        from tbench2_env.server.environment import web_interface

        # Behind our own routes: only what they do not answer, /web, goes there.
        app.mount("/", web_interface(services))
    return app


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Services]:
    """Services from start to stop. Raises: SandboxError, OSError."""
    services = await Services.start(settings)
    rung = services.spawner.rung
    log.info("isolation works", rung=rung.name, title=rung.title, scratch=str(services.spawner.folder))
    try:
        yield services
    finally:
        await services.stop()


async def serve(settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with running(settings) as services:
        config = uvicorn.Config(
            create_app(services), host=host, port=port, log_level="warning", ws_max_size=ws.MESSAGE_MAX_BYTES,
            ws_per_message_deflate=False, ws_ping_interval=_PING_INTERVAL_S, ws_ping_timeout=_PING_TIMEOUT_S,
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
        )  # fmt: skip
        log.info("listening", host=host, port=port, slots=settings.max_concurrent_envs)
        await _Server(config).serve()


class _Server(uvicorn.Server):
    """uvicorn kills its process with the signal it was stopped by, before anything is cleaned up; this one ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def raise_descriptor_limit() -> None:
    """An episode costs a handful of descriptors; take what the host allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tbench2_env.server.app", description=http.DESCRIPTION)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    arguments = parser.parse_args()
    try:
        settings = Settings.from_environment()
        configure_logging(settings.log_format)
        if settings.withhold_tests is not None:
            log.info("TB2_WITHHOLD_TESTS changes nothing: tests/ and solution/ are always out of the agent's reach")
        raise_descriptor_limit()
        asyncio.run(serve(settings, arguments.host, arguments.port))
    except (SettingsError, SandboxError) as error:
        sys.exit(f"tbench2_env: {error}")


if __name__ == "__main__":
    main()
