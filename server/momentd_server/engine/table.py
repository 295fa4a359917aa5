"""One open table: its place in the space, its frames, its segments, its counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from momentd_server.engine.api import Rows, TableStats, TableView
from momentd_server.engine.cuts import Cut, SnapshotCut
from momentd_server.engine.flight import Flight
from momentd_server.engine.gate import Gate
from momentd_server.engine.lane import Lane
from momentd_server.engine.retirement import Retirement
from momentd_server.obs.latency import LatencyWindow, Rate
from momentd_server.storage import frames, victim_kernels
from momentd_server.storage.catalog import Manifest, TableRecord
from momentd_server.storage.format import ENTRY_BYTES
from momentd_server.storage.location import version
from momentd_server.storage.segments import Segment
from momentd_server.storage.space import META_BYTES, Geometry, Space
from momentd_wire.errors import MomentdError

_DIGEST_MASK: Final = (1 << 64) - 1
# Entries of a table's queue of victims; more frames than that are never cleaned ahead.
MAX_VICTIMS: Final = 1 << 20


@dataclass(slots=True)
class Counters:
    """Since the engine started."""

    hits: int = 0
    misses: int = 0
    first_touches: int = 0
    updates: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_compacted: int = 0  # of records that compaction wrote again
    segments_compacted: int = 0
    rows_prefetched: int = 0  # read ahead; not among the misses
    reads_shared: int = 0  # misses that waited for another's read of the row
    rows_updated: Rate = field(default_factory=Rate)
    latency: LatencyWindow = field(default_factory=LatencyWindow)


class Table:
    """Fields without a comment are constant; the others change in the lane, unless said."""

    def __init__(  # noqa: PLR0915
        self, space: Space, record: TableRecord, block: int
    ) -> None:
        self.record = record  # replaced by commits, with the table alone
        self.id = record.id
        self.family = record.family
        self.schema = record.schema
        self.rows = record.schema.rows
        self.generation = record.manifest.generation
        # Without this generation, whose cap moves.
        self.ancestry = tuple(a for a in record.manifest.ancestry if a[0] != self.generation)
        self.geometry = Geometry.of(record.schema.record_bytes)
        self.block_index = block
        self.block = space.tables[block]
        location_at, check_at = int(self.block["location_at"]), int(self.block["check_at"])
        self.location_at = location_at
        # int64: a location's tag is its sign (storage/frames.py).
        self.location: Rows = space.view(location_at, self.rows * 8, "<i8")
        self.check = space.view(check_at, self.rows * 4, "<u4")
        self.geo: Rows = np.array(
            [space.slabs_at, self.geometry.record_bytes, self.geometry.frames,
             self.geometry.records_at], np.int64,
        )  # fmt: skip
        self.initial = record.schema.initial_record

        self.gate = Gate(record.id)
        # Why its records could not be found at the start; it is then never entered.
        self.broken: MomentdError | None = None
        self.openers: set[bytes] = set()  # sessions that opened or made it; ended ones stay
        # One spill batch of a table at a time, in order of arrival: a request that needs one does
        # not wait for all of a snapshot's.
        self.spilling = Lane()
        self.slabs: Rows = np.empty(0, np.int64)
        self.free: Rows = np.empty(0, np.int64)  # a stack of frames; the first `free_top` count
        self.free_top = 0
        self.dirty = 0  # frames whose record is not on disk
        self.hand: Rows = np.zeros(1, np.int64)  # of the clock that chooses victims
        self.victims: Rows = np.empty(1, np.int64)  # a queue of clean frames that may go
        self.tally: Rows = np.zeros(victim_kernels.TALLY_WORDS, np.int64)
        self.demand = 0  # frames that the largest recent request missed, or read-ahead
        self.flights: list[Flight] = []  # whose reads are in work, oldest first
        # Slabs that another table gets once they are free, and how many others promised to this.
        self.leaving: dict[int, Table] = {}
        self.promised = 0
        self.retirement = Retirement()
        self.slabs_offered = 0  # position of the next slab that another table may take
        self.last_used_s = time.monotonic()

        self.open_segment: Segment | None = None  # only the spilling thread changes it
        self.live: dict[int, int] = {}  # segment -> records that a location or backing refers to
        self.segments: dict[int, Segment] = {}
        self.cut = Cut(self.geometry.record_bytes)  # what the committed state needs
        self.kept_cuts: list[Cut] = []  # of snapshots of this table
        self.snapshot: SnapshotCut | None = None  # that is being written
        self._digest: int | None = None  # with the batch that is being published
        self.rows_touched = 0
        self.counters = Counters()

    @property
    def step(self) -> int:
        return int(self.block["step"])

    @property
    def update_number(self) -> int:
        return int(self.block["update_number"])

    @property
    def frames(self) -> int:
        return self.slabs.size * self.geometry.frames

    @property
    def queued(self) -> int:
        """Clean frames that may go at once."""
        return int(self.tally[victim_kernels.QUEUED_FRAMES])

    @property
    def fresh(self) -> int:
        """Frames whose record was read and not used yet."""
        return int(self.tally[frames.FRESH_FRAMES])

    @property
    def in_stock(self) -> int:
        """Frames that a request can have at once."""
        return self.free_top + self.queued

    @property
    def dropped(self) -> bool:
        return int(self.block["id"]) != self.id

    @property
    def staying(self) -> int:
        """Slabs that are not promised to another table."""
        return self.slabs.size - len(self.leaving)

    @property
    def frame_bytes(self) -> int:
        """Bytes that one record takes in the cache."""
        return self.geometry.record_bytes + META_BYTES

    def version(self, update_number: int) -> int:
        return version(self.generation, update_number)

    # ------------------------------------------------------------------------------ slabs

    def add_slab(self, slab: int) -> None:
        """All frames of a cleared slab become free frames of this table."""
        count = self.geometry.frames
        self.slabs = np.append(self.slabs, np.int64(slab))
        if self.free.size < self.frames:
            # Twice what is needed, so that a table that grows does not copy this every time.
            grown = np.empty(2 * self.frames, np.int64)
            grown[: self.free_top] = self.free[: self.free_top]
            self.free = grown
            self._make_room_for_victims()
        # In descending order: the stack then hands frames out in ascending order.
        top = self.free_top
        self.free[top : top + count] = (slab << 16) + np.arange(count)[::-1]
        self.free_top += count

    def _make_room_for_victims(self) -> None:
        size = min(1 << (self.free.size - 1).bit_length(), MAX_VICTIMS)
        if size > self.victims.size:
            larger = np.empty(size, np.int64)
            victim_kernels.move_queue(self.victims, self.tally, -1, larger)
            self.victims = larger

    def remove_slab(self, slab: int) -> None:
        """The slab's frames are free and not on the free list any more."""
        self.slabs = self.slabs[self.slabs != slab]
        victims = np.empty_like(self.victims)
        victim_kernels.move_queue(self.victims, self.tally, slab, victims)
        self.victims = victims
        self.hand[0] = 0

    def evict(self, want: int, words: Rows) -> None:
        """In the lane: frames of victims join the free ones, up to `want`."""
        out = self.free[self.free_top :]
        self.free_top += victim_kernels.evict(
            self.victims, self.tally, min(want, out.size), self.location, words, self.geo, out
        )

    def used(self, rows: int, dirty: int, fresh: int, queued: int) -> None:
        """In the lane: so many rows were changed; of them were dirty, fresh, queued before."""
        self.dirty += rows - dirty
        self.tally[frames.FRESH_FRAMES] -= fresh
        self.tally[victim_kernels.QUEUED_FRAMES] -= queued

    def give_up_slabs(self) -> list[int]:
        """All slabs, of a table that is dropped."""
        slabs = self.slabs.tolist()
        self.slabs = np.empty(0, np.int64)
        self.free_top = 0
        self.dirty = 0
        self.tally[:] = 0
        for taker in self.leaving.values():
            taker.promised -= 1
        self.leaving.clear()
        return slabs

    # ------------------------------------------------------------------------------ segments

    def supersede(self, slots: Rows) -> None:
        """In the lane: nothing of this table refers to these slots any more; other words are 0."""
        lowest, highest = frames.segment_range(slots)
        if lowest > highest:
            return
        counts = np.zeros(highest - lowest + 1, np.int64)
        frames.count_segments(slots, lowest, counts)
        for k in np.flatnonzero(counts):
            segment = int(lowest + k)
            self.live[segment] = self.live.get(segment, 0) - int(counts[k])
        self.cut.superseded(slots)
        for cut in self.kept_cuts:
            cut.superseded(slots)

    @property
    def digest(self) -> int | None:
        """Sum of the hashes of all records as written last, modulo 2**64; None: not known.

        What is in memory only counts once it is written.
        """
        return None if int(self.block["digest_torn"]) else int(self.block["digest"])

    @digest.setter
    def digest(self, digest: int) -> None:
        self.block["digest"] = digest
        self.block["digest_torn"] = 0

    def begin_publishing(self, delta: int) -> None:
        """In the lane: a batch is written, its frames follow."""
        digest = self.digest
        self.block["digest_torn"] = 1
        if digest is not None:
            self._digest = (digest + delta) & _DIGEST_MASK
        else:
            self._digest = None

    def end_publishing(self) -> None:
        """In the lane: all frames of the batch know of it."""
        if self._digest is not None:
            self.digest = self._digest

    def take_retired(self) -> list[int]:
        """In the lane: segments that this table let go of, and that no read in flight may use."""
        for segment in list(self.segments.values()):
            if not (segment.writable or self.live.get(segment.id, 0) or segment.id in self.cut):
                del self.segments[segment.id]
                self.live.pop(segment.id, None)
                self.retirement.add(segment.id)
        return self.retirement.take()

    def needed_records(self, segment: int) -> int:
        """Records of a segment that this table or its committed state needs."""
        return self.live.get(segment, 0) + self.cut.only_here(segment)

    def needed_bytes(self) -> int:
        """Bytes on disk of the records that this table or its committed state needs."""
        records = sum(list(self.live.values())) + int(self.cut.only.sum())
        return records * (self.geometry.record_bytes + ENTRY_BYTES)

    def manifest(self, *, durable: bool = False) -> Manifest:
        """What is on disk, as of now: complete only if no frame is dirty.

        durable: counts of each file what is synced. Another table may be writing to it.
        """
        segments = tuple(
            (segment.id, segment.durable if durable else segment.fill)
            for segment in sorted(self.segments.values(), key=lambda s: s.id)
            if self.live.get(segment.id, 0)
        )
        ancestry = (*self.ancestry, (self.generation, self.update_number))
        return Manifest(self.generation, self.step, self.update_number, segments, ancestry)

    # ------------------------------------------------------------------------------ views

    def view(self, request_record_bytes: int) -> TableView:
        record = self.record
        return TableView(
            id=self.id,
            generation=self.generation,
            name=record.name,
            label=record.label,
            run=record.run,
            schema=self.schema,
            record_bytes=self.geometry.record_bytes,
            step=self.step,
            update_number=self.update_number,
            request_rows=request_record_bytes // self.frame_bytes,
            created_s=record.created_s,
            owner=record.owner,
        )

    def stats(self, request_record_bytes: int) -> TableStats:
        counters = self.counters
        segments = list(self.segments.values())
        return TableStats(
            table=self.view(request_record_bytes),
            rows_touched=self.rows_touched,
            frames=self.frames,
            frames_dirty=self.dirty,
            segments=len(segments),
            disk_bytes=sum(segment.reserved for segment in segments),
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            hits=counters.hits,
            misses=counters.misses,
            first_touches=counters.first_touches,
            updates=counters.updates,
            rows_updated=counters.rows_updated.total,
            rows_per_s=counters.rows_updated.per_second(),
            update_latency=counters.latency.summary(),
            broken=self.broken is not None,
            needed_bytes=self.needed_bytes(),
            bytes_compacted=counters.bytes_compacted,
            segments_compacted=counters.segments_compacted,
            rows_prefetched=counters.rows_prefetched,
            reads_shared=counters.reads_shared,
        )
