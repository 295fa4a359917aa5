"""What an optimizer knows of its tables, beside torch's `state`."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from momentd.errors import MomentdError
from momentd.table import Table

if TYPE_CHECKING:
    from momentd._session import Session

Entry = dict[str, Any]

# What an entry has in place of the id of a snapshot: no moments were ever written; they are in the
# live table of an optimizer.
NO_SNAPSHOT: Final = 0
LIVE: Final = -1


def live_handle(param: Tensor, step: int, *, has_table: bool) -> Entry:
    """What `optimizer.state[param]` holds with checkpoint="snapshot": see `_handles`."""
    snapshot = LIVE if has_table else NO_SNAPSHOT
    return {"step": step, "snapshot": snapshot, "device": torch.empty(0, device=param.device)}


def live_entry(param: Tensor, fields: Iterable[str], dtype: torch.dtype, step: int) -> Entry:
    """What it holds with checkpoint="full": the keys of its saved form, without the moments.

    The moments are in the daemon; a tensor of length 0 stands for each, with the state's dtype, on
    the parameter's device. Live and saved entries have the same keys, because there are checkpoint
    libraries that read the ones to know the others.
    """
    empty = {name: torch.empty(0, dtype=dtype, device=param.device) for name in fields}
    return {"step": step, **empty}


def is_placeholder(value: object, param: Tensor) -> bool:
    """Whether a value of an entry is what `live_entry` put there."""
    return isinstance(value, Tensor) and value.shape == (0,) and param.shape != (0,)


class Record:
    """The private half of one entry: its table, and what was last written there.

    `table` is None until the first update with rows. `step` counts all updates of the parameter,
    empty ones too; the table's own counter lags behind by trailing empty ones. `handle` is the id
    of the table's content in a snapshot, and the update number that it had then.
    """

    __slots__ = ("entry", "handle", "step", "table", "update_number")

    def __init__(self, entry: Entry, table: Table | None = None, step: int = 0) -> None:
        self.entry = entry
        self.table = table
        self.step = step
        self.update_number = table.update_number if table is not None else 0
        self.handle: tuple[int, int] | None = None

    @property
    def snapshot(self) -> int | None:
        """The id of a snapshot with the table as it is now, if one is known."""
        handle = self.handle
        return handle[0] if handle is not None and handle[1] == self.update_number else None

    def commit(self, step: int, update_number: int | None) -> None:
        """Note the outcome of an update. Absolute values: doing it twice changes nothing."""
        self.step = step
        self.entry["step"] = step
        if update_number is not None:
            self.update_number = update_number
            if "snapshot" in self.entry:
                self.entry["snapshot"] = LIVE


class Records:
    """Records by the identity of their entry, so that they move with it between parameters.

    `state[new] = state.pop(old)` moves a table; an entry that left `state` loses its table at the
    next `sweep`.
    """

    def __init__(self) -> None:
        # The record holds its entry, so an id cannot be reused while it is a key here.
        self._by_entry: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._by_entry)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._by_entry.values()))

    def get(self, entry: Entry) -> Record | None:
        return self._by_entry.get(id(entry))

    def add(self, record: Record) -> None:
        self._by_entry[id(record.entry)] = record

    def replace(self, records: Iterable[Record]) -> None:
        """Forget all, then know these."""
        self._by_entry = {id(record.entry): record for record in records}

    def sweep(self, state: defaultdict[Any, Any]) -> list[Table]:
        """Forget records whose entry is not in `state`; returns their tables, to be dropped."""
        alive = {id(entry) for entry in state.values()}
        gone = [key for key in self._by_entry if key not in alive]
        records = [self._by_entry.pop(key) for key in gone]
        return [record.table for record in records if record.table is not None]

    def tables(self) -> list[Table]:
        return [record.table for record in self if record.table is not None]


def drop(session: Session | None, tables: Iterable[Table]) -> None:
    """Drop tables of this session. What cannot be reached ends with the session anyway."""
    ids = [table.id for table in tables]
    if session is None or not ids or not session.is_open:
        return
    try:
        session.drop_tables(ids)
    except MomentdError:
        # Already gone, or the daemon is: its unnamed tables end with the session.
        return


def finalize(records: Records, session: list[Session], pid: int) -> None:
    """Drop what a collected optimizer leaves, from a thread of its own.

    The garbage collector may run in the middle of a call of this very session, whose locks this
    thread would then wait for itself. In a forked child the tables are the parent's.
    """
    tables = records.tables()
    if not tables or not session or os.getpid() != pid:
        return
    threading.Thread(
        target=drop, args=(session[0], tables), name="momentd-drop", daemon=True
    ).start()
