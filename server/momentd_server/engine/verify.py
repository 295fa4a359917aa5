"""Online: everything on disk against its checksums and locations, beside the work of the engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd_server.engine.api import VerifyStep
from momentd_server.engine.lane import Lane
from momentd_server.engine.lifecycle import Tables
from momentd_server.engine.table import Table
from momentd_server.storage import files, hashing
from momentd_server.storage.catalog import Catalog, Contents
from momentd_server.storage.catalog_check import Need
from momentd_server.storage.damage import MOST_ROWS, Counts, Damage
from momentd_server.storage.format import SegmentHeader
from momentd_server.storage.location import slot
from momentd_server.storage.segment_check import Batch, Expected, SegmentReport, check_segment
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.verify import expect
from momentd_wire.errors import DaemonUnavailable, InternalError, MomentdError

# Rows of one job of the lane: some 50 us.
_JOB_ROWS: Final = 8192
_NAP_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class OnlineCheck:
    """One check of the store of a running engine."""

    lane: Lane
    tables: Tables
    store: SegmentStore
    catalog: Catalog
    request: Callable[[], AbstractContextManager[None]]  # a request in work: a stop waits for it
    stopping: Callable[[], bool]
    bytes_per_s: int  # 0: no limit

    def run(self) -> Iterator[VerifyStep]:
        """One step for each segment. Raises DaemonUnavailable when the engine stops."""
        with self.request():
            contents, damages = self.catalog.check()
        counts = Counts(tables=len(contents.tables), snapshots=len(contents.snapshots))
        wanted = self._segments(contents)
        total, done = sum(each.counted for each in wanted), 0
        yield VerifyStep(0, total, damages)
        began_s = time.monotonic()
        for expected in wanted:
            with self.request():
                report = self._check(expected, began_s, counts.bytes)
            counts.add(report.counts)
            done += expected.counted
            yield VerifyStep(done, total, report.damages)
        yield VerifyStep(total, total, counts=counts)

    def _segments(self, contents: Contents) -> list[Expected]:
        """All files that a table or a snapshot has now, each with what counts of it now."""
        users: dict[tuple[int, int], list[tuple[Need, int]]] = {}
        for need in contents.needs():
            if need.snapshot is not None:
                for segment, counted in need.manifest.segments:
                    users.setdefault((need.family, segment), []).append((need, counted))
        # Generations that were given out since the look at the catalog are of tables made since.
        generations = dict(contents.generations)
        for table in self.tables.all():
            record, family = table.record, table.family
            need = Need(family, record.layout, record.schema, record.manifest, table.id)
            generations[family] = max(generations.get(family, 0), table.generation)
            with self.lane:
                listed = dict(record.manifest.segments) if table.broken else {}
                listed |= {segment.id: segment.fill for segment in table.segments.values()}
            for segment, fill in listed.items():
                users.setdefault((family, segment), []).append((need, fill))
        return [
            expect(
                SegmentHeader(
                    self.store.datadir.store_id, family, segment, using[0][0].layout,
                    using[0][0].schema.record_bytes,
                ),
                using,
                generations.get(family, 0),
            )
            for (family, segment), using in sorted(users.items())
        ]  # fmt: skip

    def _check(self, expected: Expected, began_s: float, before: int) -> SegmentReport:
        header = expected.header
        path = self.store.datadir.segment_path(header.family, header.segment)
        locations = _Locations(self.lane, self.tables, expected)
        read = before

        def was_read(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            self._throttle(began_s, read)

        try:
            # Held open: compaction, or a drop, may take its name away meanwhile.
            with self.store.pin(np.array([header.segment])) as pins:
                report = check_segment(
                    int(pins.fds[0]), path, expected, was_read=was_read, seen=locations.compare
                )
        except InternalError:
            if self._in_use(expected):
                return self._check_unknown(expected, was_read)
            return SegmentReport()  # nobody needs it any more
        report.damages += locations.damages
        report.counts.locations += locations.count
        return report

    def _in_use(self, expected: Expected) -> bool:
        """Of a snapshot, or of a table that was not brought back: the store may not know those."""
        broken = {table.id for table in self.tables.all() if table.broken is not None}
        snapshots = {snapshot.name for snapshot in self.catalog.snapshots()}
        return not (broken.isdisjoint(expected.tables) and snapshots.isdisjoint(expected.snapshots))

    def _check_unknown(self, expected: Expected, was_read: Callable[[int], None]) -> SegmentReport:
        header = expected.header
        real = self.store.datadir.segment_path(header.family, header.segment)
        try:
            fd = files.open_direct(real, os.O_RDONLY)
        except OSError as error:
            what = (
                f"cannot be opened ({error.strerror}): restore it from a copy, or drop its tables"
            )
            damage = Damage(what, str(real), tables=expected.tables, snapshots=expected.snapshots)
            return SegmentReport([damage], Counts(segments=1))
        try:
            return check_segment(fd, real, expected, was_read=was_read)
        finally:
            os.close(fd)

    def _throttle(self, began_s: float, read: int) -> None:
        """Wait until so many bytes may have been read."""
        due_s = began_s + read / self.bytes_per_s if self.bytes_per_s else began_s
        while True:
            if self.stopping():
                raise DaemonUnavailable("the daemon is stopping: the check was not finished")
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, _NAP_S))


class _Locations:
    """Rows whose location is a slot of the segment: their check must be that of the record."""

    def __init__(self, lane: Lane, tables: Tables, expected: Expected) -> None:
        self.damages: list[Damage] = []
        self.count = 0
        self._lane = lane
        self._segment = expected.header.segment
        self._family = np.uint64(expected.header.family)
        self._tables: list[Table] = []
        for table_id in expected.tables:
            try:
                self._tables.append(tables.get(table_id))
            except MomentdError:
                continue  # dropped since

    def compare(self, batch: Batch) -> None:
        checks = np.empty(batch.rows.size, np.uint32)
        hashing.fold_checks(batch.hashes, self._family, checks)
        first = slot(self._segment, batch.first_offset)
        slots = first + np.arange(batch.rows.size, dtype=np.int64) * batch.record_bytes
        for table in self._tables:
            for start in range(0, batch.rows.size, _JOB_ROWS):
                part = slice(start, start + _JOB_ROWS)
                self._compare(table, batch.rows[part], slots[part], checks[part])

    def _compare(
        self, table: Table, rows: np.ndarray, slots: np.ndarray, checks: np.ndarray
    ) -> None:
        inside = np.flatnonzero((rows >= 0) & (rows < table.rows))
        rows, slots, checks = rows[inside], slots[inside], checks[inside]
        with self._lane:
            if table.dropped:
                return
            here = table.location[rows] == slots
            wrong = here & (table.check[rows] != checks)
        self.count += int(here.sum())
        if wrong.any():
            bad = rows[wrong]
            self.damages.append(
                Damage(
                    f"{bad.size} rows have another check in memory than their record on disk: a "
                    "request that needs one gets CorruptRecord; load a checkpoint into a new table",
                    f"segment {self._segment}",
                    tables=(table.id,),
                    rows=tuple(int(row) for row in bad[:MOST_ROWS]),
                    row_count=int(bad.size),
                )
            )
