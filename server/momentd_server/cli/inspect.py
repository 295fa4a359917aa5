"""Commands that only look: status, tables, stats."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import click
from rich.live import Live

from momentd_server.cli import views
from momentd_server.cli.options import DURATION, Command, Target, control_options
from momentd_server.cli.output import console, plain, print_json, width
from momentd_wire.v1 import momentd_pb2 as pb

run_option = click.option("--run", metavar="RUN", help="Only this run.")
drive_option = click.option(
    "--drive-tbw",
    type=click.FloatRange(min=0, min_open=True),
    default=views.DRIVE_TBW,
    metavar="TB",
    help="Terabytes that the drive is warranted for, for the estimate of its life; "
    f"default {views.DRIVE_TBW:g}.",
)


@click.command(cls=Command)
@control_options
@drive_option
@click.pass_context
def status(ctx: click.Context, target: Target, *, drive_tbw: float, as_json: bool) -> None:
    """Say whether the daemon serves, what it holds and where.

    Exit code 0: it serves. 1: nobody answers, or it starts, stops or has failed.
    """
    with target.connect() as control:
        stats = control.stats()
    if as_json:
        runs = {row.table.run for row in stats.tables}
        print_json(
            {
                "address": str(target.address),
                "totals": plain(stats.totals),
                "tables": len(stats.tables),
                "runs": len(runs),
                "sessions": len(stats.sessions),
            }
        )
    else:
        console().print(views.status(stats, str(target.address), drive_tbw))
    if stats.totals.state != "serving":
        ctx.exit(1)


@click.command(cls=Command)
@control_options
@run_option
def tables(target: Target, *, run: str | None, as_json: bool) -> None:
    """List the tables."""
    with target.connect() as control:
        found = control.tables(run)
    if as_json:
        print_json({"tables": [plain(info) for info in found]})
        return
    out = console()
    out.print(views.tables(found, width=width(out)))


@click.command(cls=Command)
@control_options
@run_option
@click.option("--watch", is_flag=True, help="Show them again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=DURATION,
    default=1.0,
    metavar="DURATION",
    help="Between two looks of --watch, 100ms to 1h; default 1s.",
)
@click.option("--count", type=click.IntRange(min=1), help="End --watch after so many looks.")
@drive_option
def stats(
    target: Target,
    *,
    run: str | None,
    watch: bool,
    interval: float,
    count: int | None,
    drive_tbw: float,
    as_json: bool,
) -> None:
    """Show what tables and sessions hold and do.

    With --watch and --json: one document a line.
    """
    if not 0.1 <= interval <= 3600:
        raise click.BadParameter("it must be between 100ms and 1h", param_hint="--interval")
    with target.connect() as control:
        looks = control.watch(interval, run) if watch else iter([control.stats(run)])
        try:
            if as_json:
                for look in itertools.islice(looks, count):
                    print_json(plain(look))
            else:
                _show(itertools.islice(looks, count), target, drive_tbw, watch=watch)
        except KeyboardInterrupt:
            # The way to end a watch; not an error.
            return


def _show(looks: Iterator[pb.StatsReply], target: Target, drive_tbw: float, *, watch: bool) -> None:
    out = console()
    address = str(target.address)
    if watch and out.is_terminal:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            for look in looks:
                live.update(
                    views.everything(look, address, width=width(out), drive_tbw=drive_tbw),
                    refresh=True,
                )
        return
    for number, look in enumerate(looks):
        if number:
            out.print()
        if watch:
            out.print(time.strftime("%Y-%m-%d %H:%M:%S"))
        out.print(views.everything(look, address, width=width(out), drive_tbw=drive_tbw))
