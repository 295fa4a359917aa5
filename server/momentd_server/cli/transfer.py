"""`momentd export` and `momentd import`: snapshots in files, for other machines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from momentd_server.cli.control import Control
from momentd_server.cli.options import Command, Target, control_options
from momentd_server.cli.output import print_json
from momentd_server.cli.rows import Rows
from momentd_wire.errors import CorruptRecord, InvalidArgument, SnapshotNotFound
from momentd_wire.safetensors import TensorEntry, TensorWriter
from momentd_wire.state_file import Advance, StateReader, StateWriter, TableEntry
from momentd_wire.units import format_bytes
from momentd_wire.v1 import momentd_pb2 as pb

_FORMATS: Final = ("momentd", "safetensors")

Source = tuple[TableEntry, pb.TableSnapshot]


@click.command("export", cls=Command)
@control_options
@click.argument("snapshot")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default=_FORMATS[0],
    show_default=True,
    help="safetensors: whole tensors, for other programs; `momentd import` does not read it.",
)
def export_snapshot(target: Target, *, snapshot: str, file: Path, form: str, as_json: bool) -> None:
    """Write SNAPSHOT to FILE: its name, or the id of one of its tables.

    Only rows that were ever updated are in it, with checksums. After an error there is no file.
    """
    with target.connect() as control:
        found = _find(control, snapshot)
        sources = [(_entry(each), each) for each in found]
        with control.rows() as rows:
            try:
                if form == "safetensors":
                    _write_tensors(rows, sources, file)
                else:
                    _write_state(rows, sources, file)
            except OSError as error:
                raise InvalidArgument(f"{file} cannot be written: {error.strerror}") from None
    nbytes = file.stat().st_size
    if as_json:
        ids = [each.id.hex() for each in found]
        print_json({"file": str(file), "bytes": nbytes, "tables": ids})
    else:
        click.echo(f"wrote {file}: {len(found)} tables, {format_bytes(nbytes)}")


def _find(control: Control, snapshot: str) -> list[pb.TableSnapshot]:
    for each in control.snapshots(None):
        if each.name == snapshot:
            return list(each.tables)
        for table in each.tables:
            if table.id.hex() == snapshot.lower():
                return [table]
    raise SnapshotNotFound(
        f"there is no snapshot named {snapshot!r}, and no table with this id in one: "
        "`momentd snapshot list` shows those that there are",
        name=snapshot,
    )


def _entry(table: pb.TableSnapshot) -> TableEntry:
    return TableEntry.of(
        table.schema,
        label=table.label,
        step=table.step,
        snapshot=table.id.hex(),
        updates=table.step,
    )


def _write_state(rows: Rows, sources: list[Source], file: Path) -> None:
    total = sum(entry.rows * entry.row_bytes for entry, _ in sources)
    with bar("exporting", total) as advance, StateWriter(file, [e for e, _ in sources]) as out:
        for number, (entry, table) in enumerate(sources):
            for start, values in _blocks(rows, entry, table):
                at = entry.touched(values)
                if at.size:
                    out.write(number, at + start, {k: v[at] for k, v in values.items()})
                advance(len(next(iter(values.values()))) * entry.row_bytes)


def _blocks(
    rows: Rows, entry: TableEntry, table: pb.TableSnapshot
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """All rows of a snapshot's table: first row, and name -> (n, width)."""
    restored = rows.restore(table.id)
    most = min(entry.block_rows, restored.request_rows or entry.block_rows)
    for start in range(0, entry.rows, most):
        yield start, rows.gather(restored, start, min(most, entry.rows - start))


def _write_tensors(rows: Rows, sources: list[Source], file: Path) -> None:
    labels = [entry.label for entry, _ in sources]
    names = [
        label if labels.count(label) == 1 else f"{label}.{number}"
        for number, label in enumerate(labels)
    ]
    tensors = [
        TensorEntry(f"{name}.{field}", dtype, entry.rows, width)
        for name, (entry, _) in zip(names, sources, strict=True)
        for field, dtype, width, _ in entry.fields
    ]
    notes = {"format": "pt"}
    for name, (entry, _) in zip(names, sources, strict=True):
        notes |= {f"{name}.step": str(entry.step), f"{name}.snapshot": entry.snapshot}
    total = sum(tensor.nbytes for tensor in tensors)
    with bar("exporting", total) as advance, TensorWriter(file, tensors, notes) as out:
        for entry, table in sources:
            # One field after the other: that is the order of the file.
            for field, _, _, _ in entry.fields:
                for _, values in _blocks(rows, entry, table):
                    out.write(values[field])
                    advance(values[field].nbytes)


@click.command("import", cls=Command)
@control_options
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Of the snapshot; default: made of the run and the time.")
@click.option("--run", default="imported", show_default=True, help="A label, for people.")
def import_snapshot(
    target: Target, *, file: Path, name: str | None, run: str, as_json: bool
) -> None:
    """Make a snapshot of what is in FILE (of `momentd export` or `save_state`).

    Its tables have the ids that they had: handles in old checkpoints resolve here from now on. All
    of the file is checked before there is a snapshot; after an error there is none.
    """
    with StateReader(file) as reader, target.connect() as control:
        known = {t.id.hex(): s.name for s in control.snapshots(None) for t in s.tables}
        here = {known.get(entry.snapshot, "") for entry in reader.tables}
        if len(here) == 1 and "" not in here:
            _imported(here.pop(), [entry.snapshot for entry in reader.tables], as_json=as_json)
            return
        with control.rows() as rows:
            tables = [rows.create(e.schema(), e.label, run) for e in reader.tables]
            with bar("importing", reader.size) as advance:
                _fill(rows, tables, reader, advance)
            snapshot = rows.snapshot(tables, name)
        of_table = {each.table_id: each.id.hex() for each in snapshot.tables}
        ids = [of_table[table.table.id] for table in tables]
        for entry, found in zip(reader.tables, ids, strict=True):
            if entry.snapshot not in ("", found):
                control.delete_snapshots([snapshot.name])
                raise CorruptRecord(
                    f"{file}: table {entry.label!r} has the content {found}, not {entry.snapshot} "
                    "as the file says; nothing was imported"
                )
    _imported(snapshot.name, ids, as_json=as_json, made=True)


def _fill(rows: Rows, tables: list[pb.TableInfo], reader: StateReader, advance: Advance) -> None:
    empty = set(range(len(tables)))
    for block in reader.blocks():
        table, entry = tables[block.table], reader.tables[block.table]
        most = table.request_rows or len(block.rows)
        for start in range(0, len(block.rows), most):
            part = slice(start, start + most)
            values = {name: value[part] for name, value in block.values.items()}
            rows.scatter(table, block.rows[part], values, entry.step)
        empty.discard(block.table)
        advance(len(block.rows) * entry.row_bytes)
    for number in empty:
        entry = reader.tables[number]
        if entry.step:
            nothing = {name: np.empty((0, width), dtype) for name, dtype, width, _ in entry.fields}
            rows.scatter(tables[number], np.empty(0, np.int64), nothing, entry.step)


def _imported(name: str, ids: list[str], *, as_json: bool, made: bool = False) -> None:
    if as_json:
        print_json({"snapshot": name, "created": made, "tables": ids})
    elif made:
        click.echo(f"imported as snapshot {name}: {len(ids)} tables")
    else:
        click.echo(f"it is here already, as snapshot {name}")


@contextmanager
def bar(what: str, total: int) -> Generator[Callable[[int], None]]:
    """A progress bar of bytes on standard error, where that is a terminal."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield _show_nothing
        return
    parts = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*parts, console=err, transient=True) as progress:
        task = progress.add_task(what, total=max(total, 1))

        def advance(nbytes: int) -> None:
            progress.advance(task, nbytes)

        yield advance


def _show_nothing(_nbytes: int) -> None:
    pass
