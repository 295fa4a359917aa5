"""A start on the memory of an engine that is gone: the space says what tables contain.

The catalog says what exists, and every transition in the space is one store, so there is nothing to
repair but what was only in the dead process: who holds which frame, how many there are of what, and
the one request that it was applying (engine/mutations.py).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd_server.engine.lane import Lane
from momentd_server.engine.table import Table
from momentd_server.jit import Pool
from momentd_server.storage import attach_kernels as kernels
from momentd_server.storage import blocks, frames
from momentd_server.storage.catalog import TableRecord
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.space import Space
from momentd_wire.errors import CorruptRecord, InternalError

log = logging.getLogger("momentd.inherit")

_LEAST_ROWS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Builds tables from their blocks. Before anything is served: nobody else is in the lane."""

    space: Space
    lane: Lane
    pool: Pool
    store: SegmentStore

    def blocks(self) -> dict[int, int]:
        """Index of each table's block, by table id."""
        used = np.flatnonzero(self.space.tables["id"])
        return {int(self.space.tables[at]["id"]): int(at) for at in used}

    def free_block(self, index: int) -> None:
        """A table that the catalog does not know (any more): it was being made, or dropped."""
        block = self.space.tables[index]
        location_at, rows = int(block["location_at"]), int(block["rows"])
        block["id"] = 0
        self.space.free_rows(location_at, rows)

    def table(self, record: TableRecord, index: int) -> Table:
        """The table as the dead engine left it. One that does not fit together is broken."""
        began_s = time.perf_counter()
        table = Table(self.space, record, index)
        if int(table.block["state"]) == blocks.TABLE_BROKEN:
            table.broken = broken(record)
            return table
        self._take_slabs(table)
        wrong = self._count_rows(table)
        if wrong:
            table.block["state"] = blocks.TABLE_BROKEN
            table.broken = CorruptRecord(
                f"{wrong} rows of its {table.rows} point to what is not theirs, in memory or on "
                "disk: something wrote where it should not have"
            )
        log.info(
            "table %d: %d rows, %d of them only in memory, taken over in %.2f s",
            table.id, table.rows_touched, table.dirty, time.perf_counter() - began_s,
        )  # fmt: skip
        return table

    def _take_slabs(self, table: Table) -> None:
        words = self.space.words.view(np.int64)
        for slab in np.flatnonzero(self.space.owners == table.id).tolist():
            table.add_slab(slab)
            table.free_top -= table.geometry.frames
            freed, dirty, fresh = kernels.inherit_slab(
                slab, table.location, words, table.geo, table.free, table.free_top
            )
            table.free_top += freed
            table.dirty += dirty
            table.tally[frames.FRESH_FRAMES] += fresh

    def _count_rows(self, table: Table) -> int:
        """Fills `live`, `segments` and `rows_touched`; returns the number of impossible rows."""
        known = {s.id: s for s in self.store.segments() if s.family == table.family}
        lowest = min(known, default=0)
        span = max(known, default=0) - lowest + 1
        counts = np.zeros((self.pool.threads, span), np.int64)
        found = np.zeros((self.pool.threads, 2), np.int64)
        self.pool.run(
            kernels.count_rows, table.rows, table.location, self.space.words.view(np.int64),
            table.geo, self.space.owners.view(np.int64), table.id, lowest, counts, found,
            least=_LEAST_ROWS,
        )  # fmt: skip
        table.rows_touched, wrong = found.sum(axis=0).tolist()
        totals = counts.sum(axis=0)
        for k in np.flatnonzero(totals).tolist():
            segment = known.get(lowest + k)
            if segment is None:
                wrong += int(totals[k])
                continue
            table.live[segment.id] = int(totals[k])
            table.segments[segment.id] = segment
        return wrong


def broken(record: TableRecord) -> InternalError:
    """Why a table that was taken out of use is not served."""
    return InternalError(
        f"table {record.name or record.id} was taken out of use: a request on it ended the daemon "
        "again and again, or its memory did not fit together. Load a checkpoint"
    )
