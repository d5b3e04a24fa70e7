"""`tbench2`: the command line. Each group of commands has a module of its own."""

import click

from tbench2_env.isolation.process import SandboxError
from tbench2_env.server.cli.env import env
from tbench2_env.server.cli.oracle import oracle
from tbench2_env.server.cli.serve import doctor, serve
from tbench2_env.server.cli.tasks import tasks
from tbench2_env.server.cli.toolchain import toolchain
from tbench2_env.server.settings import SettingsError
from tbench2_env.server.taskconfig import TaskError


class _Group(click.Group):
    """What the server raises with advice for people is shown as that, without a traceback, with exit status 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (SettingsError, SandboxError, TaskError) as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Terminal-Bench-2 tasks on this machine, without Docker.

    All commands read the server's variables: TB2_TASKS_DIR says where the tasks are.
    """


for command in (serve, doctor, tasks, env, toolchain, oracle):
    main.add_command(command)
