"""`checkpoint="snapshot"`: the daemon keeps the moments, a state dict has the handle.

A handle is `{"step": int, "snapshot": int, "device": torch.empty(0, device=param.device)}`: plain
numbers, so that nothing casts, moves or destroys them, and one tensor, because
torch.distributed.checkpoint asks each entry for one. The id is a digest of the content: equal
states have equal handles, and nothing in it belongs to a machine.

Live entries have the keys of the saved ones, in this mode these three and with `checkpoint="full"`
torch's: torch.distributed.checkpoint reads a flattened state dict by the keys of `optimizer.state`,
and what it does not find there it leaves out.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from momentd._waits import say
from momentd.errors import SnapshotNotFound
from momentd.optim._records import NO_SNAPSHOT, Entry, Record
from momentd_wire.units import format_bytes

if TYPE_CHECKING:
    from momentd.optim.base import TableOptimizer
    from momentd.snapshots import Snapshot

_told: set[str] = set()


def refresh(optimizer: TableOptimizer) -> None:
    """See to it that a pinned snapshot has all tables as they are now, and note their ids.

    Always all tables or none: an older snapshot of the optimizer can then be deleted, whatever
    changed since.
    """
    records = [record for record in optimizer._records if record.table is not None]
    if not records or _still_kept(optimizer, records):
        return
    session = optimizer._open_session()
    tables = [record.table for record in records if record.table is not None]
    snapshot = session.create_snapshot(tables, run=None, name=None, pinned=True)
    of_table = {entry.table_id: int(entry.id, 16) for entry in snapshot.tables}
    for record, table in zip(records, tables, strict=True):
        record.handle = (of_table[table.id], record.update_number)
    _tell(session.hello.data_dir, snapshot)
    _delete_older(optimizer, snapshot.name)


def _still_kept(optimizer: TableOptimizer, records: list[Record]) -> bool:
    """Whether all of these have not changed since a snapshot that still exists."""
    wanted = [record.snapshot for record in records if record.snapshot is not None]
    if len(wanted) < len(records):
        return False
    found: set[int] = set()
    while missing := [each for each in wanted if each not in found]:
        try:
            snapshot = optimizer._open_session().find_snapshot(missing[0].to_bytes(16, "big"))
        except SnapshotNotFound:
            return False
        if not snapshot.pinned:
            return False
        found |= {int(entry.id, 16) for entry in snapshot.tables}
    return True


def entry(record: Record, param: Tensor) -> Entry:
    """A new entry for a state dict; call `refresh` before."""
    snapshot = record.snapshot if record.table is not None else NO_SNAPSHOT
    assert snapshot is not None
    return {
        "step": record.step,
        "snapshot": snapshot,
        "device": torch.empty(0, device=param.device),
    }


def _tell(data_dir: str, snapshot: Snapshot) -> None:
    """Once for each data directory: what is not in the state dict, and how to take it along."""
    if data_dir in _told:
        return
    _told.add(data_dir)
    say(
        f"state_dict() has a handle of the moments; they stay as snapshot {snapshot.name!r} in "
        f"{data_dir} ({format_bytes(snapshot.nbytes)}) until you delete it. To carry them to "
        'another machine: optimizer.save_state(path); or checkpoint="full" puts them into the '
        "state dict"
    )


def _delete_older(optimizer: TableOptimizer, name: str) -> None:
    """Keep the newest `keep_snapshots` of those that this optimizer has handed out."""
    made = optimizer._snapshots
    if name in made:
        made.remove(name)
    made.append(name)
    keep = optimizer._options.keep_snapshots
    while keep is not None and len(made) > keep:
        # Somebody may have done it.
        with contextlib.suppress(SnapshotNotFound):
            optimizer._open_session().delete_snapshots([made[0]])
        del made[0]
