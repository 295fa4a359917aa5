"""Cuts: the records that a committed state of a table needs, whatever became of them since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.storage import compaction_kernels as kernels
from momentd_server.storage import snapshot_kernels
from momentd_server.storage.format import SEGMENT_BYTES
from momentd_server.storage.records import SnapshotRecord


class Cut:
    """One bit for each record of each segment, set if the committed state has that record.

    A table that would not come back after a crash has an empty one. Changes in the lane, or with
    `Tables.moving` held, as its methods say.
    """

    def __init__(self, record_bytes: int, segments: Iterable[int] = ()) -> None:
        # Which records it has is not known: its segments stay as they are until the next flush.
        self.is_unknown = False
        self._record_bytes = record_bytes
        self._bitmap_bytes = SEGMENT_BYTES // record_bytes // 8 + 1
        self.segments: Rows = np.array(sorted(segments), np.int64)
        self.bits = np.zeros((self.segments.size, self._bitmap_bytes), np.uint8)
        # Records of the cut that the table itself does not refer to any more.
        self.only: Rows = np.zeros(self.segments.size, np.int64)
        # Segments that are being compacted: which records of the cut have copies elsewhere.
        self._copied: dict[int, np.ndarray] = {}

    @classmethod
    def unknown(cls, record_bytes: int, segments: Iterable[int]) -> Cut:
        """Of a committed state whose bits were lost with the engine that had them."""
        cut = cls(record_bytes, segments)
        cut.is_unknown = True
        return cut

    def __contains__(self, segment: int) -> bool:
        return self._position(segment) is not None

    def _position(self, segment: int) -> int | None:
        at = int(np.searchsorted(self.segments, segment))
        return at if at < self.segments.size and self.segments[at] == segment else None

    def only_here(self, segment: int) -> int:
        """Records of a segment that nothing but this cut needs."""
        at = self._position(segment)
        return 0 if at is None else int(self.only[at])

    def superseded(self, slots: Rows) -> None:
        """In the lane: the table does not refer to these slots any more (other words are 0)."""
        if self.segments.size:
            kernels.count_marked(slots, self._record_bytes, self.segments, self.bits, self.only)

    def mark(self, segment: int, first_slot: int, needed: np.ndarray) -> None:
        """Under `moving`: marks what has to be copied out of a segment; bool, one for a record."""
        at = self._position(segment)
        if at is not None:
            kernels.find_marked(
                first_slot, self._record_bytes, self.bits[at], self._copied_of(segment), needed
            )

    def copied(self, old: Rows, new: Rows, moved: np.ndarray, source: int, target: int) -> None:
        """In the lane, under `moving`: records at `old` (`source`) are at `new` (`target`) too.

        moved: bool, those that the table itself refers to there.
        """
        at = self._position(source)
        if at is None:
            return
        mine = np.zeros(old.size, np.bool_)
        kernels.are_marked(old, self._record_bytes, self.bits[at], mine)
        if not mine.any():
            return
        kernels.mark_slots(old, mine, self._record_bytes, self._copied_of(source))
        to = self._position(target)
        if to is None:
            to = self._add(target)
        kernels.mark_slots(new, mine, self._record_bytes, self.bits[to])
        self.only[to] += np.count_nonzero(mine & ~moved)

    def is_copied(self, segment: int) -> bool:
        """Under `moving`: whether all of the cut's records in a segment have copies elsewhere."""
        at = self._position(segment)
        return at is None or np.array_equal(self.bits[at], self._copied_of(segment))

    def forget(self, segment: int) -> None:
        """In the lane, under `moving`: the committed state does not list this segment any more."""
        self._copied.pop(segment, None)
        kept = self.segments != segment
        self.segments, self.bits, self.only = self.segments[kept], self.bits[kept], self.only[kept]

    def _copied_of(self, segment: int) -> np.ndarray:
        return self._copied.setdefault(segment, np.zeros(self._bitmap_bytes, np.uint8))

    def _add(self, segment: int) -> int:
        at = int(np.searchsorted(self.segments, segment))
        self.segments = np.insert(self.segments, at, segment)
        self.bits = np.insert(self.bits, at, 0, axis=0)
        self.only = np.insert(self.only, at, 0)
        return at

    def written(self, segment: int, slots: Rows, updates: Rows, number: int) -> int:
        """In the lane: records of one segment were written; those not above `number` belong here.

        Returns how many do.
        """
        at = self._position(segment)
        if at is None:
            at = self._add(segment)
        return snapshot_kernels.mark_written(
            slots, updates, number, self._record_bytes, self.bits[at]
        )

    def records(self) -> Rows:
        """Records of the cut in each of `segments`."""
        return np.array([snapshot_kernels.count_bits(bits) for bits in self.bits], np.int64)

    def without_empty(self) -> Cut:
        """The same without segments that have no record of it."""
        cut = Cut(self._record_bytes)
        chosen = self.records() > 0
        cut.segments, cut.bits, cut.only = (
            self.segments[chosen], self.bits[chosen], self.only[chosen],
        )  # fmt: skip
        return cut


class SnapshotCut:
    """The cut of a table of which a snapshot is being written. Changes in the lane."""

    def __init__(self, number: int, step: int, digest: int, cut: Cut) -> None:
        self.number = number  # versions above it do not belong to the snapshot
        self.step = step
        self.digest = digest  # of what was written last; complete when nothing is pending
        self.cut = cut
        self.records_written = 0
        self.failure: BaseException | None = None

    def written(self, segment: int, slots: Rows, updates: Rows, deltas: np.ndarray) -> None:
        """A batch was written, whosoever wanted it."""
        mine = updates <= self.number
        if mine.any():
            self.digest = (self.digest + int(deltas[mine].sum(dtype=np.uint64))) & (1 << 64) - 1
            self.records_written += self.cut.written(segment, slots, updates, self.number)

    def fail(self, error: BaseException) -> None:
        """A batch could not be written, and its records may have been changed since."""
        self.failure = self.failure or error


class KeptCut:
    """The cut of one table of a snapshot that is kept."""

    def __init__(self, snapshot: str, position: int, user: int, cut: Cut) -> None:
        self.snapshot = snapshot  # its name
        self.position = position  # of the table in it
        self.user = user  # of segments; below 0, so that it is no table
        self.cut = cut
        self.unreadable = False  # which records it has cannot be found out

    def with_segments(
        self, record: SnapshotRecord, segments: tuple[tuple[int, int], ...]
    ) -> SnapshotRecord:
        """The snapshot with other segments for this table."""
        tables = list(record.tables)
        mine = tables[self.position]
        tables[self.position] = replace(mine, manifest=replace(mine.manifest, segments=segments))
        return replace(record, tables=tuple(tables))
