"""The command `momentd` and its subcommands."""

from importlib.metadata import version

import click

from momentd_server.cli import inspect, manage, transfer
from momentd_server.cli.doctor import doctor
from momentd_server.cli.serve import serve
from momentd_server.cli.snapshot import snapshot
from momentd_server.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("momentd"), prog_name="momentd")
def momentd() -> None:
    """Optimizer state of sparse embeddings, out of the trainer's memory.

    Training scripts find or start the daemon by themselves; these commands are for the person who
    looks after it. Exit codes: 0 done, 1 failed or not serving, 2 wrong usage.
    """


momentd.add_command(serve)
momentd.add_command(snapshot)
momentd.add_command(verify)
momentd.add_command(doctor)
for command in (
    inspect.status,
    inspect.tables,
    inspect.stats,
    manage.runs,
    manage.stop,
    transfer.export_snapshot,
    transfer.import_snapshot,
):
    momentd.add_command(command)
