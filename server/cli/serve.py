"""`tbench2 serve` and `tbench2 doctor`: what `python3 -m tbench2_env.server.app` does, as commands."""

import asyncio

import click


@click.command()
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8000, show_default=True, help="Port to listen on.")
def serve(host: str, port: int) -> None:
    """Serve episodes until SIGTERM or Ctrl-C."""
    from tbench2_env.server import app  # half a second of imports that the other commands do without

    asyncio.run(app.serve(app.set_up(), host, port))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what this host can do; exit status 0 if it isolates."""
    from tbench2_env.server import app

    context.exit(app.examine(app.set_up(), as_json=as_json))
