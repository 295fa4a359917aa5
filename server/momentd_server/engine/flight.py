"""What a request reads: the frames reserved for its missing rows, and whose reads it waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.storage import frames
from momentd_server.storage.diskio import READ_MISMATCH, READ_PAST_END
from momentd_wire.errors import CorruptRecord, MomentdError, StorageFailed

if TYPE_CHECKING:
    from momentd_server.engine.table import Table


# Rows of a flight that takes not much longer than any other, some tenths of a second.
SHORT: Final = 1 << 14


class Touch:
    """Distinct rows of one table of a request, ascending, and where their records are.

    `index` (position of the state word) and `offset` (byte of the record) are valid within the job.
    """

    def __init__(self, table: Table, rows: Rows) -> None:
        self.table = table
        self.rows = rows
        self.index: Rows = np.empty(rows.size, np.int64)
        self.offset: Rows = np.empty(rows.size, np.int64)
        self.missing = 0
        # Of the records in frames, before this request: dirty, not used yet, queued as victims.
        self.states = (0, 0, 0)

    @property
    def cache_bytes(self) -> int:
        return self.rows.size * self.table.frame_bytes

    @property
    def slabs(self) -> int:
        """The fewest that its table must have."""
        return -(-self.rows.size // self.table.geometry.frames)

    def used(self) -> None:
        """In the lane: all rows were changed."""
        self.table.used(self.rows.size, *self.states)


class Fetch:
    """Rows of a touch that are not in frames, and the frames reserved for those that it reads."""

    def __init__(self, touch: Touch) -> None:
        """In the lane, after a look-up."""
        self.touch = touch
        self.table = touch.table
        self.reserved: Rows = touch.rows[:0]
        self.pinned: Rows = touch.index.copy()  # of which records this fetch holds a pin
        self.read = -1  # its number among the table's reads
        self._select(np.flatnonzero(touch.index < 0))

    def _select(self, positions: Rows) -> None:
        self.positions = positions
        self.seen: Rows = self.touch.offset[positions]  # location words
        self.rows: Rows = self.touch.rows[positions]

    def leave_to_others(self, flights: Sequence[Flight]) -> tuple[list[Flight], int]:
        """In the lane: rows that others are reading are left to them; to whom, and how many."""
        common = np.zeros(self.rows.size, np.bool_)
        waits_for: list[Flight] = []
        count = 0
        for flight in flights:
            for other in flight.fetches:
                if other.table is not self.table:
                    continue
                marks = common.copy()
                found = frames.mark_common(self.rows, self.seen, other.rows, other.seen, marks)
                # A few rows are read sooner than a long flight is over.
                if found and (other.rows.size <= SHORT or found * 16 >= other.rows.size):
                    waits_for.append(flight)
                    count += found
                    common = marks
        if count:
            self._select(self.positions[~common])
        return waits_for, count

    def only(self, wanted: Rows) -> None:
        """In the lane: of what is missing only these (positions in `rows`) are fetched."""
        self._select(self.positions[wanted])

    def hold(self, reserved: Rows) -> None:
        """In the lane: the frames for the rows that it reads."""
        self.reserved = reserved
        self.checks = self.table.check[self.rows]
        self.hashes: Rows = np.zeros(self.rows.size, np.int64)


class Flight:
    """One request's fetches, from the reservation of their frames until they are published."""

    def __init__(self, fetches: list[Fetch], waits_for: list[Flight]) -> None:
        self.fetches = fetches
        # Flights that took off before this one; so nobody waits in a circle.
        self.waits_for = waits_for
        self.landed = threading.Event()  # its rows are in frames, or it failed


def read_error(table: Table, row: int, segment: int, status: int) -> MomentdError:
    """What a status of the read pool says to the caller."""
    where = f"row {row} of table {table.id} (segment {segment} of family {table.family})"
    details = {"table": table.id, "row": row, "segment": segment}
    if status == READ_MISMATCH:
        return CorruptRecord(
            f"the bytes of {where} on disk are not those that were written: nothing was changed; "
            "check the disk (dmesg), then load a checkpoint into a new table",
            **details,
        )
    if status == READ_PAST_END:
        return CorruptRecord(f"the file of {where} is too short: it was truncated", **details)
    return StorageFailed(
        f"reading {where} failed: {os.strerror(status)}; nothing was changed", **details
    )
