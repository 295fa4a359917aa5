"""`momentd snapshot`: make, list, restore and delete snapshots."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass

import click

from momentd_server.cli import views
from momentd_server.cli.options import DURATION, Command, Target, control_options
from momentd_server.cli.output import console, print_json, width
from momentd_wire.errors import SnapshotNotFound
from momentd_wire.units import format_bytes
from momentd_wire.v1 import momentd_pb2 as pb

ID_HEX = 32


@click.group()
def snapshot() -> None:
    """Make, list, restore and delete snapshots.

    A snapshot is a durable, consistent state of the tables of a run. It takes only the records that
    have changed since the last one, and stays when tables, sessions and scripts are gone.
    """


@dataclass(frozen=True, slots=True)
class _Shown:
    """A snapshot as --json prints it."""

    name: str
    run: str
    created_s: float
    pinned: bool
    bytes: int
    bytes_only: int
    tables: list[dict[str, str | int]]

    @classmethod
    def of(cls, found: pb.Snapshot) -> _Shown:
        tables: list[dict[str, str | int]] = [
            {
                "id": table.id.hex(), "label": table.label, "rows": table.schema.rows,
                "dim": table.schema.width, "step": table.step, "rows_touched": table.rows_touched,
            }
            for table in found.tables
        ]  # fmt: skip
        return cls(
            found.name, found.run, found.created_s, found.pinned, found.bytes, found.bytes_only,
            tables,
        )  # fmt: skip


@snapshot.command("create", cls=Command)
@control_options
@click.argument("run")
@click.option("--name", help="Default: made of the run and the time.")
@click.option("--pin", is_flag=True, help="Never delete it by itself (`serve --snapshot-every`).")
def create(target: Target, *, run: str, name: str | None, pin: bool, as_json: bool) -> None:
    """Make a snapshot of all tables of RUN. Updates go on meanwhile; it is durable when done."""
    with target.connect() as control:
        reply = control.create_snapshot(run, name, pinned=pin)
    if as_json:
        shown = asdict(_Shown.of(reply.snapshot))
        print_json({**shown, "created": reply.created, "bytes_written": reply.bytes_written})
    elif reply.created:
        click.echo(f"made {reply.snapshot.name}: {format_bytes(reply.bytes_written)} written")
    else:
        click.echo(f"nothing has changed since {reply.snapshot.name}")


@snapshot.command("list", cls=Command)
@control_options
@click.option("--run", help="Only this run.")
def list_snapshots(target: Target, *, run: str | None, as_json: bool) -> None:
    """List snapshots, oldest first, with what deleting each would free."""
    with target.connect() as control:
        found = control.snapshots(run)
    if as_json:
        print_json({"snapshots": [asdict(_Shown.of(each)) for each in found]})
        return
    out = console()
    out.print(views.snapshots(found, time.time(), width=width(out)))


@snapshot.command("restore", cls=Command)
@control_options
@click.argument("snapshot_id")
@click.argument("name")
@click.option("--replace", is_flag=True, help="Instead of a table of that name that nobody uses.")
def restore(target: Target, *, snapshot_id: str, name: str, replace: bool, as_json: bool) -> None:
    """Make a named table of a snapshot's table. `list` shows the SNAPSHOT_ID of each."""
    try:
        content = bytes.fromhex(snapshot_id)
    except ValueError:
        content = b""
    if len(content) * 2 != ID_HEX:
        raise click.UsageError(f"SNAPSHOT_ID has {ID_HEX} hexadecimal digits, not {snapshot_id!r}")
    with target.connect() as control:
        table = control.restore_table(content, name, replace=replace)
    if as_json:
        print_json({"table": table.table.id, "name": table.name, "step": table.step})
    else:
        click.echo(f"restored {table.name} (table {table.table.id}, step {table.step})")


@snapshot.command("delete", cls=Command)
@control_options
@click.argument("names", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(target: Target, *, names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete snapshots: all that are named, or none. There is no way back."""
    with target.connect() as control:
        known = {each.name: each for each in control.snapshots(None)}
        missing = [name for name in names if name not in known]
        if missing:
            raise SnapshotNotFound(
                f"there is no snapshot named {missing[0]!r}: `momentd snapshot list` shows those "
                "that there are; nothing was deleted"
            )
        _confirm([known[name] for name in names], yes=yes)
        freed = control.delete_snapshots(list(names))
    _deleted(list(names), freed, as_json=as_json)


@snapshot.command("prune", cls=Command)
@control_options
@click.option("--run", help="Only this run.")
@click.option(
    "--keep", type=click.IntRange(min=0), default=3, show_default=True, help="Newest of each run."
)
@click.option(
    "--older-than", type=DURATION, default=0.0, metavar="DURATION", help="Only older ones, e.g. 7d."
)
@click.option("--pinned", is_flag=True, help="Also those that checkpoints may refer to.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune(
    target: Target, *, run: str | None, keep: int, older_than: float, pinned: bool, dry_run: bool,
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Delete all but the newest snapshots of each run."""
    limit_s = time.time() - older_than
    with target.connect() as control:
        by_run: dict[str, list[pb.Snapshot]] = defaultdict(list)
        for each in control.snapshots(run):
            if pinned or not each.pinned:
                by_run[each.run].append(each)
        old = [each for found in by_run.values() for each in found[: max(len(found) - keep, 0)]]
        old = [each for each in old if each.created_s <= limit_s]
        names = [each.name for each in old]
        freed = sum(each.bytes_only for each in old)
        if old and not dry_run:
            _confirm(old, yes=yes)
            freed = control.delete_snapshots(names)
    _deleted(names, freed, as_json=as_json, verb="would delete" if dry_run else "deleted")


def _confirm(found: list[pb.Snapshot], *, yes: bool) -> None:
    if yes:
        return
    pinned = sum(each.pinned for each in found)
    note = f", {pinned} of them handed out to checkpoints" if pinned else ""
    names = ", ".join(each.name for each in found)
    click.confirm(f"Delete {names}{note}?", abort=True, err=True)


def _deleted(names: list[str], freed: int, *, as_json: bool, verb: str = "deleted") -> None:
    if as_json:
        print_json({"deleted": names, "bytes_freed": freed})
    elif names:
        click.echo(f"{verb} {', '.join(names)}: {format_bytes(freed)} that nothing else needed")
    else:
        click.echo("nothing to delete")
