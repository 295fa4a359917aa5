"""One parameter's entry of a state dict: what may be in it, and a table that is filled from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from momentd import rules
from momentd._grads import table_shape
from momentd._waits import say
from momentd.errors import InvalidArgument, SnapshotNotFound
from momentd.optim._options import NUMPY_DTYPE
from momentd.optim._records import LIVE, NO_SNAPSHOT, Record, is_placeholder
from momentd.table import Table

if TYPE_CHECKING:
    from momentd.optim.base import TableOptimizer

Missing = Literal["error", "reset"]

# Rows that are looked through, and sent, at a time.
_BLOCK_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Saved:
    """What an entry says. Without moments and snapshot: a fresh parameter after `step` updates.

    moments: name -> (rows, width), on whatever device they are.
    snapshot: the id of a snapshot's table; NO_SNAPSHOT if there is none.
    """

    step: int
    moments: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    snapshot: int = NO_SNAPSHOT


def field_names(rule: rules.SparseAdam, param: Tensor) -> list[str]:
    """Names of the moments of a parameter, in record order."""
    rows, width = table_shape(param.shape)
    return [spec.name for spec in rule.schema(rows, max(width, 1)).fields]


def read(entry: Any, param: Tensor, rule: rules.SparseAdam, where: str) -> Saved:
    """Check one entry, in torch's layout or a handle. An empty one is that of a fresh parameter.

    Raises InvalidArgument naming `where`; SnapshotNotFound if it is the live state of an optimizer,
    which has no moments in it.
    """
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where} must be a dict, got {type(entry).__name__}")
    step = int(entry.get("step", 0))
    if step < 0:
        raise InvalidArgument(f"{where}: step must be >= 0, got {step}")
    names = field_names(rule, param)
    missing = [n for n in names if n not in entry or is_placeholder(entry[n], param)]
    if len(missing) == len(names):
        return _read_handle(entry, step, where)
    if missing:
        raise InvalidArgument(f"{where} lacks {missing}")
    moments = {name: _moment(entry[name], param, f"{where}[{name!r}]") for name in names}
    if not param.numel() or not any(bool(value.any()) for value in moments.values()):
        return Saved(step)
    return Saved(step, moments)


def _read_handle(entry: dict[str, Any], step: int, where: str) -> Saved:
    snapshot = int(entry.get("snapshot", LIVE if step else NO_SNAPSHOT))
    if snapshot == LIVE:
        raise SnapshotNotFound(
            f"{where} (step {step}) has no moments in it: it is the live state of another "
            "optimizer. Save with state_dict(), load with load_state_dict()",
            step=step,
        )
    if snapshot < 0 or snapshot.bit_length() > 128:
        raise InvalidArgument(f"{where}: {snapshot} is not the id of a snapshot (128 bits)")
    return Saved(step, snapshot=snapshot)


def _moment(value: Any, param: Tensor, where: str) -> Tensor:
    """A saved moment as (rows, width), on whatever device it is."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if shape != tuple(param.shape):
        raise InvalidArgument(f"{where} has shape {shape}, the parameter has {tuple(param.shape)}")
    return value.detach().reshape(table_shape(param.shape))


# ---------------------------------------------------------------------------------------- tables


def make_record(
    optimizer: TableOptimizer, param: Tensor, saved: Saved, missing: Missing = "error"
) -> Record:
    """A record with a table of its own, filled with what was saved.

    Raises SnapshotNotFound, unless `missing` is "reset": then the parameter starts afresh.
    """
    table = None
    handle = None
    if saved.snapshot != NO_SNAPSHOT:
        try:
            table = _restore(optimizer, param, saved)
            handle = (saved.snapshot, table.update_number)
        except SnapshotNotFound as error:
            if missing != "reset":
                raise
            say(f"{optimizer._label(param)} starts with fresh moments: {error.message}")
            saved = Saved(0)
    elif saved.moments:
        table = optimizer._open_table(param, optimizer._label(param))
        try:
            scatter(table, saved)
        except BaseException:
            optimizer._drop([table])
            raise
    if table is not None and not _fits(optimizer, param, table):
        table, handle = _converted(optimizer, param, table, saved), None
    entry = optimizer._live_entry(param, saved.step, has_table=table is not None)
    record = Record(entry, table, saved.step)
    record.handle = handle
    return record


def _restore(optimizer: TableOptimizer, param: Tensor, saved: Saved) -> Table:
    label = optimizer._label(param)
    try:
        snapshot_id = saved.snapshot.to_bytes(16, "big")
        return optimizer._open_session().restore_table(snapshot_id, label=label)
    except SnapshotNotFound as error:
        rows, width = table_shape(param.shape)
        raise SnapshotNotFound(
            f"the moments of {label!r} ({rows} rows of {width}, step {saved.step}) are in snapshot "
            f"{saved.snapshot:032x}, which is not in the data directory of the daemon at "
            f"{optimizer._open_session().where}: it was deleted there, or made elsewhere. On the "
            "machine that has it, call optimizer.save_state(path) after load_state_dict(), or run "
            f"`momentd export {saved.snapshot:032x} FILE`; here, load_state(path) or `momentd "
            'import FILE`. load_state_dict(..., missing="reset") starts with fresh moments',
            snapshot=f"{saved.snapshot:032x}",
            step=saved.step,
            rows=rows,
        ) from error


def _fits(optimizer: TableOptimizer, param: Tensor, table: Table) -> bool:
    """Whether a table may be used as it is; no if only its element type differs."""
    rows, width = table_shape(param.shape)
    wanted = optimizer._rule.schema(rows, max(width, 1), NUMPY_DTYPE[optimizer._state_dtype(param)])
    if table.schema == wanted:
        return True
    found = table.schema
    names = [each.name for each in found.fields]
    same = (wanted.rows, wanted.width, wanted.rule) == (found.rows, found.width, found.rule)
    if same and names == [each.name for each in wanted.fields]:
        return False
    optimizer._drop([table])
    raise InvalidArgument(
        f"the saved state of {optimizer._label(param)!r} is of {found.rows} rows of {found.width} "
        f"({found.rule}), the parameter has {wanted.rows} rows of {wanted.width} ({wanted.rule})"
    )


def _converted(optimizer: TableOptimizer, param: Tensor, table: Table, saved: Saved) -> Table:
    """The same moments in a table of the optimizer's own element type."""
    names = field_names(optimizer._rule, param)
    made: list[Table] = []
    try:
        moments = {name: torch.from_numpy(table.gather(None, fields=name)) for name in names}
        made.append(optimizer._open_table(param, optimizer._label(param)))
        scatter(made[0], Saved(saved.step, moments))
    except BaseException:
        optimizer._drop([table, *made])
        raise
    optimizer._drop([table])
    return made[0]


def scatter(table: Table, saved: Saved) -> None:
    """Write the rows of a fresh table that differ from its initial value, and its step."""
    dtype = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}[table.dtype]
    for start in range(0, table.rows, _BLOCK_ROWS):
        block = {
            name: value[start : start + _BLOCK_ROWS].to("cpu", dtype)
            for name, value in saved.moments.items()
        }
        touched = torch.zeros(len(next(iter(block.values()))), dtype=torch.bool)
        for value in block.values():
            touched |= value.ne(0).any(dim=1)
        if not bool(touched.any()):
            continue
        rows = touched.nonzero()[:, 0]
        table.scatter(
            (rows + start).numpy(),
            step=saved.step,
            **{name: value.index_select(0, rows).numpy() for name, value in block.items()},
        )
