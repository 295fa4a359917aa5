"""Compaction: what is still needed of a segment is written again, and the file is given back.

Of the ended segments the one with the smallest needed share comes first, as soon as a family takes
more than `ratio` times the bytes that its tables need. Records go to the family's output segment in
batches of a few MiB: found by jobs of the lane, read, checked and written outside it, and then
whatever referred to the old slot refers to the new one, if it still did. Nothing is lost at any
moment: the old records stay until nothing refers to them, no committed state lists their segment,
and no read that may use them is in flight.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd_server.engine.cuts import Cut
from momentd_server.engine.flight import read_error
from momentd_server.engine.lane import Lane
from momentd_server.engine.lifecycle import Tables
from momentd_server.engine.spill import BATCH_BYTES
from momentd_server.engine.table import Table
from momentd_server.storage import compaction_kernels as kernels
from momentd_server.storage import files, hashing, location
from momentd_server.storage.diskio import READ_MISMATCH, READ_OK, ReadPool, aligned_buffer
from momentd_server.storage.format import ENTRY_BYTES
from momentd_server.storage.segments import (
    LEAST_SEGMENT_BYTES,
    Segment,
    SegmentStore,
    Trailer,
    fitting_bytes,
)
from momentd_server.storage.space import Space
from momentd_wire.errors import InternalError, MomentdError, OutOfSpace, StorageFailed

log = logging.getLogger("momentd.compaction")

# What a family may take beyond its share: else small tables would be compacted all the time.
_SLACK_BYTES: Final = 2 * LEAST_SEGMENT_BYTES
# Shares of needed bytes above which a segment is left alone.
_MOST_SHARE: Final = 0.75
_MOST_SHARE_URGENT: Final = 0.9
# As far above the ratio as this there are no pauses.
_LARGE_DEBT: Final = 0.5
_MOST_PAUSE_S: Final = 0.2
_JOB_ROWS: Final = 8192
# More reads at once would keep those of requests waiting.
_READERS: Final = 4
_PASSES: Final = 3
_RETRY_S: Final = 1.0
_LEAST_INTERVAL_S: Final = 0.05
_USER: Final = 0  # of output segments; no table has this id


@dataclass(slots=True)
class _Family:
    """Tables that share segments, and what these take."""

    id: int
    tables: list[Table]
    segments: dict[int, Segment]
    needed: dict[int, int]  # segment -> bytes of records that some table needs, at most

    @property
    def disk_bytes(self) -> int:
        return sum(segment.fill for segment in self.segments.values())

    @property
    def needed_bytes(self) -> int:
        return sum(self.needed.values())

    def share(self, segment: int) -> float:
        return self.needed[segment] / self.segments[segment].fill


class _Job:
    """One segment that is being compacted."""

    def __init__(self, segment: Segment, fd: int, trailers: list[Trailer]) -> None:
        self.segment = segment
        self.fd = fd
        self.trailers = trailers
        self.buffer = aligned_buffer(BATCH_BYTES)
        self.capacity = BATCH_BYTES // segment.record_bytes


class _Batch:
    """Needed records of a segment, read; the lists hold one array for each trailer."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[np.ndarray] = []
        self.versions: list[np.ndarray] = []
        self.hashes: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []


class _Unreadable(Exception):
    """A segment has a record that cannot be read: it is the segment's fault, not the output's."""

    def __init__(self, error: MomentdError) -> None:
        super().__init__(error)
        self.error = error


class Compactor:
    """The background thread that compacts. `run_once` may also be called by hand."""

    def __init__(
        self, space: Space, lane: Lane, store: SegmentStore, tables: Tables, ratio: float,
        made_room: Callable[[], None],
    ) -> None:  # fmt: skip
        self._words = space.words.view(np.int64)
        self._lane = lane
        self._store = store
        self._tables = tables
        self._ratio = ratio
        self._made_room = made_room
        # Of the snapshots, which are made later: finds out which records a family's cuts have;
        # whether one was not known.
        self.find_out: Callable[[int], bool] = lambda _family: False
        self._readers = ReadPool(_READERS)
        self._outputs: dict[int, Segment] = {}  # of each family the one that is written to
        self._left_alone: set[int] = set()  # segments with unreadable records
        self._behind = False  # no pauses
        self._full = False  # somebody had no space for a batch
        self._running = threading.Lock()  # one segment at a time
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="momentd-compactor", daemon=True)

    # ------------------------------------------------------------------------------ life

    def start(self) -> None:
        self._wake.set()  # what the last run left may be worth it
        self._thread.start()

    def stop(self) -> None:
        """Ends within one batch; what is half done is done again by the next start."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        # From here on it works only where `make_room` asks for it.
        self._stop.clear()

    def make_room(self) -> bool:
        """Compact one segment because somebody has no space; whether to try again."""
        self._full = True
        held_back = self._tables.spiller.floor_bytes > 0
        with contextlib.suppress(OutOfSpace, StorageFailed):
            if self.run_once():
                return True
        # Nothing can be gained: then all there is may be taken.
        self._tables.spiller.floor_bytes = 0
        return held_back

    def close(self) -> None:
        """After `stop`."""
        self._readers.close()

    def wake(self, full: bool = False) -> None:
        """Records were written; full: or there was no space for them."""
        self._full = self._full or full
        self._wake.set()

    def _loop(self) -> None:
        waits_s: float | None = None
        said = ""
        while not self._stop.is_set():
            self._wake.wait(waits_s)
            self._wake.clear()
            waits_s = None
            try:
                while not self._stop.is_set() and self.run_once():
                    pass
                if any(table.retirement for table in self._tables.all()):
                    waits_s = _RETRY_S
            except MomentdError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("compaction has to wait: %s", error)
                waits_s = _RETRY_S
            except Exception:
                log.exception("compaction failed; it is tried again")
                waits_s = _RETRY_S
            self._stop.wait(_LEAST_INTERVAL_S)

    # ------------------------------------------------------------------------------ choosing

    def run_once(self) -> bool:
        """Compact one segment, if one is worth it; False if none is.

        Raises OutOfSpace and StorageFailed; nothing is lost then, and it can be tried again.
        """
        with self._running:
            for table in self._tables.all():
                if table.retirement:
                    self._tables.spiller.release_unneeded(table)
            chosen = self._choose()
            if chosen is None:
                return False
            family, segment = chosen
            log.debug(
                "compacting segment %d of family %d: %.0f %% of it are needed",
                segment.id, family.id, 100 * family.share(segment.id),
            )  # fmt: skip
            try:
                self._compact(segment)
            except OutOfSpace:
                self._full = True
                raise
            if self._full or self._tables.spiller.floor_bytes:
                self._full = False
                self._made_room()
            return True

    def _choose(self) -> tuple[_Family, Segment] | None:
        families = list(self._families())
        self._let_go_of_outputs({family.id for family in families})
        free_bytes = self._store.datadir.free_bytes()
        largest = max((fitting_bytes(f.needed_bytes) for f in families), default=0)
        if self._full or free_bytes < 2 * largest:
            return self._choose_urgently(families)
        self._tables.spiller.floor_bytes = 0
        for family in families:
            limit = self._ratio * family.needed_bytes + _SLACK_BYTES
            if family.disk_bytes <= limit:
                continue
            if self.find_out(family.id):
                return self._choose()  # more is known than before
            self._behind = family.disk_bytes > limit + _LARGE_DEBT * family.needed_bytes
            shares = {s: family.share(s) for s in self._candidates(family)}
            best = min(shares, key=lambda s: shares[s], default=None)
            if best is not None and shares[best] < _MOST_SHARE:
                return family, family.segments[best]
        return None

    def _choose_urgently(self, families: Sequence[_Family]) -> tuple[_Family, Segment] | None:
        """The disk is nearly full: what takes the least space to make some."""
        self._behind = True
        sizes = {
            (family.needed[s], s): family
            for family in families
            for s in self._candidates(family)
            if family.share(s) < _MOST_SHARE_URGENT
        }
        if not sizes:
            # Nothing can be gained: all the space there is may be filled.
            self._full = False
            self._tables.spiller.floor_bytes = 0
            return None
        needed, segment = min(sizes)
        self._tables.spiller.floor_bytes = needed + BATCH_BYTES
        return sizes[needed, segment], sizes[needed, segment].segments[segment]

    def _families(self) -> Iterator[_Family]:
        for family_id, tables in self._tables.by_family().items():
            if any(table.broken is not None for table in tables):
                continue  # its files stay as they are
            segments = {s.id: s for table in tables for s in list(table.segments.values())}
            entry_bytes = tables[0].geometry.record_bytes + ENTRY_BYTES
            kept = [each.cut for each in self._tables.kept.get(family_id, ())]
            listed = [s for cut in kept for s in cut.segments.tolist()]
            # A damaged file of a snapshot is not known.
            segments |= {s: self._store.get(s) for s in listed if self._store.knows(s)}
            needed = {
                s: min(self._needed_records(s, tables, kept) * entry_bytes, segments[s].fill)
                for s in segments
            }
            yield _Family(family_id, tables, segments, needed)

    @staticmethod
    def _needed_records(segment: int, tables: Sequence[Table], kept: Sequence[Cut]) -> int:
        records = sum(table.needed_records(segment) for table in tables)
        return records + sum(cut.only_here(segment) for cut in kept)

    def _candidates(self, family: _Family) -> list[int]:
        return [
            s.id
            for s in family.segments.values()
            if not s.writable
            and s.id not in self._left_alone
            and not any(cut.is_unknown and s.id in cut for cut in self._cuts(family))
        ]

    def _cuts(self, family: _Family) -> list[Cut]:
        kept = [each.cut for each in self._tables.kept.get(family.id, ())]
        return [*(table.cut for table in family.tables), *kept]

    # ------------------------------------------------------------------------------ one segment

    def _compact(self, segment: Segment) -> None:
        with contextlib.ExitStack() as stack:
            try:
                pins = stack.enter_context(self._store.pin(np.array([segment.id], np.int64)))
                trailers = list(self._store.read_trailers(segment))
            except (InternalError, StorageFailed) as error:
                # Otherwise it was given back meanwhile, and its file is not there any more.
                if self._store.knows(segment.id):
                    self._leave_alone(segment, error)
                return
            # They are read through the page cache.
            files.drop_cached(self._store.path(segment))
            try:
                self._move_all(_Job(segment, int(pins.fds[0]), trailers))
            except _Unreadable as unreadable:
                self._leave_alone(segment, unreadable.error)

    def _leave_alone(self, segment: Segment, error: MomentdError) -> None:
        self._left_alone.add(segment.id)
        log.error(
            "segment %d of family %d stays as it is until the next start: %s",
            segment.id, segment.family, error,
        )  # fmt: skip

    def _move_all(self, job: _Job) -> None:
        for _ in range(_PASSES):
            at = 0
            while at < len(job.trailers):
                if self._stop.is_set():
                    return
                began = time.monotonic()
                with self._tables.moving:
                    at = self._move_some(job, at)
                if not self._behind:
                    self._stop.wait(min(time.monotonic() - began, _MOST_PAUSE_S))
            with self._tables.moving:
                if self._finish(job.segment):
                    return
        self._left_alone.add(job.segment.id)
        log.warning("segment %d is still referred to after %d passes", job.segment.id, _PASSES)

    def _move_some(self, job: _Job, at: int) -> int:
        """One batch, under `moving`; returns the position of the next trailer."""
        tables = self._tables.family(job.segment.family)
        batch = _Batch()
        while at < len(job.trailers):
            trailer = job.trailers[at]
            which = np.flatnonzero(self._find(tables, job.segment, trailer))
            if batch.count + which.size > job.capacity:
                if not batch.count:
                    # Written with larger batches than ours: the rest is found again.
                    self._read(tables, job, batch, trailer, which[: job.capacity])
                break
            if which.size:
                self._read(tables, job, batch, trailer, which)
            at += 1
        if batch.count:
            self._write(tables, job, batch)
        return at

    def _find(self, tables: Sequence[Table], segment: Segment, trailer: Trailer) -> np.ndarray:
        """Which records of a batch are needed: bool[n]."""
        count, first = trailer.rows.size, location.slot(segment.id, trailer.first_offset)
        slots = np.int64(first) + np.arange(count, dtype=np.int64) * segment.record_bytes
        needed = np.zeros(count, np.bool_)
        unbacked = np.zeros(count, np.bool_)
        for each in self._tables.kept.get(segment.family, ()):
            each.cut.mark(segment.id, first, needed)
        for table in tables:
            table.cut.mark(segment.id, first, needed)
            for start in range(0, count, _JOB_ROWS):
                part = slice(start, start + _JOB_ROWS)
                with self._lane:
                    if kernels.find(
                        trailer.rows[part], int(slots[start]), table.location, self._words,
                        table.geo, needed[part], unbacked[part],
                    ):  # fmt: skip
                        table.supersede(slots[part][unbacked[part]])
        return needed

    def _read(
        self, tables: Sequence[Table], job: _Job, batch: _Batch, trailer: Trailer, which: np.ndarray
    ) -> None:
        """Reads these records behind those of the batch, and checks them against their trailer."""
        segment, table = job.segment, tables[0]
        nbytes = segment.record_bytes
        rows, hashes = trailer.rows[which], trailer.hashes[which]
        offsets = trailer.first_offset + which * nbytes
        checks = np.empty(which.size, np.uint32)
        hashing.fold_checks(hashes, segment.family, checks)
        found = np.empty(which.size, np.uint64)
        places = (batch.count + np.arange(which.size, dtype=np.int64)) * nbytes
        status = self._readers.read(
            np.full(which.size, job.fd), offsets, nbytes, rows, checks, segment.family,
            table.initial, job.buffer, places, found,
        )  # fmt: skip
        status[(status == READ_OK) & (found != hashes)] = READ_MISMATCH
        bad = np.flatnonzero(status != READ_OK)
        if bad.size:
            row, found_status = int(rows[bad[0]]), int(status[bad[0]])
            raise _Unreadable(read_error(table, row, segment.id, found_status))
        batch.rows.append(rows)
        batch.versions.append(trailer.versions[which])
        batch.hashes.append(hashes)
        batch.slots.append(location.slot(segment.id, 0) + offsets)
        batch.count += which.size

    # ------------------------------------------------------------------------------ output

    def _write(self, tables: Sequence[Table], job: _Job, batch: _Batch) -> None:
        source, count = job.segment, batch.count
        rows, old = np.concatenate(batch.rows), np.concatenate(batch.slots)
        versions, hashes = np.concatenate(batch.versions), np.concatenate(batch.hashes)
        nbytes = source.record_bytes
        target = self._output_for(source, count)
        records = job.buffer[: count * nbytes]
        first = self._store.append(target, records, rows, versions, hashes, 0)
        new = np.int64(location.slot(target.id, first)) + np.arange(count, dtype=np.int64) * nbytes
        for table in tables:
            self._tables.use(table.id, [target.id])
            for start in range(0, count, _JOB_ROWS):
                part = slice(start, start + _JOB_ROWS)
                with self._lane:
                    self._publish(table, source, target, rows[part], old[part], new[part])
        self._copy_kept(tables, source, target, old, new)
        tables[0].counters.bytes_compacted += count * nbytes

    def _copy_kept(
        self, tables: Sequence[Table], source: Segment, target: Segment, old: np.ndarray,
        new: np.ndarray,
    ) -> None:  # fmt: skip
        """Cuts of snapshots whose tables are gone. Those of the others follow their table."""
        followed = {id(cut) for table in tables for cut in table.kept_cuts}
        for each in self._tables.kept.get(source.family, ()):
            if id(each.cut) not in followed:
                with self._lane:
                    moved = np.zeros(old.size, np.bool_)
                    each.cut.copied(old, new, moved, source.id, target.id)
            if target.id in each.cut:
                self._tables.use(each.user, [target.id])

    def _publish(
        self, table: Table, source: Segment, target: Segment, rows: np.ndarray, old: np.ndarray,
        new: np.ndarray,
    ) -> None:  # fmt: skip
        """In the lane."""
        moved, unbacked = np.empty(rows.size, np.bool_), np.empty(rows.size, np.bool_)
        n_moved, n_unbacked = kernels.move(
            rows, old, new, table.location, self._words, table.geo, moved, unbacked
        )
        table.segments[target.id] = target
        table.live[target.id] = table.live.get(target.id, 0) + n_moved
        table.live[source.id] = table.live.get(source.id, 0) - n_moved
        if n_unbacked:
            table.supersede(old[unbacked])
        for cut in (table.cut, *table.kept_cuts):
            cut.copied(old, new, moved, source.id, target.id)

    def _output_for(self, source: Segment, count: int) -> Segment:
        output = self._outputs.get(source.family)
        if output is not None and (
            not output.has_room(count) or output.fill >= self._fitting_bytes(source.family)
        ):
            self._end_output(source.family)
            output = None
        if output is None:
            output = self._store.create(source.family, source.layout, source.record_bytes)
            self._tables.use(_USER, [output.id])
            self._outputs[source.family] = output
        return output

    def _fitting_bytes(self, family: int) -> int:
        return fitting_bytes(sum(t.needed_bytes() for t in self._tables.family(family)))

    def _end_output(self, family: int) -> None:
        output = self._outputs.pop(family)
        self._store.seal(output)
        self._tables.release(_USER, [output.id])

    def _let_go_of_outputs(self, families: set[int]) -> None:
        """Those of families that are gone."""
        for family in set(self._outputs) - families:
            self._end_output(family)

    # ------------------------------------------------------------------------------ the end of one

    def _finish(self, segment: Segment) -> bool:
        """Under `moving`: let go of a segment, if nothing in it is needed any more."""
        family = self._tables.family(segment.family)
        tables = [table for table in family if segment.id in table.segments]
        if any(t.live.get(segment.id, 0) or not t.cut.is_copied(segment.id) for t in tables):
            return False
        kept = [k for k in self._tables.kept.get(segment.family, ()) if segment.id in k.cut]
        if not all(each.cut.is_copied(segment.id) for each in kept):
            return False
        holders = [table for table in tables if segment.id in table.cut]
        if holders or kept:
            self._tables.commit_without(segment.id, holders, kept)
        for table in tables:
            self._tables.spiller.release_unneeded(table)
        for table in family[:1]:
            table.counters.segments_compacted += 1
        return True
