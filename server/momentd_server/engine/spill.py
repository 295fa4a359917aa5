"""Spill: dirty records go to disk in batches, in the background, so that clean frames are in stock.

A batch is copied by jobs of the lane, hashed and written outside it, and published by a job: only
records that were not changed meanwhile become clean. Whatever fails leaves frames plainly dirty.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.engine.cache import Cache
from momentd_server.engine.cuts import SnapshotCut
from momentd_server.engine.lane import Lane
from momentd_server.engine.table import Table
from momentd_server.storage import hashing, location, victim_kernels
from momentd_server.storage import snapshot_kernels as kernels
from momentd_server.storage.diskio import aligned_buffer
from momentd_server.storage.segments import Segment, SegmentStore, fitting_bytes
from momentd_server.storage.space import Space
from momentd_wire.errors import InternalError, MomentdError, OutOfSpace

log = logging.getLogger("momentd.spill")

BATCH_BYTES: Final = 8 << 20
# A background job of the lane lasts at most about 1 ms: this much copying, or scanning.
_JOB_BYTES: Final = 1 << 20
_JOB_FRAMES: Final = 1 << 15
_PUBLISH_FRAMES: Final = 8192
_TURNS: Final = 6
_RETRY_S: Final = 1.0
_SAY_AGAIN_S: Final = 10.0


class Spiller:
    """Writes batches of one table at a time; called by the cleaner and by flush, clone and stop."""

    def __init__(
        self,
        space: Space,
        lane: Lane,
        store: SegmentStore,
        release: Callable[[Table, list[int]], None],
    ) -> None:
        # Of the compactor, which is made later. True: there was no space for a batch.
        self.wake_compactor: Callable[[bool], None] = lambda _full: None
        # Makes room on a full disk at once; whether it is worth another try.
        self.make_room: Callable[[], bool] = lambda: False
        # Free space that is left to compaction, so that it can make more.
        self.floor_bytes = 0
        self._space = space
        self._words = space.words.view(np.int64)
        self._lane = lane
        self._store = store
        self._release = release
        self._buffers: list[np.ndarray] = []

    def spill(self, table: Table, *, slab: int | None = None, wanted: int = 0) -> int:
        """Write one batch of dirty records; returns how many frames became clean or victims.

        Those of one `slab`, or, if victims are `wanted`, such as were not used of late and then may
        leave the cache; else any. Raises OutOfSpace and StorageFailed with nothing changed.
        """
        with table.spilling:
            batch = _Batch(table, self._take_buffer())
            try:
                if slab is not None:
                    self._copy_slab(table, batch, slab)
                elif wanted:
                    self._choose(table, batch, wanted)
                else:
                    self._turn(table, batch, age=0)
                return self._write_and_publish(table, batch) + batch.queued
            finally:
                self._buffers.append(batch.buffer)

    def spill_cut(self, table: Table, cut: SnapshotCut, hand: Rows) -> bool:
        """Write one batch of records that a snapshot's cut still lacks; False at the last frame.

        `hand`: int64[1], the next frame to look at; 0 at first.
        """
        with table.spilling:
            slabs = table.slabs
            batch = _Batch(table, self._take_buffer())
            try:
                total = slabs.size * table.geometry.frames
                job = max(1, _JOB_BYTES // table.geometry.record_bytes)
                while hand[0] < total and batch.count < batch.capacity:
                    wanted = min(job, batch.capacity - batch.count)
                    with self._lane:
                        if table.slabs is not slabs:
                            hand[0] = 0  # frames came or went: all are looked at again
                            break
                        batch.count += kernels.copy_pending(
                            slabs, hand, cut.number, wanted, _JOB_FRAMES, self._space.bytes,
                            self._words, table.geo, *batch.rest(),
                        )  # fmt: skip
                self._write_and_publish(table, batch)
                return table.slabs is not slabs or hand[0] < total
            finally:
                self._buffers.append(batch.buffer)

    def spill_listed(self, table: Table, cut: SnapshotCut, find: Callable[[], Rows]) -> None:
        """Write those of the records that `find` finds, in the lane, that a snapshot still lacks.

        Whoever is about to change them waits for that, and for nothing else of the snapshot.
        """
        with table.spilling:
            written = -1
            while written:
                batch = _Batch(table, self._take_buffer())
                try:
                    with self._lane:
                        if table.snapshot is not cut:
                            return
                        batch.count = kernels.copy_listed(
                            find(), cut.number, batch.capacity, self._space.bytes, self._words,
                            table.geo, *batch.rest(),
                        )  # fmt: skip
                    written = batch.count
                    self._write_and_publish(table, batch)
                finally:
                    self._buffers.append(batch.buffer)

    def _write_and_publish(self, table: Table, batch: _Batch) -> int:
        """Under the table's `spilling`. Returns how many frames became clean."""
        if not batch.count:
            return 0
        try:
            self._write(table, batch)
        except BaseException as error:
            with self._lane:
                batch.withdraw(self._words)
                if table.snapshot is not None:
                    # What was changed since it was copied is lost to the cut.
                    table.snapshot.fail(error)
            raise
        return self._publish(table, batch)

    def spill_all(self, table: Table) -> int:
        """Write until nothing is dirty (nobody may update the table meanwhile). Returns bytes."""
        written = 0
        while table.dirty:
            slabs = table.slabs
            try:
                cleaned = self.spill(table)
            except OutOfSpace:
                if not self.make_room():
                    raise
                continue
            # A turn over the frames ends early if slabs came or went meanwhile.
            if not cleaned and table.dirty and table.slabs is slabs:
                raise RuntimeError(f"{table.dirty} dirty records of table {table.id} are not found")
            written += cleaned * table.geometry.record_bytes
        return written

    def _take_buffer(self) -> np.ndarray:
        return self._buffers.pop() if self._buffers else aligned_buffer(BATCH_BYTES)

    def _choose(self, table: Table, batch: _Batch, wanted: int) -> None:
        """Copies records that were not used of late; queues such frames that are clean already."""
        batch.victims = True
        # A full batch costs the disk little more, but takes much of a table that has few frames.
        batch.capacity = min(batch.capacity, max(wanted, table.frames // 8))
        # What is used most has lost its count after so many turns, each as long as all before it.
        for turn in range(_TURNS):
            if not self._turn(table, batch, age=1 << turn):
                return

    def _turn(self, table: Table, batch: _Batch, age: int) -> bool:
        """Once over all frames of a table, in short jobs; False if the batch is full before."""
        slabs = table.slabs
        to_scan = slabs.size * table.geometry.frames
        job = max(1, _JOB_BYTES // table.geometry.record_bytes)
        while to_scan > 0:
            wanted = min(job, batch.capacity - batch.count - batch.queued)
            if not wanted:
                return False
            with self._lane:
                if table.slabs is not slabs:
                    return False  # slabs came or went meanwhile: what was found is enough
                most = min(_JOB_FRAMES, to_scan)
                to_scan -= self._move_hand(table, batch, slabs, table.hand, wanted, most, age)
        return True

    def _copy_slab(self, table: Table, batch: _Batch, slab: int) -> None:
        """The whole slab in one job: afterwards it may have gone to another table."""
        only, hand = np.array([slab], np.int64), np.zeros(1, np.int64)
        everything = table.geometry.frames
        with self._lane:
            if slab in table.slabs:
                self._move_hand(table, batch, only, hand, everything, everything, age=0)

    def _move_hand(
        self, table: Table, batch: _Batch, slabs: Rows, hand: Rows, wanted: int, most: int,
        age: int,
    ) -> int:  # fmt: skip
        """In the lane: finds up to `wanted` records; returns how many of `most` frames it saw."""
        copied, queued, scanned = victim_kernels.choose(
            slabs, hand, wanted, most, age, self._space.bytes, self._words, table.geo,
            table.victims, table.tally, *batch.rest(),
        )  # fmt: skip
        batch.count += copied
        batch.queued += queued
        return scanned

    def _write(self, table: Table, batch: _Batch) -> None:
        count, record_bytes = batch.count, table.geometry.record_bytes
        records = batch.buffer[: count * record_bytes]
        offsets = np.arange(count, dtype=np.int64) * record_bytes
        hashes = np.empty(count, np.uint64)
        initial = table.initial.view(np.uint64)
        hashing.hash_records(records.view(np.uint64), offsets, batch.rows[:count], initial, hashes)
        checks = np.empty(count, np.uint32)
        hashing.fold_checks(hashes, table.family, checks)
        deltas = hashes - batch.old[:count].view(np.uint64)
        delta = int(deltas.sum(dtype=np.uint64))
        versions = np.uint64(table.version(0)) | batch.updates[:count].view(np.uint64)

        try:
            self._check_space(count * record_bytes)
            segment = self._segment_for(table, count)
            first = self._store.append(
                segment, records, batch.rows[:count], versions, hashes, delta
            )
        except OutOfSpace:
            self.wake_compactor(True)
            raise
        batch.slots = np.int64(location.slot(segment.id, first)) + offsets
        batch.hashes, batch.checks, batch.segment = hashes, checks, segment
        batch.deltas = deltas
        table.counters.bytes_written += count * record_bytes

    def _check_space(self, wanted_bytes: int) -> None:
        if not self.floor_bytes:
            return
        free_bytes = self._store.datadir.free_bytes()
        if free_bytes < wanted_bytes + self.floor_bytes:
            raise OutOfSpace(
                f"{self._store.datadir.path} has {free_bytes >> 20} MiB free, of which compaction "
                f"needs {self.floor_bytes >> 20} MiB to make more: it is at work and this is tried "
                "again; free space on that file system or drop tables",
                path=self._store.datadir.path,
            )

    def _segment_for(self, table: Table, count: int) -> Segment:
        segment = table.open_segment
        if (
            segment is None
            or not segment.has_room(count)
            or segment.fill >= fitting_bytes(table.needed_bytes())
        ):
            if segment is not None:
                self._store.seal(segment)
            segment = self._store.create(
                table.family, table.record.layout, table.geometry.record_bytes
            )
            with self._lane:
                table.segments[segment.id] = segment
                table.open_segment = segment
        return segment

    def _publish(self, table: Table, batch: _Batch) -> int:
        cleaned_in_all = 0
        with self._lane:
            # A row's digest goes on from what was written last, changed meanwhile or not.
            table.begin_publishing(int(batch.deltas.sum(dtype=np.uint64)))
            if table.snapshot is not None:
                table.snapshot.written(
                    batch.segment.id, batch.slots, batch.updates[: batch.count], batch.deltas
                )
        old_slots = np.empty(_PUBLISH_FRAMES, np.int64)
        for start in range(0, batch.count, _PUBLISH_FRAMES):
            part = slice(start, min(start + _PUBLISH_FRAMES, batch.count))
            with self._lane:
                cleaned = victim_kernels.publish_spill(
                    batch.frames[part], batch.rows[part], batch.updates[part], batch.slots[part],
                    batch.hashes[part].view(np.int64), batch.checks[part], batch.victims,
                    table.check, self._words, table.geo, table.victims, table.tally, old_slots,
                )  # fmt: skip
                table.dirty -= cleaned
                segment = batch.segment.id
                table.live[segment] = table.live.get(segment, 0) + cleaned
                table.supersede(old_slots[:cleaned])
            cleaned_in_all += cleaned
        with self._lane:
            table.end_publishing()
        self.release_unneeded(table)
        self.wake_compactor(False)
        return cleaned_in_all

    def release_unneeded(self, table: Table) -> None:
        """Lets go of segments in which this table needs nothing any more."""
        with self._lane:
            released = table.take_retired()
        if released:
            self._release(table, released)


class _Batch:
    """Records of one spill, copied but not yet on disk."""

    def __init__(self, table: Table, buffer: np.ndarray) -> None:
        self.buffer = buffer
        self.capacity = BATCH_BYTES // table.geometry.record_bytes
        self.count = 0  # copied
        self.queued = 0  # clean frames that were found instead
        self.victims = False  # whether the frames may leave the cache once they are clean
        self.geo = table.geo
        self.record_bytes = table.geometry.record_bytes
        self.rows = np.empty(self.capacity, np.int64)
        self.updates = np.empty(self.capacity, np.int64)
        self.old = np.empty(self.capacity, np.int64)
        self.frames = np.empty(self.capacity, np.int64)
        self.slots: Rows
        self.hashes: np.ndarray
        self.checks: np.ndarray
        self.deltas: np.ndarray  # by how much each changes the table's digest
        self.segment: Segment

    def rest(self) -> tuple[np.ndarray, ...]:
        """The unfilled parts of all arrays, in the order of victim_kernels.choose."""
        at = self.count
        return (
            self.buffer[at * self.record_bytes :],
            self.rows[at:],
            self.updates[at:],
            self.old[at:],
            self.frames[at:],
        )

    def withdraw(self, words: Rows) -> None:
        victim_kernels.withdraw_copies(
            self.frames[: self.count], self.updates[: self.count], words, self.geo
        )


class Cleaner:
    """The background thread that spills where clean frames run short."""

    def __init__(
        self,
        lane: Lane,
        cache: Cache,
        spiller: Spiller,
        tables: Callable[[], Iterable[Table]],
        progressed: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._cache = cache
        self._spiller = spiller
        self._tables = tables
        self._progressed = progressed
        self._wake = threading.Event()
        self._said_s = -_SAY_AGAIN_S
        self._stopping = False
        # The last failure, until a spill succeeds: requests that wait for frames raise it.
        self.failure: MomentdError | None = None
        self._thread = threading.Thread(target=self._loop, name="momentd-cleaner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        self._wake.set()

    def _loop(self) -> None:
        while True:
            # A disk that was full is tried again from time to time, waiters or not.
            self._wake.wait(_RETRY_S if self.failure else None)
            self._wake.clear()
            if self._stopping:
                return
            try:
                while not self._stopping and self._clean_once():
                    self._progressed()
            except Exception as error:
                log.exception("cleaning failed")
                self.failure = InternalError(f"writing records to disk failed: {error!r}")
            self._progressed()

    def _clean_once(self) -> bool:
        """One batch for each table that is short; False if there was nothing to do."""
        worked = False
        short_anywhere = False
        for table in list(self._tables()):
            with self._lane:
                leaving = list(table.leaving)
                short = self._cache.short_of_clean(table)
            if not leaving and not short:
                continue
            short_anywhere = True
            try:
                worked = self._empty_slabs(table, leaving) or worked
                if short:
                    worked = self._spiller.spill(table, wanted=short) > 0 or worked
                self.failure = None
            except MomentdError as failure:
                # It is tried all the time, and may succeed for one batch.
                if time.monotonic() > self._said_s + _SAY_AGAIN_S:
                    self._said_s = time.monotonic()
                    log.warning("spill of table %d failed: %s", table.id, failure)
                self.failure = failure
                return False
        if not short_anywhere:
            # The table whose spill failed is gone: nobody waits for that any more.
            self.failure = None
        return worked

    def _empty_slabs(self, table: Table, slabs: list[int]) -> bool:
        """Writes what is dirty in slabs that are to leave a table; whether that helped."""
        worked = False
        for slab in slabs:
            worked = self._spiller.spill(table, slab=slab) > 0 or worked
            with self._lane:
                worked = self._cache.sharing.empty(table, slab) or worked
        return worked
