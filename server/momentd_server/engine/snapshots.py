"""Snapshots: durable, consistent cuts of tables, written while updates go on.

A cut is one store in the lane, for all tables of the snapshot. What the cut has on disk is marked
then, in short jobs, while nothing is spilled or compacted; what it has only in memory is *pending*:
written in the background, or first, on demand, by the update that is about to change it. Files are
synced, then directories, then one transaction of the catalog makes the snapshot exist. So it writes
what changed since the last one, no second copy of anything exists, and a step waits for its own
records at most.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd_server.engine.cuts import Cut, KeptCut, SnapshotCut
from momentd_server.engine.lane import Lane
from momentd_server.engine.lifecycle import Tables
from momentd_server.engine.sessions import Session, Ticket
from momentd_server.engine.table import Table
from momentd_server.obs import machine
from momentd_server.storage import location, recovery
from momentd_server.storage import snapshot_kernels as kernels
from momentd_server.storage.catalog import (
    Catalog,
    DropSnapshot,
    Manifest,
    Put,
    SnapshotRecord,
    TableSnapshot,
)
from momentd_server.storage.format import ENTRY_BYTES
from momentd_server.storage.records import content_id
from momentd_server.storage.segments import LEAST_SEGMENT_BYTES, SegmentStore
from momentd_server.storage.space import ROW_BYTES, Space
from momentd_wire.errors import (
    InvalidArgument,
    MomentdError,
    OutOfMemory,
    OutOfSpace,
    SnapshotNotFound,
    TableInUse,
)
from momentd_wire.units import format_bytes

log = logging.getLogger("momentd.snapshots")

MAX_NAME: Final = 100
_MARK_ROWS: Final = 1 << 17
_LARGEST_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot, and what it takes on disk."""

    record: SnapshotRecord
    nbytes: int  # of its records
    only_bytes: int  # of them what nothing else needs


class Snapshots:
    """Thread-safe; one is written at a time."""

    def __init__(
        self, space: Space, lane: Lane, tables: Tables, catalog: Catalog, store: SegmentStore
    ) -> None:
        self._words = space.words.view(np.int64)
        self._lane = lane
        self._tables = tables
        self._catalog = catalog
        self._store = store
        self._writing = threading.Lock()
        self._users = itertools.count(-1, -1)

    # ------------------------------------------------------------------------------ start

    def recover(self) -> None:
        """At a start, before files that nobody lists are given back.

        Which records a snapshot has is found out when compaction wants to know.
        """
        for record in self._catalog.snapshots():
            for position, entry in enumerate(record.tables):
                for segment, counted in entry.manifest.segments:
                    # A damaged file is an error of the restore that needs it.
                    with contextlib.suppress(MomentdError):
                        self._store.open_existing(entry.family, segment, counted)
                segments = [segment for segment, _ in entry.manifest.segments]
                self._keep(record, position, Cut.unknown(entry.schema.record_bytes, segments), None)

    def _keep(self, record: SnapshotRecord, position: int, cut: Cut, table: Table | None) -> None:
        entry = record.tables[position]
        kept = KeptCut(record.name, position, next(self._users), cut)
        self._tables.kept.setdefault(entry.family, []).append(kept)
        self._tables.use(kept.user, cut.segments.tolist())
        if table is not None:
            # Its own files have no other user as long as nobody shares them.
            self._tables.use(table.id, cut.segments.tolist())
            table.kept_cuts.append(cut)

    # ------------------------------------------------------------------------------ reading

    def all(self, run: str | None = None) -> list[SnapshotView]:
        return [self._view(r) for r in self._catalog.snapshots() if run is None or r.run == run]

    def get(self, name: str) -> SnapshotView:
        for record in self._catalog.snapshots():
            if record.name == name:
                return self._view(record)
        raise SnapshotNotFound(
            f"there is no snapshot named {name!r} here: `momentd snapshot list` shows what there "
            "is, `momentd import` brings one from another machine",
            name=name,
        )

    def find(self, snapshot_id: bytes) -> tuple[SnapshotView, TableSnapshot]:
        """The newest snapshot with a table of this content."""
        for record in reversed(self._catalog.snapshots()):
            for entry in record.tables:
                if entry.id == snapshot_id:
                    return self._view(record), entry
        raise SnapshotNotFound(
            f"snapshot {snapshot_id.hex()} is not in this data directory "
            f"({self._store.datadir.path}): it was deleted, or made on another machine; bring it "
            "with `momentd import FILE`",
            snapshot=snapshot_id.hex(),
        )

    def _view(self, record: SnapshotRecord) -> SnapshotView:
        nbytes = only = 0
        for kept in self._kept_of(record.name):
            entry_bytes = record.tables[kept.position].schema.record_bytes + ENTRY_BYTES
            nbytes += record.tables[kept.position].rows_touched * entry_bytes
            only += int(kept.cut.only.sum()) * entry_bytes
        return SnapshotView(record, nbytes, only)

    def _kept_of(self, name: str) -> list[KeptCut]:
        lists = list(self._tables.kept.values())
        return [kept for each in lists for kept in list(each) if kept.snapshot == name]

    # ------------------------------------------------------------------------------ making

    def create(
        self, tables: Sequence[Table], run: str, name: str | None, *, pinned: bool
    ) -> tuple[SnapshotView, bool, int]:
        """A cut of these tables, which the caller has entered: (it, whether it is new, bytes).

        If nothing has changed since another one of the same tables, that one is returned. Durable
        on return. Raises OutOfSpace and StorageFailed with nothing changed.
        """
        _check_name(name)
        with self._writing:
            self._store.failure.refuse()
            known = self._unchanged(tables, name)
            if known is not None:
                return self._view(self._pin(known) if pinned else known), False, 0
            if name is not None and any(r.name == name for r in self._catalog.snapshots()):
                raise TableInUse(f"a snapshot named {name!r} exists already", name=name)
            self._check_reserve()
            cuts = self._cut(tables)
            try:
                for table, cut in zip(tables, cuts, strict=True):
                    self._write(table, cut)
                record = self._commit(tables, cuts, run, name or self._name(run), pinned=pinned)
            finally:
                with self._lane:
                    for table in tables:
                        table.snapshot = None
        written = sum(
            cut.records_written * (table.geometry.record_bytes + ENTRY_BYTES)
            for table, cut in zip(tables, cuts, strict=True)
        )
        for table in tables:
            self._tables.spiller.release_unneeded(table)
        return self._view(record), True, written

    def _unchanged(self, tables: Sequence[Table], name: str | None) -> SnapshotRecord | None:
        """One with the same content: of the same tables since, or of what they were restored of."""
        now = {(t.id, t.generation, t.update_number, t.step) for t in tables}
        with self._lane:
            # Without changed frames the sum over what was written is that of the content.
            ids = [
                content_id(table.schema, table.step, table.digest)
                for table in tables
                if not table.dirty and table.digest is not None
            ]
        for record in reversed(self._catalog.snapshots()):
            then = {
                (e.table, e.manifest.generation, e.manifest.update_number, e.manifest.step)
                for e in record.tables
            }
            same = now == then or [entry.id for entry in record.tables] == ids
            if same and name in (None, record.name):
                return record
        return None

    def _pin(self, record: SnapshotRecord) -> SnapshotRecord:
        """It was handed out: from now on it does not go by itself."""
        if record.pinned:
            return record
        pinned = SnapshotRecord(record.name, record.run, record.created_s, True, record.tables)
        with self._tables.moving:
            self._catalog.commit([Put(pinned)])
        return pinned

    def _name(self, run: str) -> str:
        names = {record.name for record in self._catalog.snapshots()}
        short = "".join(c if c.isalnum() or c in "-_." else "-" for c in run)[: MAX_NAME - 16]
        stem = f"{short or 'run'}-{time.strftime('%m%d-%H%M%S')}"
        return stem if stem not in names else f"{stem}-{secrets.token_hex(2)}"

    def _check_reserve(self) -> None:
        """Live tables must still be able to write all their records once more.

        What the snapshot has cannot be given back any more.
        """
        needed = 2 * LEAST_SEGMENT_BYTES + sum(
            table.rows_touched * (table.geometry.record_bytes + ENTRY_BYTES)
            for table in self._tables.all()
        )
        free = self._store.datadir.free_bytes()
        if free >= needed:
            return
        runs: dict[str, int] = {}
        for view in self.all():
            runs[view.record.run] = runs.get(view.record.run, 0) + view.nbytes
        largest = sorted(runs.items(), key=lambda item: -item[1])[:_LARGEST_RUNS]
        listed = ", ".join(f"{run!r} {format_bytes(nbytes)}" for run, nbytes in largest) or "none"
        raise OutOfSpace(
            f"no snapshot is made: {format_bytes(free)} are free in {self._store.datadir.path}, "
            f"and the tables may need {format_bytes(needed)} to go on beside it. Training goes on. "
            f"Snapshots take most in the runs {listed}: `momentd snapshot prune` or `delete`, or "
            "free space otherwise",
            free_bytes=free, needed_bytes=needed,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ the cut

    def _cut(self, tables: Sequence[Table]) -> list[SnapshotCut]:
        """From here on the cut is fixed, and `Table.snapshot` says so."""
        for table in tables:
            if table.digest is None:
                self._find_digest(table)
        with self._still(tables):
            with self._lane:
                for table in tables:
                    cut = Cut(table.geometry.record_bytes, [s for s, n in table.live.items() if n])
                    assert table.digest is not None
                    table.snapshot = SnapshotCut(table.update_number, table.step, table.digest, cut)
                cuts = [table.snapshot for table in tables if table.snapshot is not None]
            try:
                for table, cut in zip(tables, cuts, strict=True):
                    self._each_part(
                        table,
                        lambda start, stop, table=table, cut=cut: kernels.mark_cut(
                            start, stop, table.location, self._words, table.geo,
                            cut.cut.segments, cut.cut.bits, cut.number,
                        ),
                    )  # fmt: skip
            except BaseException:
                with self._lane:
                    for table in tables:
                        table.snapshot = None
                raise
        return cuts

    @contextlib.contextmanager
    def _still(self, tables: Sequence[Table]) -> Generator[None]:
        """No record of these tables changes its place on disk meanwhile; updates go on."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._tables.moving)
            for table in tables:
                stack.enter_context(table.spilling)
            yield

    def _each_part(self, table: Table, job: Callable[[int, int], object]) -> None:
        """Jobs of the lane of about a millisecond each."""
        for start in range(0, table.rows, _MARK_ROWS):
            with self._lane:
                job(start, min(start + _MARK_ROWS, table.rows))

    def _find_digest(self, table: Table) -> None:
        """The sum of the hashes of what was written last of each row, from the trailers.

        Only where an engine has died while it published a batch; everybody waits meanwhile.
        """
        with self._still([table]), self._lane:
            total = int(kernels.sum_changed(table.slabs, self._words, table.geo))
            for segment in list(table.segments.values()):
                for trailer in self._store.read_trailers(segment):
                    first = np.int64(location.slot(segment.id, trailer.first_offset))
                    total += int(
                        kernels.sum_hashes(
                            trailer.rows, trailer.hashes, first, table.location, self._words,
                            table.geo,
                        )
                    )  # fmt: skip
            table.digest = total & (1 << 64) - 1

    def _write(self, table: Table, cut: SnapshotCut) -> None:
        """All that the cut lacks."""
        hand = np.zeros(1, np.int64)
        while self._tables.spiller.spill_cut(table, cut, hand):
            _check(cut)
        with table.spilling:
            _check(cut)

    def _commit(
        self, tables: Sequence[Table], cuts: Sequence[SnapshotCut], run: str, name: str, *,
        pinned: bool,
    ) -> SnapshotRecord:  # fmt: skip
        with self._still(tables):
            for cut in cuts:
                _check(cut)
            final = [cut.cut.without_empty() for cut in cuts]
            for table, cut in zip(tables, final, strict=True):
                self._count_only(table, cut)
            segments = [[self._store.get(s) for s in cut.segments.tolist()] for cut in final]
            self._store.sync(segment for each in segments for segment in each)
            entries = tuple(
                _entry(table, cut, [(s.id, s.durable) for s in listed], records=each.records())
                for table, cut, each, listed in zip(tables, cuts, final, segments, strict=True)
            )
            record = SnapshotRecord(name, run, time.time(), pinned, entries)
            self._catalog.commit([Put(record)])
            for position, (table, cut) in enumerate(zip(tables, final, strict=True)):
                self._keep(record, position, cut, table)
        return record

    def _count_only(self, table: Table, cut: Cut) -> None:
        shared = np.zeros(cut.segments.size, np.int64)
        self._each_part(
            table,
            lambda start, stop: kernels.count_shared(
                start, stop, table.location, self._words, table.geo, cut.segments, cut.bits, shared
            ),
        )
        cut.only = cut.records() - shared

    # ------------------------------------------------------------------------------ deleting

    def delete(self, names: Sequence[str], ticket: Ticket | None = None) -> int:
        """All of these or none; returns the bytes that nothing else needed."""
        with self._writing:
            if ticket is not None and ticket.repeated:
                known = {record.name for record in self._catalog.snapshots()}
                names = [name for name in names if name in known]
            views = [self.get(name) for name in dict.fromkeys(names)]
            with self._tables.moving:
                self._catalog.commit([DropSnapshot(view.record.name) for view in views])
                gone = [k for view in views for k in self._kept_of(view.record.name)]
                for family, kept in list(self._tables.kept.items()):
                    self._tables.kept[family] = [k for k in kept if k not in gone]
                with self._lane:
                    for table in self._tables.all():
                        table.kept_cuts = [
                            c for c in table.kept_cuts if not any(c is k.cut for k in gone)
                        ]
                for kept in gone:
                    self._tables.release(kept.user, kept.cut.segments.tolist())
        self._tables.spiller.wake_compactor(False)
        return sum(view.only_bytes for view in views)

    # ------------------------------------------------------------------------------ restoring

    def restore(
        self, session: Session, snapshot_id: bytes, *, name: str | None, label: str | None,
        run: str, replace: bool, ticket: Ticket | None = None,
    ) -> Table:  # fmt: skip
        """A new table with that content, of the session or named."""
        with self._writing:  # so that it is not deleted meanwhile
            _, entry = self.find(snapshot_id)
            return self._tables.restore(
                session, entry, name, entry.label if label is None else label, run,
                replace_named=replace, ticket=ticket,
            )  # fmt: skip

    # ------------------------------------------------------------------------------ cuts again

    def find_out(self, family: int) -> bool:
        """Find out which records the cuts of a family have; whether one was not known.

        Called by compaction, which alone changes the files of snapshots, and not in the lane.
        """
        for kept in list(self._tables.kept.get(family, ())):
            if kept.cut.is_unknown and not kept.unreadable:
                try:
                    self._find_out(kept)
                except MomentdError as error:
                    kept.unreadable = True
                    log.error(
                        "the files of snapshot %r stay as they are until the next start: %s",
                        kept.snapshot, error,
                    )  # fmt: skip
                return True
        return False

    def _find_out(self, kept: KeptCut) -> None:
        record = next((r for r in self._catalog.snapshots() if r.name == kept.snapshot), None)
        if record is None:
            return  # it is being deleted
        entry = record.tables[kept.position]
        rows = entry.schema.rows
        if rows * ROW_BYTES > machine.memory_available_bytes() // 2:
            raise OutOfMemory(f"its {rows} rows take {rows * ROW_BYTES >> 20} MiB to look through")
        slots, checks = np.zeros(rows, np.uint64), np.zeros(rows, np.uint32)
        recovery.rebuild(self._store, entry.family, entry.manifest, entry.schema, slots, checks)
        cut = kept.cut
        geo = np.array([0, entry.schema.record_bytes, 1, 0], np.int64)
        kernels.mark_cut(0, rows, slots.view(np.int64), self._words, geo, cut.segments, cut.bits, 0)
        cut.only = cut.records()
        cut.is_unknown = False


def _check(cut: SnapshotCut) -> None:
    failure = cut.failure
    if isinstance(failure, MomentdError):
        raise type(failure)(f"the snapshot was given up: {failure.message}", **failure.details)
    if failure is not None:
        raise failure


def _check_name(name: str | None) -> None:
    if name is not None and not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise InvalidArgument(
            f"a snapshot's name has 1 to {MAX_NAME} printable characters, not {name[:40]!r}"
        )


def _entry(
    table: Table, cut: SnapshotCut, segments: Sequence[tuple[int, int]], *, records: np.ndarray
) -> TableSnapshot:
    ancestry = (*table.ancestry, (table.generation, cut.number))
    manifest = Manifest(table.generation, cut.step, cut.number, tuple(segments), ancestry)
    return TableSnapshot(
        id=content_id(table.schema, cut.step, cut.digest),
        table=table.id,
        label=table.record.label,
        family=table.family,
        layout=table.record.layout,
        schema=table.schema,
        manifest=manifest,
        rows_touched=int(records.sum()),
    )
