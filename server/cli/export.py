"""`tbench2 env export`: a task's environment as an image that docker, podman and skopeo load."""

from pathlib import Path

import click

from tbench2_env.server.cli import interrupt
from tbench2_env.server.cli.choice import catalogue
from tbench2_env.server.images.archive import ArchiveError
from tbench2_env.server.images.export import write_layout
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.layout import LayoutError
from tbench2_env.server.images.store import StoreError
from tbench2_env.server.settings import Settings
from tbench2_env.server.tasks import Task


@click.command("export")
@click.argument("name", metavar="TASK")
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@click.pass_context
def export(context: click.Context, /, name: str, target: Path) -> None:
    """Write a task's environment, built if need be, to DIR, a new folder: an OCI image layout.

    One over the node's own root cannot be exported, since that is not an image.
    """
    from tbench2_env.server import app  # half a second of imports that other commands do without

    settings = app.set_up()
    task = catalogue(settings).find(name)
    try:
        digest = interrupt.run(_export(settings, task, target))
    except interrupt.Interrupted:
        context.exit(interrupt.STATUS)
    except (StoreError, LayoutError, ArchiveError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{target}: {name} {digest}")


async def _export(settings: Settings, task: Task, target: Path) -> str:
    from tbench2_env.server import app

    async with app.running(settings) as services:
        engine = await services.engines.get()
        environment = (await engine.snapshots.get(task)).environment
        if environment.over_node:
            reasons = "; ".join(environment.unmet)
            raise click.ClickException(f"{task.task_id}: {environment.source}: the node's root is no image. {reasons}")
        # The account as numbers: they mean the same wherever the image goes.
        user = ":".join(map(str, environment.account.ids[:2])) or None
        config = ImageConfig(env=environment.env, workdir=environment.workdir, user=user)
        image = Image(environment.layers, config, environment.digest, environment.source)
        return await write_layout(target, image, engine.environments.store, task.task_id)
