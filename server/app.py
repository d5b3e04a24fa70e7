"""The composition root: settings, services, routes, and `python3 -m tbench2_env.server.app --port N`."""

import argparse
import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from tbench2_env.isolation.process import SandboxError
from tbench2_env.server import doctor, http, ws
from tbench2_env.server.auth import Guard, is_loopback
from tbench2_env.server.problems import AsciiJson
from tbench2_env.server.services import Services
from tbench2_env.server.settings import Settings, SettingsError
from tbench2_env.server.telemetry import configure_logging

log = structlog.get_logger()

#: Seconds that open connections get to end once the server is told to stop.
_SHUTDOWN_GRACE_S = 2
# A peer that vanished without a word (a half-open connection) is given up after a missed pong. A trainer's event loop
# may be busy for many seconds, so the pong may be late.
_PING_INTERVAL_S, _PING_TIMEOUT_S = 20.0, 60.0


def create_app(services: Services) -> FastAPI:
    """The application over running services."""
    app = FastAPI(
        title="tbench2_env", version=http.VERSION, description=http.DESCRIPTION, default_response_class=AsciiJson
    )
    token = services.settings.auth_token
    app.add_middleware(Guard, token=None if token is None else token.get_secret_value())
    http.add_routes(app, services)
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
    try:
        yield services
    finally:
        await services.stop()


async def serve(settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with running(settings) as services:
        config = uvicorn.Config(
            create_app(services), host=host, port=port, log_config=None, ws_max_size=ws.MESSAGE_MAX_BYTES,
            ws_per_message_deflate=False, ws_ping_interval=_PING_INTERVAL_S, ws_ping_timeout=_PING_TIMEOUT_S,
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
        )  # fmt: skip
        if settings.auth_token is None and not is_loopback(host):
            log.warning("anyone who reaches this address can run commands here: set TB2_AUTH_TOKEN", host=host)
        await _Server(config, settings.max_concurrent_envs).serve()


class _Server(uvicorn.Server):
    """uvicorn kills its process with the signal it was stopped by, before anything is cleaned up; this one ends."""

    def __init__(self, config: uvicorn.Config, slots: int) -> None:
        super().__init__(config)
        self._slots = slots

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the process when the port cannot be had."""
        await super().startup(sockets)
        # 80,000 objects of imports and routes stay for good: looking through them again and again held up every
        # episode for 50 to 60 ms each time.
        gc.freeze()
        log.info("listening", host=self.config.host, port=self.config.port, slots=self._slots)

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


def examine(settings: Settings, *, as_json: bool) -> int:
    """Print what this host can do; answers with the exit status, 0 if it can isolate concurrent episodes."""
    report = asyncio.run(doctor.examine(settings))
    doctor.print_report(report, as_json=as_json)
    return 0 if report.works else 1


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise argparse.ArgumentTypeError(f"{port} is no port: give 0 to 65535")
    return port


def set_up() -> Settings:
    """What every process of the server begins with: its settings, its log, its descriptors. Raises: SettingsError."""
    settings = Settings.from_environment()
    configure_logging(settings.log_format)
    if settings.withhold_tests is not None:
        log.info("TB2_WITHHOLD_TESTS changes nothing: tests/ and solution/ are always out of the agent's reach")
    raise_descriptor_limit()
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tbench2_env.server.app", description=http.DESCRIPTION)
    parser.add_argument("command", nargs="?", choices=["doctor"], help="say what this host can do, and end")
    parser.add_argument("--json", action="store_true", help="doctor: print JSON")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on (default: 8000)")
    arguments = parser.parse_args()
    try:
        settings = set_up()
        if arguments.command == "doctor":
            sys.exit(examine(settings, as_json=arguments.json))
        asyncio.run(serve(settings, arguments.host, arguments.port))
    except (SettingsError, SandboxError) as error:
        sys.exit(f"tbench2_env: {error}")


if __name__ == "__main__":
    main()
