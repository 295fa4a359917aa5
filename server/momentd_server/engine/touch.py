"""Touch: bring rows into frames, then run a job over them in the lane.

Admit: frames for the whole request, all its tables, are reserved at once, in order of arrival.
Fetch: missing rows are read into reserved frames that nobody sees; an error changes nothing.
Apply: the job runs in the lane, over memory only: it cannot fail for want of anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.engine.cache import Cache
from momentd_server.engine.lane import Lane
from momentd_server.engine.spill import Cleaner
from momentd_server.engine.table import Table
from momentd_server.jit import Pool
from momentd_server.storage import frames, location
from momentd_server.storage.diskio import READ_MISMATCH, READ_OK, READ_PAST_END, ReadPool
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.space import Space, least_cache_bytes
from momentd_wire.errors import CacheTooSmall, CorruptRecord, MomentdError, StorageFailed

T = TypeVar("T")
_LEAST_ROWS: Final = 2048  # below this a second thread costs more than it brings


class Touch:
    """Distinct rows of one table of a request, and where their records are.

    `index` (position of the state word) and `offset` (byte of the record) are valid within the job.
    """

    def __init__(self, table: Table, rows: Rows) -> None:
        self.table = table
        self.rows = rows
        self.index: Rows = np.empty(rows.size, np.int64)
        self.offset: Rows = np.empty(rows.size, np.int64)
        self.missing = 0
        self.dirty = 0  # records that were dirty before this request
        self.fetch: _Fetch | None = None

    @property
    def cache_bytes(self) -> int:
        return self.rows.size * self.table.frame_bytes


class _Fetch:
    """Rows of a touch that are not in frames, and the frames reserved for them."""

    def __init__(self, touch: Touch, reserved: Rows) -> None:
        table = touch.table
        self.reserved = reserved
        self.positions: Rows = np.flatnonzero(touch.index < 0)
        self.seen: Rows = touch.offset[self.positions]  # location words
        self.rows: Rows = touch.rows[self.positions]
        self.checks = table.check[self.rows]
        self.hashes: Rows = np.zeros(self.positions.size, np.int64)


class Toucher:
    """Runs jobs over resident rows. Thread-safe; the caller's thread waits."""

    def __init__(
        self,
        space: Space,
        lane: Lane,
        pool: Pool,
        cache: Cache,
        cleaner: Cleaner,
        store: SegmentStore,
        readers: ReadPool,
        request_record_bytes: int,
    ) -> None:
        self._space = space
        self._words = space.words.view(np.int64)
        self._lane = lane
        self._pool = pool
        self._cache = cache
        self._cleaner = cleaner
        self._store = store
        self._readers = readers
        self._limit_bytes = request_record_bytes
        self._admission = Lane()
        self._changed = threading.Condition()  # guards the two fields below
        self._events = 0
        self._in_flight = 0
        self._counts = np.zeros((pool.threads, 2), np.int64)

    def notify(self) -> None:
        """Frames may have become available."""
        with self._changed:
            self._events += 1
            self._changed.notify_all()

    def run(self, touches: Sequence[Touch], job: Callable[[], T]) -> T:
        """Run `job` in the lane with every row of every touch in a frame."""
        self._check_size(touches)
        while True:
            with self._lane:
                if self._look_up(touches):
                    self._count(touches)
                    return job()
            done, result = self._run_cold(touches, job)
            if done:
                return result

    def prefetch(self, touch: Touch) -> None:
        """Bring rows that are on disk into frames, as far as frames are to be had at once."""
        with self._lane:
            self._look_up([touch])
            on_disk = (touch.index < 0) & (touch.offset > 0)
            touch.rows = touch.rows[on_disk]
            touch.index, touch.offset = touch.index[on_disk], touch.offset[on_disk]
            touch.missing = touch.rows.size
            if not touch.missing or not self._reserve([touch]):
                return
        self._fetch_and_publish([touch], None)

    # ------------------------------------------------------------------------------ admit

    def _check_size(self, touches: Sequence[Touch]) -> None:
        wanted = sum(touch.cache_bytes for touch in touches)
        if wanted > self._limit_bytes:
            needed = least_cache_bytes(4 * wanted)
            raise CacheTooSmall(
                f"the request's records take {wanted} bytes of cache, more than a quarter of the "
                f"cache ({self._limit_bytes} bytes): start the daemon with --cache "
                f"{needed >> 20}MiB or more, or use smaller batches",
                needed_bytes=needed,
            )

    def _look_up(self, touches: Sequence[Touch]) -> bool:
        """In the lane. True if all rows are in frames."""
        missing = 0
        for touch in touches:
            table = touch.table
            self._counts[:] = 0
            self._pool.run(
                frames.lookup, touch.rows.size, touch.rows, table.location, self._words,
                table.geo, touch.index, touch.offset, self._counts, least=_LEAST_ROWS,
            )  # fmt: skip
            touch.missing = int(self._counts[:, 0].sum())
            touch.dirty = int(self._counts[:, 1].sum())
            missing += touch.missing
        return missing == 0

    def _run_cold(self, touches: Sequence[Touch], job: Callable[[], T]) -> tuple[bool, T]:
        self._admit(touches)
        return self._fetch_and_publish(touches, job)

    def _admit(self, touches: Sequence[Touch]) -> None:
        with self._admission:
            waited_since = time.monotonic()
            while True:
                with self._changed:
                    events = self._events
                with self._lane:
                    self._look_up(touches)
                    if self._reserve(touches):
                        return
                    stuck = self._is_stuck(touches)
                self._cleaner.wake()
                self._wait(events, stuck, time.monotonic() - waited_since)

    def _reserve(self, touches: Sequence[Touch]) -> bool:
        """In the lane, after a look-up: pin what is there, reserve for the rest; all or nothing."""
        for touch in touches:
            frames.change_pins(touch.index, self._words, 1)
        for touch in touches:
            touch.table.demand = max(touch.missing, touch.table.demand * 15 // 16)
            reserved = self._cache.reserve(touch.table, touch.missing)
            if reserved is None:
                self._undo(touches)
                return False
            touch.fetch = _Fetch(touch, reserved)
            touch.table.reading += 1
        with self._changed:
            self._in_flight += 1
        return True

    def _undo(self, touches: Sequence[Touch]) -> None:
        """In the lane: unpin and give back."""
        for touch in touches:
            frames.change_pins(touch.index, self._words, -1)
            if touch.fetch is not None:
                self._cache.give_back(touch.table, touch.fetch.reserved)
                touch.table.reading -= 1
                touch.fetch = None

    def _is_stuck(self, touches: Sequence[Touch]) -> bool:
        """In the lane: nobody else holds frames and nothing is left to clean."""
        return self._in_flight == 0 and self._cache.nothing_to_clean()

    def _wait(self, events: int, stuck: bool, waited_s: float) -> None:
        failure = self._cleaner.failure
        if failure is not None and waited_s > 0.5:
            raise type(failure)(failure.message, **failure.details)
        if stuck and waited_s > 1.0:
            raise CacheTooSmall(
                "the cache has no frames for this request although nothing else uses it: every "
                "table needs at least one slab of 2 MiB; start the daemon with a larger --cache"
            )
        with self._changed:
            if self._events == events:
                self._changed.wait(0.05)

    # ------------------------------------------------------------------------------ fetch

    def _fetch_and_publish(
        self, touches: Sequence[Touch], job: Callable[[], T] | None
    ) -> tuple[bool, T]:
        try:
            for touch in touches:
                self._fetch(touch)
        except BaseException:
            with self._lane:
                self._undo(touches)
            self._leave_flight()
            raise
        try:
            with self._lane:
                try:
                    changed = sum(self._publish(touch) for touch in touches)
                    if job is None or changed:
                        return False, None  # type: ignore[return-value]
                    self._count(touches)
                    return True, job()
                finally:
                    self._unpin(touches)
        finally:
            self._leave_flight()
            if any(self._cache.short_of_clean(touch.table) for touch in touches):
                self._cleaner.wake()

    def _unpin(self, touches: Sequence[Touch]) -> None:
        """In the lane: what was pinned at admission, which is all but the fetched rows."""
        for touch in touches:
            fetch = touch.fetch
            if fetch is not None:
                touch.index[fetch.positions] = -1
                frames.change_pins(touch.index, self._words, -1)
                touch.table.reading -= 1
                touch.fetch = None

    def _leave_flight(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._events += 1
            self._changed.notify_all()

    def _fetch(self, touch: Touch) -> None:
        fetch, table = touch.fetch, touch.table
        assert fetch is not None
        frames.initialise(
            fetch.reserved, fetch.seen == 0, self._space.bytes, table.geo, table.initial
        )
        on_disk = np.flatnonzero(fetch.seen > 0)
        if on_disk.size:
            offsets = np.empty(on_disk.size, np.int64)
            frames.record_offsets(fetch.reserved[on_disk], table.geo, offsets)
            hashes = self.read_slots(
                table, fetch.rows[on_disk], fetch.seen[on_disk], fetch.checks[on_disk],
                self._space.bytes, offsets,
            )  # fmt: skip
            fetch.hashes[on_disk] = hashes.view(np.int64)

    def read_slots(
        self, table: Table, rows: Rows, slots: Rows, checks: np.ndarray, dest: np.ndarray,
        dest_offsets: Rows,
    ) -> np.ndarray:  # fmt: skip
        """Read records into `dest` and check them; returns their hashes (uint64).

        Raises CorruptRecord and StorageFailed naming the first bad row. The caller sees to it that
        the segments stay (the slots were read in the lane and their segments pinned since).
        """
        hashes = np.empty(rows.size, np.uint64)
        segments = (slots >> int(location.SEGMENT_SHIFT)) & int(location.SEGMENT_MASK)
        with self._store.pin(segments) as pins:
            status = self._readers.read(
                pins.fds, slots & int(location.OFFSET_MASK), table.geometry.record_bytes, rows,
                checks, table.family, table.initial, dest, dest_offsets, hashes,
            )  # fmt: skip
        table.counters.bytes_read += rows.size * table.geometry.record_bytes
        bad = np.flatnonzero(status != READ_OK)
        if bad.size:
            raise _read_error(table, int(rows[bad[0]]), int(segments[bad[0]]), int(status[bad[0]]))
        return hashes

    def _publish(self, touch: Touch) -> int:
        """In the lane. Returns how many rows changed place meanwhile: look them up again."""
        fetch, table = touch.fetch, touch.table
        assert fetch is not None
        unused = np.empty(fetch.reserved.size, np.int64)
        count, changed, first_touches = frames.publish(
            fetch.positions, touch.rows, fetch.seen, fetch.reserved, fetch.hashes,
            table.location, self._words, table.geo, touch.index, touch.offset, unused,
        )  # fmt: skip
        self._cache.give_back(table, unused[:count])
        table.rows_touched += first_touches
        table.dirty += first_touches
        table.counters.first_touches += first_touches
        # Records found in frames at admission may have been cleaned since: count again.
        touch.dirty = frames.count_dirty(touch.index, self._words)
        return changed

    def _count(self, touches: Sequence[Touch]) -> None:
        for touch in touches:
            counters, fetch = touch.table.counters, touch.fetch
            misses = int(np.count_nonzero(fetch.seen)) if fetch else 0
            counters.misses += misses
            counters.hits += touch.rows.size - (fetch.seen.size if fetch else 0)
            touch.table.last_used_s = time.monotonic()


def _read_error(table: Table, row: int, segment: int, status: int) -> MomentdError:
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
