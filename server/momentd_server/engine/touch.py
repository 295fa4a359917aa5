"""Touch: bring rows into frames, then run a job over them in the lane.

Admit: frames for the whole request, all its tables, are reserved at once, in order of arrival.
Fetch: missing rows are read into reserved frames that nobody sees; an error changes nothing. Rows
that another request is reading are not read again: this one waits until they are there.
Apply: the job runs in the lane, over memory only: it cannot fail for want of anything.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.engine.cache import Cache
from momentd_server.engine.cuts import SnapshotCut
from momentd_server.engine.flight import SHORT, Fetch, Flight, Touch, read_error
from momentd_server.engine.lane import Lane
from momentd_server.engine.spill import Cleaner
from momentd_server.engine.table import Table
from momentd_server.jit import Pool
from momentd_server.storage import frames, location
from momentd_server.storage import snapshot_kernels as kernels
from momentd_server.storage.diskio import READ_OK, ReadPool
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.space import SLAB_BYTES, Space, least_cache_bytes
from momentd_wire.errors import CacheTooSmall, MomentdError

T = TypeVar("T")
_SHARING_ATTEMPTS: Final = 3
_JOB_FRAMES: Final = 1 << 15
_LEAST_ROWS: Final = 2048  # below this a second thread costs more than it brings


class Toucher:
    """Runs jobs over resident rows. Thread-safe; the caller's thread waits."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        space: Space,
        lane: Lane,
        pool: Pool,
        cache: Cache,
        cleaner: Cleaner,
        store: SegmentStore,
        readers: ReadPool,
        request_record_bytes: int,
        write_listed: Callable[[Table, SnapshotCut, Callable[[], Rows]], None],
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
        self._write_listed = write_listed
        self._admission = Lane()
        self._changed = threading.Condition()  # guards the two fields below
        self._events = 0
        self._in_flight = 0
        self._counts = np.zeros((pool.threads, 4), np.int64)
        self._waiting = False  # a request has found no frames

    def notify(self) -> None:
        """Frames may have become available."""
        with self._changed:
            self._events += 1
            self._changed.notify_all()

    def run(self, touches: Sequence[Touch], job: Callable[[], T]) -> T:
        """Run `job` in the lane with every row of every touch in a frame."""
        self._check_size(touches)
        for attempt in itertools.count():
            with self._lane:
                resident = self._look_up(touches)
                if attempt == 0:
                    self._count(touches)
                if resident and not self._pending(touches):
                    return job()
            if resident:
                self._write_pending(touches)
                continue
            # What others bring may be gone again before it is used: not for ever.
            flight = self._admit(touches, share=attempt < _SHARING_ATTEMPTS)
            done, result = self._complete(flight, touches, job)
            if done:
                return cast("T", result)
        raise AssertionError

    def _pending(self, touches: Sequence[Touch]) -> bool:
        """In the lane, after a look-up: whether a snapshot still lacks records of these rows."""
        return any(
            touch.table.snapshot is not None
            and kernels.count_pending(touch.index, self._words, touch.table.snapshot.number)
            for touch in touches
        )

    def _write_pending(self, touches: Sequence[Touch]) -> None:
        """The rows are about to be changed: what a snapshot lacks of them is written first."""
        for touch in touches:
            cut = touch.table.snapshot
            if cut is not None:
                try:
                    self._write_listed(touch.table, cut, functools.partial(self._index_of, touch))
                except MomentdError as error:
                    # The snapshot fails, not the request.
                    with self._lane:
                        cut.fail(error)
                        touch.table.snapshot = None

    def _index_of(self, touch: Touch) -> Rows:
        self._look_up([touch])
        return touch.index

    def find(self, touch: Touch) -> bool:
        """Before anything is served: look the rows up; whether all are in frames."""
        with self._lane:
            return self._look_up([touch])

    def prefetch(self, table: Table, rows: Rows) -> Rows:
        """Bring rows that are on disk into frames, as far as there is room for them.

        Returns the rest: if none was brought, there was no room; wait, then try again. Never waits
        for frames itself, nor takes them from requests that do.
        """
        touch = Touch(table, rows)
        with self._lane:
            self._look_up([touch])
            fetch = Fetch(touch)
            fetch.pinned = rows[:0]
            fetch.leave_to_others(table.flights)
            on_disk = np.flatnonzero(fetch.seen > 0)
            wanted, rest = fetch.rows[on_disk], rows[:0]
            room = max(self._limit_bytes - self._cache.fresh_bytes(), 0) // table.frame_bytes
            # One flight is short: a request for one of its rows waits for all of it.
            room = min(room, SHORT)
            if on_disk.size > room:
                on_disk, rest = on_disk[:room], wanted[room:]
            if not on_disk.size:
                return rest
            table.demand = max(table.demand, on_disk.size)
            reserved = None
            if not self._waiting:
                reserved = self._cache.reserve(table, on_disk.size, {})
            flight = None
            if reserved is not None:
                fetch.only(on_disk)
                fetch.hold(reserved)
                flight = self._take_off([fetch], [])
        self._wake_cleaner([table])
        if flight is None:
            return wanted
        try:
            self._read(flight)
            with self._lane:
                self._publish(fetch, pins=0)
                self._land(flight)
            table.counters.rows_prefetched += fetch.rows.size
        finally:
            self._end(flight)
        return rest

    def forget_fresh(self, table: Table) -> None:
        """What was brought and never used takes no room of what comes next from now on."""
        slabs = table.slabs
        at_once = max(1, _JOB_FRAMES // table.geometry.frames)
        for start in range(0, slabs.size, at_once):
            with self._lane:
                if table.slabs is not slabs:
                    return
                part = slabs[start : start + at_once]
                frames.forget_fresh(part, self._words, table.geo, table.tally)

    def wait(self, timeout_s: float) -> None:
        """Until frames may have become available, or the time is over."""
        with self._changed:
            self._changed.wait(timeout_s)

    # ------------------------------------------------------------------------------ admit

    def _check_size(self, touches: Sequence[Touch]) -> None:
        wanted = sum(touch.cache_bytes for touch in touches)
        # Each table needs slabs of its own.
        slabs = sum(touch.slabs for touch in touches)
        if wanted > self._limit_bytes or slabs > self._space.slabs:
            needed = least_cache_bytes(max(4 * wanted, slabs * SLAB_BYTES))
            raise CacheTooSmall(
                f"the request's records take {wanted} bytes of cache, more than a quarter of the "
                f"cache ({self._limit_bytes} bytes), or {slabs} slabs of 2 MiB, of which it has "
                f"{self._space.slabs}: start the daemon with --cache {needed >> 20}MiB or more, "
                "or use smaller batches",
                needed_bytes=needed,
            )

    def _look_up(self, touches: Sequence[Touch]) -> bool:
        """In the lane. True if all rows are in frames."""
        missing_in_all = 0
        for touch in touches:
            table = touch.table
            self._counts[:] = 0
            self._pool.run(
                frames.lookup, touch.rows.size, touch.rows, table.location, self._words,
                table.geo, touch.index, touch.offset, self._counts, least=_LEAST_ROWS,
            )  # fmt: skip
            missing, *states = self._counts.sum(axis=0).tolist()
            touch.missing, touch.states = missing, tuple(states)
            missing_in_all += missing
        return missing_in_all == 0

    def _count(self, touches: Sequence[Touch]) -> None:
        """In the lane, after a request's first look-up."""
        for touch in touches:
            counters = touch.table.counters
            if touch.missing:
                counters.misses += int(np.count_nonzero(touch.offset[touch.index < 0]))
            counters.hits += touch.rows.size - touch.missing
            touch.table.last_used_s = time.monotonic()

    def _admit(self, touches: Sequence[Touch], *, share: bool) -> Flight:
        with self._admission:
            waited_since = time.monotonic()
            try:
                while True:
                    with self._changed:
                        events = self._events
                    with self._lane:
                        self._look_up(touches)
                        flight = self._reserve(touches, share=share)
                        if flight is not None:
                            return flight
                        self._waiting = True
                        stuck = self._is_stuck()
                    self._cleaner.wake()
                    self._wait(events, stuck, time.monotonic() - waited_since)
            finally:
                self._waiting = False

    def _reserve(self, touches: Sequence[Touch], *, share: bool) -> Flight | None:
        """In the lane, after a look-up: pin what is there, reserve for the rest; all or nothing."""
        fetches: list[Fetch] = []
        waits_for: list[Flight] = []
        shared: list[int] = []
        needs = {touch.table.id: touch.slabs for touch in touches}
        for touch in touches:
            frames.change_pins(touch.index, self._words, 1)
            fetches.append(Fetch(touch))
        for fetch in fetches:
            table = fetch.table
            table.demand = max(fetch.rows.size, table.demand * 15 // 16)
            others, count = fetch.leave_to_others(table.flights if share else ())
            waits_for += others
            shared.append(count)
            reserved = self._cache.reserve(table, fetch.rows.size, needs)
            if reserved is None:
                self._release(fetches)
                return None
            fetch.hold(reserved)
        for fetch, count in zip(fetches, shared, strict=True):
            fetch.table.counters.reads_shared += count
        return self._take_off(fetches, waits_for)

    def _take_off(self, fetches: list[Fetch], waits_for: list[Flight]) -> Flight:
        """In the lane."""
        flight = Flight(fetches, waits_for)
        for fetch in fetches:
            fetch.read = fetch.table.retirement.begin_read()
            fetch.table.flights.append(flight)
        with self._changed:
            self._in_flight += 1
        return flight

    def _release(self, fetches: Sequence[Fetch]) -> None:
        """In the lane: pins and reserved frames, of a request that gets no further."""
        self._unpin(fetches)
        for fetch in fetches:
            self._cache.give_back(fetch.table, fetch.reserved)

    def _unpin(self, fetches: Sequence[Fetch]) -> None:
        """In the lane."""
        for fetch in fetches:
            frames.change_pins(fetch.pinned, self._words, -1)

    def _land(self, flight: Flight) -> None:
        """In the lane: nothing is read for this flight any more."""
        for fetch in flight.fetches:
            fetch.table.retirement.end_read(fetch.read)
            fetch.table.flights.remove(flight)

    def _end(self, flight: Flight) -> None:
        """After `_land`: whoever waits for its rows, or for frames, looks again."""
        flight.landed.set()
        with self._changed:
            self._in_flight -= 1
            self._events += 1
            self._changed.notify_all()

    def _is_stuck(self) -> bool:
        """In the lane: nobody else holds frames and nothing is left to clean."""
        return self._in_flight == 0 and self._cache.nothing_to_clean()

    def _wait(self, events: int, stuck: bool, waited_s: float) -> None:
        self._store.failure.refuse()
        failure = self._cleaner.failure
        if failure is not None and waited_s > 0.5:
            raise type(failure)(failure.message, **failure.details)
        if stuck and waited_s > 1.0:
            needed = least_cache_bytes(2 * self._space.slabs * SLAB_BYTES)
            raise CacheTooSmall(
                "the cache has no frames for this request although nothing else uses it: start "
                f"the daemon with a larger --cache, e.g. {needed >> 20}MiB",
                needed_bytes=needed,
            )
        with self._changed:
            if self._events == events:
                self._changed.wait(0.05)

    # ------------------------------------------------------------------------------ fetch

    def _complete(
        self, flight: Flight, touches: Sequence[Touch], job: Callable[[], T]
    ) -> tuple[bool, T | None]:
        """Fetch, then the job; (False, None) if rows changed place meanwhile."""
        try:
            self._read(flight)
            if flight.waits_for:
                return self._complete_shared(flight, touches, job)
            with self._lane:
                try:
                    changed = sum(self._publish(fetch, pins=0) for fetch in flight.fetches)
                    self._land(flight)
                    if changed or self._pending(touches):
                        return False, None
                    return True, job()
                finally:
                    self._unpin(flight.fetches)
        finally:
            self._end(flight)
            self._wake_cleaner([touch.table for touch in touches])

    def _complete_shared(
        self, flight: Flight, touches: Sequence[Touch], job: Callable[[], T]
    ) -> tuple[bool, T | None]:
        """The same where others bring some of the rows. What this one has read is there at once."""
        with self._lane:
            for fetch in flight.fetches:
                self._publish(fetch, pins=1)
                fetch.pinned = fetch.touch.index.copy()
            self._land(flight)
        flight.landed.set()
        for other in flight.waits_for:
            other.landed.wait()
        flight.waits_for = []
        with self._lane:
            try:
                if not self._look_up(touches) or self._pending(touches):
                    return False, None
                return True, job()
            finally:
                self._unpin(flight.fetches)

    def _wake_cleaner(self, tables: Sequence[Table]) -> None:
        if any(self._cache.short_of_clean(table) for table in tables):
            self._cleaner.wake()

    def _read(self, flight: Flight) -> None:
        """All reads of a flight; it has landed if one fails."""
        try:
            for fetch in flight.fetches:
                self._fetch(fetch)
        except BaseException:
            with self._lane:
                self._release(flight.fetches)
                self._land(flight)
            raise

    def _fetch(self, fetch: Fetch) -> None:
        table = fetch.table
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
            raise read_error(table, int(rows[bad[0]]), int(segments[bad[0]]), int(status[bad[0]]))
        return hashes

    def _publish(self, fetch: Fetch, pins: int) -> int:
        """In the lane. Returns how many rows changed place meanwhile: look them up again."""
        touch, table = fetch.touch, fetch.table
        unused = np.empty(fetch.reserved.size, np.int64)
        count, changed, first_touches = frames.publish(
            fetch.positions, touch.rows, fetch.seen, fetch.reserved, fetch.hashes, pins,
            table.location, self._words, table.geo, table.tally, touch.index, touch.offset, unused,
        )  # fmt: skip
        self._cache.give_back(table, unused[:count])
        table.rows_touched += first_touches
        table.dirty += first_touches
        table.counters.first_touches += first_touches
        # Records found in frames at admission may have been cleaned since: count again.
        touch.states = frames.count_words(touch.index, self._words)
        return changed
