"""`save_state` and `load_state`: an optimizer's moments in one file, for another machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from momentd._grads import table_shape
from momentd._progress import progress
from momentd.errors import InvalidArgument, StateRolledBack
from momentd.optim import _groups, _handles
from momentd.optim._options import NUMPY_DTYPE
from momentd.optim._plan import places
from momentd.optim._records import Record
from momentd.table import Table
from momentd_wire.state_file import Block, StateReader, StateWriter, TableEntry

if TYPE_CHECKING:
    from momentd.optim.base import TableOptimizer

Path = str | os.PathLike[str]


def save(optimizer: TableOptimizer, path: Path) -> None:
    """Write the rows of all tables that differ from a fresh one's, and the step counters."""
    found: list[tuple[TableEntry, Record]] = []
    for index, param in enumerate(_params(optimizer)):
        if param in optimizer.state:
            record = optimizer._record(param)
            found.append((_entry(optimizer, index, param, record), record))
    entries = [entry for entry, _ in found]
    total = sum(entry.rows * entry.row_bytes for entry, record in found if record.table is not None)
    with progress("saving", total) as advance, StateWriter(path, entries) as writer:
        for number, (entry, record) in enumerate(found):
            if record.table is None:
                continue
            for start in range(0, entry.rows, entry.block_rows):
                rows = range(start, min(start + entry.block_rows, entry.rows))
                values = _gather(record, rows, entry)
                at = entry.touched(values)
                if at.size:
                    kept = {name: value[at] for name, value in values.items()}
                    writer.write(number, at + start, kept)
                advance(len(rows) * entry.row_bytes)


def _params(optimizer: TableOptimizer) -> list[Tensor]:
    """In the order in which state dicts number them."""
    return [param for _, _, param in places(optimizer.param_groups)]


def _entry(optimizer: TableOptimizer, index: int, param: Tensor, record: Record) -> TableEntry:
    rows, width = table_shape(param.shape)
    dtype = NUMPY_DTYPE[optimizer._state_dtype(param)]
    return TableEntry.of(
        optimizer._rule.schema(rows, max(width, 1), dtype),
        label=optimizer._label(param),
        # The table counts updates with rows only.
        step=record.table.refresh().step if record.table is not None else 0,
        parameter=index,
        updates=record.step,
    )


def _gather(record: Record, rows: range, entry: TableEntry) -> dict[str, np.ndarray]:
    table = record.table
    assert table is not None
    values = {name: table.gather(rows, fields=name) for name, _, _, _ in entry.fields}
    if table.update_number != record.update_number:
        raise StateRolledBack(
            f"table {table.id} ({entry.label}) is at update {table.update_number}, this optimizer "
            f"at {record.update_number}: somebody else changed it while it was saved"
        )
    return values


@dataclass(slots=True)
class _Filling:
    """One parameter of a file that is being loaded; `table` is None until it has rows."""

    param: Tensor
    entry: TableEntry
    table: Table | None = None


def load(optimizer: TableOptimizer, path: Path) -> None:
    """Replace the optimizer's state by that of a file: all of it, or nothing is changed."""
    with StateReader(path) as reader:
        targets = _match(optimizer, reader.tables, path)
        try:
            with progress("loading", reader.size) as advance:
                for block in reader.blocks():
                    _fill(optimizer, targets[block.table], block)
                    advance(len(block.rows) * reader.tables[block.table].row_bytes)
            state, records = _groups.ParamState(), list[Record]()
            for target in targets:
                record = Record(
                    optimizer._live_entry(
                        target.param, target.entry.updates, has_table=target.table is not None
                    ),
                    target.table,
                    target.entry.updates,
                )
                state[target.param] = record.entry
                records.append(record)
        except BaseException:
            optimizer._drop([t.table for t in targets if t.table is not None])
            raise
    old = optimizer._records.tables()
    optimizer._adopt(state, optimizer.param_groups, records)
    optimizer._drop(old)
    if optimizer._options.checkpoint == "snapshot":
        # A handle of this state, made where the file comes from, resolves here from now on.
        _handles.refresh(optimizer)


def _fill(optimizer: TableOptimizer, target: _Filling, block: Block) -> None:
    if target.table is None:
        target.table = optimizer._open_table(target.param, optimizer._label(target.param))
    target.table.scatter(block.rows, step=target.entry.step, **block.values)


def _match(
    optimizer: TableOptimizer, entries: tuple[TableEntry, ...], path: Path
) -> list[_Filling]:
    """The parameter of each entry: by position, like in a state dict."""
    params = _params(optimizer)
    ours = [optimizer._label(param) for param in params]
    at = _positions(entries, ours)
    if at and max(at) >= len(params):
        raise InvalidArgument(
            f"{path} has state for parameter {max(at)} ({entries[at.index(max(at))].label}), the "
            f"optimizer has {len(params)} parameters: {ours}"
        )
    theirs = [entry.label for entry in entries]
    here = [ours[position] for position in at]
    if theirs != here and sorted(theirs) == sorted(here):
        raise InvalidArgument(
            f"{path} has the same parameters in another order, and parameters are matched by "
            f"position: it has {theirs}, the optimizer has {here}. Build the optimizer with the "
            "parameters in the saved order"
        )
    return [_fitting(optimizer, params[i], e, path) for i, e in zip(at, entries, strict=True)]


def _positions(entries: tuple[TableEntry, ...], ours: list[str]) -> list[int]:
    """By number, as an optimizer wrote them; `momentd export` knows names and an order only."""
    if all(entry.parameter is not None for entry in entries):
        return [entry.parameter for entry in entries if entry.parameter is not None]
    if all(ours.count(entry.label) == 1 for entry in entries):
        return [ours.index(entry.label) for entry in entries]
    return list(range(len(entries)))


def _fitting(optimizer: TableOptimizer, param: Tensor, entry: TableEntry, path: Path) -> _Filling:
    rows, width = table_shape(param.shape)
    schema = optimizer._rule.schema(rows, max(width, 1), NUMPY_DTYPE[optimizer._state_dtype(param)])
    names = [field.name for field in schema.fields]
    theirs = [name for name, _, _, _ in entry.fields]
    if (entry.rows, entry.width) != (schema.rows, schema.width):
        raise InvalidArgument(
            f"{path} has ({entry.rows}, {entry.width}) rows and elements of a row for "
            f"{entry.label!r}, the parameter has ({schema.rows}, {schema.width})"
        )
    if (entry.rule, theirs) != (schema.rule, names):
        raise InvalidArgument(
            f"{path} has state of the rule {entry.rule!r} with {theirs} for {entry.label!r}, the "
            f"optimizer's is {schema.rule!r} with {names}"
        )
    return _Filling(param, entry)
