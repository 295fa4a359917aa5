"""`momentd verify`: is everything on disk as it was written?"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from momentd_server.cli.options import SIZE, Command, Target, control_options
from momentd_server.cli.output import console, pairs, plain, print_json
from momentd_server.storage.damage import Counts, Damage, Report
from momentd_server.storage.damage import Progress as Advance
from momentd_wire.errors import DaemonUnavailable
from momentd_wire.units import format_bytes, format_count, format_duration
from momentd_wire.v1 import momentd_pb2 as pb

# A disk that gives several times as much still serves cold rows.
_RATE_BYTES: Final = 200 << 20


@click.command(cls=Command)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A directory that no daemon uses; default: ask the daemon at --address.",
)
@click.option(
    "--rate",
    type=SIZE,
    default=_RATE_BYTES,
    metavar="SIZE",
    help="Most bytes a second that a daemon reads for this beside its work, 0B: no limit; "
    f"default {format_bytes(_RATE_BYTES)}.",
)
@control_options
@click.pass_context
def verify(
    ctx: click.Context, target: Target, data_dir: Path | None, *, rate: int, as_json: bool
) -> None:
    """Compare everything on disk with its checksums, and the catalog with the files.

    The daemon does it beside its work; with --data-dir this command does it, where no daemon runs.
    Changes nothing. Exit code 0: all is as it was written. 1: something is damaged, or could not be
    looked at.
    """
    began_s = time.monotonic()
    with _bar() as show:
        report = _online(target, rate, show) if data_dir is None else _offline(data_dir, show)
    seconds = time.monotonic() - began_s
    if as_json:
        print_json(document(report, seconds))
    else:
        out = console()
        for line in describe(report, seconds):
            out.print(line)
    if report.damages:
        ctx.exit(1)


def _offline(data_dir: Path, show: Advance) -> Report:
    from momentd_server.storage.verify import verify_directory

    return verify_directory(data_dir, show)


def _online(target: Target, rate: int, show: Advance) -> Report:
    report = Report()
    with target.connect() as control:
        whole = False
        for step in control.verify(rate):
            show(step.bytes_done, step.bytes_total)
            report.damages += [_damage_of(damage) for damage in step.damages]
            if step.HasField("counts"):
                report.counts = Counts(**plain(step.counts))
                whole = True
    if not whole:
        raise DaemonUnavailable("the daemon ended before the check did: try again")
    return report


def _damage_of(damage: pb.Damage) -> Damage:
    offset = damage.offset if damage.HasField("offset") else None
    return Damage(
        damage.what, damage.path, offset, tuple(damage.tables), tuple(damage.rows),
        damage.row_count, tuple(damage.snapshots),
    )  # fmt: skip


@contextmanager
def _bar() -> Generator[Advance]:
    """A progress bar on standard error, where that is a terminal."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield _show_nothing
        return
    parts = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*parts, console=err, transient=True) as bar:
        task = bar.add_task("verify", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show


def _show_nothing(_done: int, _total: int) -> None:
    pass


def document(report: Report, seconds: float) -> dict[str, Any]:
    """The report for programs."""
    return {
        "damages": [asdict(damage) for damage in report.damages],
        "counts": asdict(report.counts),
        "unlisted": report.unlisted,
        "seconds": round(seconds, 3),
    }


def describe(report: Report, seconds: float) -> list[RenderableType]:
    """The report for people."""
    lines: list[RenderableType] = [_damage(damage) for damage in report.damages]
    rows = [("looked at", _counts(report.counts, seconds))]
    if report.unlisted:
        files = "file is" if len(report.unlisted) == 1 else "files are"
        rows.append(
            ("unlisted", f"{len(report.unlisted)} {files} of no table: the next start deletes them")
        )
    found = f"{len(report.damages)} damaged" if report.damages else "everything as it was written"
    return [*lines, pairs([*rows, ("found", found)])]


def _damage(damage: Damage) -> str:
    place = damage.path if damage.offset is None else f"{damage.path}, byte {damage.offset}"
    text = f"DAMAGED {place}: {damage.what}"
    if damage.tables:
        text += f"\n  tables {', '.join(map(str, damage.tables))}"
    if damage.snapshots:
        text += f"\n  snapshots {', '.join(damage.snapshots)}"
    if damage.row_count:
        shown = ", ".join(map(str, damage.rows))
        more = damage.row_count - len(damage.rows)
        text += f"\n  rows {shown}" + (f" and {more} more" if more else "")
    return text


def _counts(counts: Counts, seconds: float) -> str:
    speed = f", {format_bytes(round(counts.bytes / seconds))}/s" if seconds > 0 else ""
    return (
        f"{format_count(counts.tables)} tables, {format_count(counts.snapshots)} snapshots, "
        f"{format_count(counts.segments)} segments, "
        f"{format_count(counts.batches)} batches, {format_count(counts.records)} records, "
        f"{format_bytes(counts.bytes)} in {format_duration(seconds)}{speed}"
    )
