"""`momentd doctor`: why a data directory does not open, and what to do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.text import Text

from momentd_server.cli.options import Command, json_option
from momentd_server.cli.output import console, print_json
from momentd_server.config import from_environment

_STYLES: Final = {"good": "green", "note": "yellow", "problem": "red"}


@click.command(cls=Command)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The directory; default: $MOMENTD_DATA_DIR, else momentd in the XDG state directory.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, data_dir: Path | None, *, as_json: bool) -> None:
    """Explain the state of a data directory and of the machine, and the next step.

    Changes nothing. Exit code 0: nothing keeps a daemon from serving it. 1: something does, or
    tables are not whole.
    """
    from momentd_server.storage.doctor import examine

    findings = examine(data_dir or from_environment().data_dir)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        out = console()
        for finding in findings:
            line = Text.assemble((finding.level.ljust(9), _STYLES[finding.level]), finding.subject)
            line.append(f": {finding.what}")
            out.print(line)
            if finding.next_step:
                out.print(Text(f"{'':9}-> {finding.next_step}"))
    if any(finding.level == "problem" for finding in findings):
        ctx.exit(1)
