"""Commands that change something: stop, and runs list, drop, prune."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from momentd_server.cli import views
from momentd_server.cli.control import Control
from momentd_server.cli.options import DURATION, Command, Target, control_options
from momentd_server.cli.output import console, print_json, width
from momentd_server.obs import process
from momentd_wire.errors import DaemonUnavailable, TableInUse, TableNotFound
from momentd_wire.units import format_bytes, format_duration

_POLL_S: Final = 0.05
# How much longer than it said a stop may take before the command gives up waiting.
_STOP_MARGIN_S: Final = 60.0


@click.command(cls=Command)
@control_options
@click.option("--no-wait", is_flag=True, help="Return at once, while the daemon still writes.")
@click.option(
    "--discard",
    is_flag=True,
    help="Write nothing: unnamed tables are lost, named ones stay as last committed.",
)
def stop(target: Target, *, no_wait: bool, discard: bool, as_json: bool) -> None:
    """Stop the daemon in an orderly way; everything is durable when this returns."""
    began_s = time.monotonic()
    with target.connect() as control:
        pid = control.stats().totals.pid
        life = _Life.of(pid)
        drain_s = control.stop(discard=discard)
        if not no_wait:
            _wait_for_end(control, life, drain_s + _STOP_MARGIN_S)
    took_s = time.monotonic() - began_s
    if as_json:
        print_json({"pid": pid, "stopped": not no_wait, "drain_s": drain_s, "took_s": took_s})
    elif no_wait:
        click.echo(f"stopping (pid {pid}), it needs about {format_duration(drain_s)}")
    else:
        click.echo(f"stopped (pid {pid}) in {format_duration(took_s)}")


class _Life:
    """One process of this machine, told from a later one with the same id by its start time."""

    def __init__(self, pid: int, start: int) -> None:
        self._pid = pid
        self._start = start

    @classmethod
    def of(cls, pid: int) -> _Life | None:
        """None if the process cannot be seen from here: it is in another machine or container."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return None
        return cls(pid, process.start_time(pid)) if b"momentd" in command else None

    def ended(self) -> bool:
        # A dead process whose parent did not ask for its exit code keeps its place, in state Z.
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z" or process.start_time(self._pid) != self._start


def _wait_for_end(control: Control, life: _Life | None, limit_s: float) -> None:
    """Returns when the daemon is gone: its process where that can be seen, else its listener."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if life is not None:
            if life.ended():
                return
        else:
            try:
                control.stats()
            except DaemonUnavailable:
                return
        time.sleep(_POLL_S)
    raise DaemonUnavailable(
        f"the daemon was asked to stop but still runs after {format_duration(limit_s)}: its log "
        f"says what it waits for"
    )


@click.group()
def runs() -> None:
    """List the runs, or drop their tables.

    A run is the label of one experiment: `momentd.SparseAdam(..., run="sweep-7")`.
    """


@runs.command("list", cls=Command)
@control_options
def list_runs(target: Target, *, as_json: bool) -> None:
    """List the runs with what their tables hold."""
    with target.connect() as control:
        found = views.group_runs(control.stats())
    if as_json:
        print_json({"runs": [asdict(run) for run in found]})
        return
    out = console()
    out.print(views.runs(found, time.time(), width=width(out)))


@runs.command("drop", cls=Command)
@control_options
@click.argument("run")
@click.option("--force", is_flag=True, help="Also tables that a live session uses.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop_run(target: Target, *, run: str, force: bool, yes: bool, as_json: bool) -> None:
    """Drop all tables of RUN, with their rows. There is no way back."""
    with target.connect() as control:
        found = [one for one in views.group_runs(control.stats()) if one.run == run and one.tables]
        if not found:
            raise TableNotFound(
                f"run {run!r} has no tables: `momentd runs list` shows those that have", run=run
            )
        _confirm(found, yes=yes)
        dropped = control.drop_run(run, force=force)
    if as_json:
        print_json({"run": run, "tables": dropped, "disk_bytes": found[0].disk_bytes})
    else:
        click.echo(f"dropped {run}: {dropped} tables, {format_bytes(found[0].disk_bytes)}")


@runs.command("prune", cls=Command)
@control_options
@click.option(
    "--older-than",
    type=DURATION,
    default=0.0,
    metavar="DURATION",
    help="Only runs whose newest table is older than this, e.g. 7d.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be dropped.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune_runs(
    target: Target, *, older_than: float, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Drop the tables of all runs that no session uses."""
    with target.connect() as control:
        limit_s = time.time() - older_than
        idle = [
            run
            for run in views.group_runs(control.stats())
            if run.tables and not run.in_use and run.newest_s <= limit_s
        ]
        if idle and not dry_run:
            _confirm(idle, yes=yes)
            idle = [run for run in idle if _dropped(control, run.run)]
    if as_json:
        print_json({"dry_run": dry_run, "runs": [asdict(run) for run in idle]})
        return
    verb = "would drop" if dry_run else "dropped"
    for run in idle:
        click.echo(f"{verb} {run.run}: {run.tables} tables, {format_bytes(run.disk_bytes)}")
    if not idle:
        click.echo("nothing to drop: every run is in use or too young")


def _dropped(control: Control, run: str) -> bool:
    """Whether the run was dropped; no if somebody began to use it, or dropped it, meanwhile."""
    try:
        return control.drop_run(run, force=False) > 0
    except TableInUse as error:
        click.echo(f"kept {run}: {error.message}", err=True)
    except TableNotFound:
        pass
    return False


def _confirm(found: list[views.Run], *, yes: bool) -> None:
    """Asks before anything is lost. Without a terminal to ask at, --yes is needed."""
    if yes:
        return
    total = sum(run.disk_bytes for run in found)
    tables = sum(run.tables for run in found)
    names = ", ".join(run.run or "(no label)" for run in found)
    click.confirm(
        f"Drop {tables} table{'s' * (tables != 1)} of {names} ({format_bytes(total)})?",
        abort=True,
        err=True,
    )
