"""Which tables exist: start, create, open, clone, drop, flush, stop. Existence is the catalog's."""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from momentd_server import rules
from momentd_server.engine.api import OpenMode
from momentd_server.engine.cache import Cache
from momentd_server.engine.cuts import Cut, KeptCut
from momentd_server.engine.inherit import Inheritance
from momentd_server.engine.lane import Lane
from momentd_server.engine.sessions import Session, Ticket
from momentd_server.engine.spill import Spiller
from momentd_server.engine.table import Table
from momentd_server.obs import machine
from momentd_server.schema import MAX_RECORD_BYTES, Schema
from momentd_server.storage import (
    blocks,
    compaction_kernels,
    files,
    frames,
    recovery,
    victim_kernels,
)
from momentd_server.storage.blocks import MAX_TABLES
from momentd_server.storage.catalog import (
    Catalog,
    DropTable,
    Manifest,
    Put,
    TableRecord,
    TableSnapshot,
)
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.space import Space, extent_bytes
from momentd_wire.errors import (
    InvalidArgument,
    LimitExceeded,
    MomentdError,
    OutOfMemory,
    SchemaMismatch,
    StateRolledBack,
    TableInUse,
    TableNotFound,
)

log = logging.getLogger("momentd.tables")

_CLONE_ROWS: Final = 1 << 18  # a job of the lane copies so many locations in about 1 ms
# What the daemon needs beside cache and locations: 95 to 125 MB were measured.
BASE_BYTES: Final = 128 << 20


class Tables:
    """The registry of open tables. Thread-safe."""

    def __init__(
        self, space: Space, lane: Lane, cache: Cache, catalog: Catalog, store: SegmentStore
    ) -> None:
        self._space = space
        self._words = space.words.view(np.int64)
        self._lane = lane
        self._cache = cache
        self._catalog = catalog
        self._store = store
        self._lock = threading.Lock()  # guards the four fields below; never held while waiting
        self._by_id: dict[int, Table] = {}
        self._by_name: dict[str, Table] = {}
        self._segment_users: dict[int, set[int]] = {}
        # Tables that are being made, and the bytes of their locations.
        self._being_made: dict[int, int] = {}
        # Held while records change segments, and by who relies on which segments a table has. It is
        # taken after gates and before the lane.
        self.moving = threading.Lock()
        # Cuts of snapshots by family, whether their tables still exist or not. Under `moving`.
        self.kept: dict[int, list[KeptCut]] = {}
        self._naming = threading.Lock()  # one named table is opened or created at a time
        self.spiller = Spiller(
            space, lane, store, lambda table, segments: self.release(table.id, segments)
        )

    # ------------------------------------------------------------------------------ reading

    def all(self) -> list[Table]:
        with self._lock:
            return list(self._by_id.values())

    def by_family(self) -> dict[int, list[Table]]:
        families: dict[int, list[Table]] = {}
        for table in self.all():
            families.setdefault(table.family, []).append(table)
        return families

    def family(self, family_id: int) -> list[Table]:
        return [table for table in self.all() if table.family == family_id]

    def get(self, table_id: int) -> Table:
        table = self._by_id.get(table_id)
        if table is None:
            raise TableNotFound(
                f"there is no table {table_id} (any more): it was dropped, or its session ended; "
                "`momentd tables` lists what exists",
                table=table_id,
            )
        return table

    def find(self, table_id: int) -> Table | None:
        """The table, or None."""
        return self._by_id.get(table_id)

    def by_name(self, name: str) -> Table:
        table = self._by_name.get(name)
        if table is None:
            raise TableNotFound(f"there is no table named {name!r}", name=name)
        return table

    def enter(self, table_id: int, generation: int) -> Table:
        """The table, entered: the caller leaves its gate. Raises for another generation."""
        table = self.get(table_id)
        if generation != table.generation:
            raise StateRolledBack(
                f"table {table_id} is of generation {table.generation}, the request names "
                f"{generation}: the daemon went back to an earlier state; open the table again, "
                "and load the checkpoint you want to continue from",
                table=table_id,
                generation=table.generation,
            )
        _check_whole(table)
        table.gate.enter()
        return table

    # ------------------------------------------------------------------------------ start

    def recover(self, kept_sessions: Iterable[bytes], *, in_order: bool) -> None:
        """What the catalog says, after a start whose memory was not inherited.

        Named tables come back as of their last commit, unnamed ones only with a session that an
        orderly stop saved. Unless the last stop was in order, tables may have gone further than
        their commit: the first act is then a new generation of each, committed durably.
        """
        kept = set(kept_sessions)
        records = self._catalog.tables()
        staying = [r for r in records if r.name is not None or r.owner in kept]
        if not in_order:
            staying = [self._next_generation(record) for record in staying]
        changes: list[Put | DropTable] = [Put(r) for r in staying] if not in_order else []
        going = {r.id for r in records} - {r.id for r in staying}
        changes += [DropTable(table_id) for table_id in sorted(going)]
        if changes:
            self._catalog.commit(changes)
        if going:
            log.info("dropped %d tables of sessions that are gone", len(going))
        snapshots = [table for each in self._catalog.snapshots() for table in each.tables]
        recovery.delete_unlisted(
            self._store, [(each.family, each.manifest) for each in (*staying, *snapshots)]
        )
        for record in staying:
            self._bring_back(record)

    def inherit(self, inheritance: Inheritance, known_sessions: Iterable[bytes]) -> None:
        """What an earlier engine of the same memory had: every table goes on as it is."""
        known = set(known_sessions)
        found = inheritance.blocks()
        records = self._catalog.tables()
        going = [r.id for r in records if r.name is None and r.owner not in known]
        if self._store.failure.text is not None:
            going = []  # the next start drops them: nothing is written any more
        if going:  # the end of their session was in work
            self._catalog.commit([DropTable(table_id) for table_id in going])
        staying = [record for record in records if record.id not in going]
        for table_id in found.keys() - {record.id for record in staying}:
            inheritance.free_block(found[table_id])
        for record in staying:
            if record.id not in found:
                # Never so, unless the catalog was changed by hand.
                log.error("table %d is not in the inherited memory: it goes back", record.id)
                rolled_back = self._next_generation(record)
                self._catalog.commit([Put(rolled_back)])
                self._bring_back(rolled_back)
                continue
            table = inheritance.table(record, found[record.id])
            listed = [segment for segment, _ in record.manifest.segments]
            if table.broken is None and record.name is not None:
                table.cut = Cut.unknown(table.geometry.record_bytes, listed)
            table.segments |= {s: self._store.get(s) for s in listed if self._store.knows(s)}
            self._register(table)
        self._give_back_unneeded()

    def _give_back_unneeded(self) -> None:
        """Slabs and files that were on their way from one owner to the next."""
        with self._lock:
            used = dict(self._segment_users)
        failed = self._store.failure.text is not None  # what is committed may need any of them
        for segment in [] if failed else self._store.segments():
            if segment.id not in used:
                self._store.unlink(segment.id)
        for _, segment_id, path in [] if failed else list(self._store.datadir.segment_files()):
            if segment_id not in used:
                files.remove_with_folder(path)
        slabs = [slab for table in self.all() for slab in table.slabs.tolist()]
        self._cache.stock.inherit(slabs)

    def give_back_clean(self) -> int:
        """Slabs whose records are all on disk go back to the system, and the cache shrinks by them.

        After the kernel has killed an engine for want of memory: before anything is served.
        Returns how many.
        """
        count = 0
        for table in self.all():
            for slab in table.slabs.tolist():
                freed = np.empty(table.geometry.frames, np.int64)
                with self._lane:
                    taken, dirty, pinned = victim_kernels.evict_slab(
                        slab, table.location, self._words, table.geo, table.tally, freed
                    )
                    if dirty or pinned:
                        table.free[table.free_top : table.free_top + taken] = freed[:taken]
                        table.free_top += taken
                        continue
                    table.free_top = frames.without_slab(table.free, table.free_top, slab)
                    table.remove_slab(slab)
                self._cache.stock.lose(slab)
                count += 1
        return count

    def _next_generation(self, record: TableRecord) -> TableRecord:
        generation = self._catalog.allocate_generation(record.family)
        return replace(record, manifest=replace(record.manifest, generation=generation))

    def _bring_back(self, record: TableRecord) -> None:
        table = self._make(record)
        manifest = record.manifest
        began = time.perf_counter()
        try:
            result = recovery.rebuild(
                self._store, record.family, manifest, record.schema,
                table.location.view(np.uint64), table.check,
            )  # fmt: skip
        except MomentdError as error:
            # Its files stay as they are. The other tables are served.
            log.exception("table %d is broken", table.id)
            table.broken = error
            table.block["state"] = blocks.TABLE_BROKEN
            self._register(table)
            self.use(table.id, [segment for segment, _ in manifest.segments])
            return
        table.live = dict(result.live_records)
        table.rows_touched, table.digest = result.rows_touched, result.digest
        table.segments = {s: self._store.get(s) for s, _ in manifest.segments}
        table.cut = self._make_cut(table, comes_back=record.name is not None)
        self._register(table)
        log.info(
            "table %d: %d rows found in %d records, %.2f s",
            table.id, result.rows_touched, result.records_read, time.perf_counter() - began,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ create, open

    def open(
        self, session: Session, name: str | None, label: str, schema: Schema, run: str,
        mode: OpenMode, ticket: Ticket | None = None,
    ) -> tuple[Table, bool]:  # fmt: skip
        made = self.made_by(ticket)
        if made is not None:
            return made, True
        rules.get(schema.rule).check_schema(schema)
        _check_record(schema)
        if name is None:
            return self._create(session, None, label, schema, run, ticket), True
        with self._naming:
            existing = self._by_name.get(name)
            if existing is not None:
                _check_existing(existing, schema, mode)
                existing.openers.add(session.id)
                session.has_opened(existing.id)
                return existing, False
            if mode == "open":
                raise TableNotFound(f"there is no table named {name!r}", name=name)
            return self._create(session, name, label, schema, run, ticket), True

    def made_by(self, ticket: Ticket | None) -> Table | None:
        """The table that a repeated request has made, under an engine that is gone."""
        if ticket is None or not ticket.repeated:
            return None
        return next((t for t in self.all() if t.record.made_by == ticket.name), None)

    def _create(
        self, session: Session, name: str | None, label: str, schema: Schema, run: str,
        ticket: Ticket | None,
    ) -> Table:  # fmt: skip
        family = self._catalog.allocate_family()
        record = TableRecord(
            id=self._catalog.allocate_table(), family=family, layout=1, name=name, label=label,
            run=run, schema=schema, created_s=time.time(),
            owner=None if name is not None else session.id,
            manifest=Manifest(self._catalog.allocate_generation(family), 0, 0),
            made_by="" if ticket is None else ticket.name,
        )  # fmt: skip
        table = self._make(record)
        self._commit_new(table, session)
        return table

    def _commit_new(self, table: Table, session: Session) -> None:
        try:
            self._catalog.commit([Put(table.record)])
        except BaseException:
            self._unmake(table)
            raise
        self._register(table)
        table.openers.add(session.id)
        if table.record.owner is not None:
            session.tables.add(table.id)
        else:
            session.has_opened(table.id)

    def _make(self, record: TableRecord) -> Table:
        """A table in the space, in no registry. Raises OutOfMemory, LimitExceeded."""
        rows = record.schema.rows
        self._promise_memory(record.id, rows)
        try:
            return self._make_with_memory(record, rows)
        except BaseException:
            self._being_made.pop(record.id, None)
            raise

    def _make_with_memory(self, record: TableRecord, rows: int) -> Table:
        with self._lane:
            free = np.flatnonzero(self._space.tables["id"] == 0)
            if not free.size:
                raise LimitExceeded(
                    f"{MAX_TABLES} tables are open, which is the limit: drop some "
                    "(`momentd runs prune`)",
                    limit=MAX_TABLES,
                )
            block = self._space.tables[free[0]]
            block["location_at"], block["check_at"] = self._space.allocate_rows(rows)
            block["rows"] = rows
            block["record_bytes"] = record.schema.record_bytes
            block["generation"] = record.manifest.generation
            block["update_number"] = record.manifest.update_number
            block["step"] = record.manifest.step
            block["state"] = blocks.TABLE_WHOLE
            block["digest"] = block["digest_torn"] = 0
            block["id"] = record.id
            return Table(self._space, record, int(free[0]))

    def _promise_memory(self, table_id: int, rows: int) -> None:
        """Of two tables that are made at once, only one may get the last memory."""
        needed = extent_bytes(rows)
        cache_bytes = self._space.slabs * (2 << 20)
        with self._lock:
            taken = sum(extent_bytes(table.rows) for table in self._by_id.values())
            taken += sum(self._being_made.values())
            room = machine.memory_limit_bytes() - cache_bytes - BASE_BYTES - taken
            if needed <= room:
                self._being_made[table_id] = needed
                return
        raise OutOfMemory(
            f"a table of {rows} rows needs {needed >> 20} MiB of memory for its locations "
            f"(12 bytes a row); {max(room, 0) >> 20} MiB are left beside the cache of "
            f"{cache_bytes >> 20} MiB: use fewer rows, a smaller --cache, or a larger machine",
            needed_bytes=needed,
        )

    def _register(self, table: Table) -> None:
        with self._lock:
            self._being_made.pop(table.id, None)
            self._by_id[table.id] = table
            if table.record.name is not None:
                self._by_name[table.record.name] = table
        self.use(table.id, table.segments)
        self._cache.stock.collapse_rows(table)

    def _unmake(self, table: Table) -> None:
        with self._lane:
            slabs = table.give_up_slabs()
            table.block["id"] = 0
        # Giving memory back takes the kernel a while; nobody can see it any more.
        self._cache.release(slabs)
        self._cache.stock.forget_rows(table)
        self._space.free_rows(table.location_at, table.rows)
        self._being_made.pop(table.id, None)

    # ------------------------------------------------------------------------------ clone

    def clone(
        self, session: Session, source: Table, name: str | None, label: str, run: str,
        ticket: Ticket | None = None,
    ) -> Table:  # fmt: skip
        """A copy that shares the source's segments and writes its own.

        Updates of the source wait until the copy is made.
        """
        made = self.made_by(ticket)
        if made is not None:
            return made
        with self._naming, source.gate.alone():
            if name is not None and name in self._by_name:
                raise TableInUse(f"a table named {name!r} exists already", name=name)
            self.spiller.spill_all(source)
            generation = self._catalog.allocate_generation(source.family)
            manifest = replace(source.manifest(), generation=generation)
            record = replace(
                source.record, id=self._catalog.allocate_table(), name=name, label=label, run=run,
                created_s=time.time(), owner=None if name is not None else session.id,
                manifest=manifest, made_by="" if ticket is None else ticket.name,
            )  # fmt: skip
            # In the catalog it is empty until it is flushed: its segments are not synced.
            empty = replace(manifest, segments=(), step=0, update_number=0)
            clone = self._make(replace(record, manifest=empty))
            clone.block["step"] = manifest.step
            clone.block["update_number"] = manifest.update_number
            with self.moving:
                self._copy_locations(source, clone)
                clone.live = {s: n for s, n in source.live.items() if n}
                clone.segments = {s: source.segments[s] for s in clone.live}
                clone.rows_touched = source.rows_touched
                clone.block["digest"] = source.block["digest"]
                clone.block["digest_torn"] = source.block["digest_torn"]
                self.use(source.id, clone.segments)
                self._commit_new(clone, session)
        if name is not None:
            self.flush([clone])
        return clone

    def _copy_locations(self, source: Table, clone: Table) -> None:
        for start in range(0, source.rows, _CLONE_ROWS):
            stop = min(start + _CLONE_ROWS, source.rows)
            with self._lane:
                dirty = frames.clone_locations(
                    start, stop, source.location, source.check, self._words, source.geo,
                    clone.location, clone.check,
                )  # fmt: skip
            if dirty:
                raise RuntimeError(f"{dirty} records of table {source.id} changed during a clone")

    # ------------------------------------------------------------------------------ drop

    def drop(self, tables: Sequence[Table]) -> None:
        """Catalog first, then frames, then files. Some may be dropped by somebody else meanwhile.

        The tables are had alone before the commit: a flush in work would put one back.
        """
        with contextlib.ExitStack() as gates:
            alone: list[Table] = []
            # In order of id, as requests enter: so that nobody waits in a circle.
            for table in sorted(tables, key=lambda table: table.id):
                with contextlib.suppress(TableNotFound):
                    gates.enter_context(table.gate.alone())
                    alone.append(table)
            if not alone:
                return
            with self.moving:  # which commits tables too
                self._catalog.commit([DropTable(table.id) for table in alone])
                for table in alone:
                    self._take_out(table)
        for table in alone:
            self._let_go(table)
        # It has a file of these tables too, and lets go of it when it looks.
        self.spiller.wake_compactor(False)

    def _take_out(self, table: Table) -> None:
        with self._lock:
            self._by_id.pop(table.id, None)
            if table.record.name is not None:
                self._by_name.pop(table.record.name, None)
        table.gate.drop()
        with table.spilling:
            self._unmake(table)

    def _let_go(self, table: Table) -> None:
        """The files of a table that is gone. Those of a failure are deleted by the next start."""
        with self._lane:
            segments = [*table.segments, *table.retirement.take_all()]
            table.segments = {}
        if table.broken is not None:
            segments = [segment for segment, _ in table.record.manifest.segments]
        if table.open_segment is not None:
            self._store.seal(table.open_segment)
        self.release(table.id, segments)

    def use(self, user: int, segments: Iterable[int]) -> None:
        """A table, or compaction (0), needs these files until it releases them."""
        with self._lock:
            for segment in segments:
                self._segment_users.setdefault(segment, set()).add(user)

    def release(self, user: int, segments: Iterable[int]) -> None:
        """This user needs these files no more; a file that nobody needs is unlinked."""
        unneeded: list[int] = []
        with self._lock:
            for segment in segments:
                users = self._segment_users.get(segment, set())
                users.discard(user)
                if not users:
                    self._segment_users.pop(segment, None)
                    unneeded.append(segment)
        for segment in unneeded:
            if self._store.knows(segment):  # else the next start finds it unlisted
                self._store.unlink(segment)

    # ------------------------------------------------------------------------------ flush

    def flush(self, tables: Sequence[Table]) -> int:
        """Make tables durable as they are now; their updates wait meanwhile. Returns bytes."""
        return sum(self._flush(table) for table in tables)

    def flush_all(self, *, final: bool = False) -> int:
        """Flush every table that can be; raises the first failure when all were tried.

        final: nothing happens afterwards, so tables of sessions may come back as well.
        """
        written = 0
        failure: MomentdError | None = None
        for table in self.all():
            if table.broken is not None:
                continue  # nothing of it is in memory
            try:
                written += self._flush(table, final=final)
            except TableNotFound:
                continue  # dropped meanwhile
            except MomentdError as error:
                log.error("table %d is not flushed: %s", table.id, error)
                failure = failure or error
        if failure is not None:
            raise failure
        return written

    def _flush(self, table: Table, *, final: bool = False) -> int:
        _check_whole(table)
        with table.gate.alone():
            written = self.spiller.spill_all(table)
            self._store.sync(list(table.segments.values()))
            with self.moving:
                # What compaction wrote since.
                self._store.sync(list(table.segments.values()))
                cut = self._make_cut(table, comes_back=final or table.record.name is not None)
                record = replace(table.record, manifest=table.manifest(durable=True))
                self._catalog.commit([Put(record)])
                table.record = record
                with self._lane:
                    table.cut = cut
        self.spiller.release_unneeded(table)
        # What only the last committed state needed is not needed any more.
        self.spiller.wake_compactor(False)
        return written

    # ------------------------------------------------------------------------------ restore

    def restore(
        self, session: Session, snapshot: TableSnapshot, name: str | None, label: str, run: str,
        *, replace_named: bool, ticket: Ticket | None = None,
    ) -> Table:  # fmt: skip
        """A new table with the content of a snapshot. Records come in as they are touched.

        replace_named: a table of that name that nobody uses goes, in the same commit.
        """
        made = self.made_by(ticket)
        if made is not None:
            return made
        with self._naming:
            old = self._by_name.get(name) if name is not None else None
            if old is not None and not replace_named:
                raise TableInUse(f"a table named {name!r} exists already", name=str(name))
            generation = self._catalog.allocate_generation(snapshot.family)
            record = TableRecord(
                id=self._catalog.allocate_table(), family=snapshot.family, layout=snapshot.layout,
                name=name, label=label, run=run, schema=snapshot.schema, created_s=time.time(),
                owner=None if name is not None else session.id,
                manifest=replace(snapshot.manifest, generation=generation),
                made_by="" if ticket is None else ticket.name,
            )  # fmt: skip
            table = self._make(record)
            listed = [segment for segment, _ in snapshot.manifest.segments]
            self.use(table.id, listed)
            try:
                result = recovery.rebuild(
                    self._store, record.family, record.manifest, record.schema,
                    table.location.view(np.uint64), table.check,
                )  # fmt: skip
                table.live = {s: n for s, n in result.live_records.items() if n}
                table.segments = {s: self._store.get(s) for s in listed}
                table.rows_touched, table.digest = result.rows_touched, result.digest
                table.cut = self._make_cut(table, comes_back=name is not None)
                self._replace(old, table, session)
            except BaseException:
                if self.find(table.id) is None:
                    self._unmake(table)
                    self.release(table.id, listed)
                raise
        self.spiller.release_unneeded(table)
        return table

    def _replace(self, old: Table | None, table: Table, session: Session) -> None:
        if old is None:
            self._commit_new(table, session)
            return
        with old.gate.alone(), self.moving:
            self._catalog.commit([DropTable(old.id), Put(table.record)])
            self._take_out(old)
            self._register(table)
        table.openers.add(session.id)
        session.has_opened(table.id)
        self._let_go(old)

    def _make_cut(self, table: Table, *, comes_back: bool) -> Cut:
        """Of what is on disk now, under `moving`: nothing of the table is dirty.

        comes_back: the next start would bring the table back to what is being committed.
        """
        record_bytes = table.geometry.record_bytes
        if not comes_back:
            return Cut(record_bytes)  # it goes with its session, or with the daemon
        cut = Cut(record_bytes, [segment for segment, count in list(table.live.items()) if count])
        for start in range(0, table.rows, _CLONE_ROWS):
            stop = min(start + _CLONE_ROWS, table.rows)
            with self._lane:
                compaction_kernels.mark_rows(
                    start, stop, table.location, self._words, table.geo, cut.segments, cut.bits
                )
        return cut

    def commit_without(self, victim: int, tables: Sequence[Table], kept: Sequence[KeptCut]) -> None:
        """Under `moving`: these committed states and snapshots use the copies of its records.

        Raises StorageFailed and OutOfSpace with the committed states as they were.
        """
        records: list[TableRecord] = []
        for table in tables:
            segments = [self._store.get(int(s)) for s in table.cut.segments if s != victim]
            self._store.sync(segments)
            counted = tuple((segment.id, segment.durable) for segment in segments)
            manifest = replace(table.record.manifest, segments=counted)
            records.append(replace(table.record, manifest=manifest))
        snapshots = {each.name: each for each in self._catalog.snapshots()}
        for each in kept:
            segments = [self._store.get(int(s)) for s in each.cut.segments if s != victim]
            self._store.sync(segments)
            counted = tuple((segment.id, segment.durable) for segment in segments)
            snapshots[each.snapshot] = each.with_segments(snapshots[each.snapshot], counted)
        changed = [snapshots[name] for name in dict.fromkeys(each.snapshot for each in kept)]
        self._catalog.commit([Put(record) for record in (*records, *changed)])
        for table, record in zip(tables, records, strict=True):
            table.record = record
            with self._lane:
                table.cut.forget(victim)
        for each in kept:
            self.use(each.user, each.cut.segments.tolist())
            with self._lane:
                each.cut.forget(victim)
            self.release(each.user, [victim])


def _check_whole(table: Table) -> None:
    if table.broken is not None:
        raise type(table.broken)(
            f"table {table.record.name or table.id} is broken since the daemon's start: "
            f"{table.broken.message}; its files are untouched. To go on without it: "
            f"`{_drop_command(table)}`, then load a checkpoint",
            table=table.id,
        )


def _drop_command(table: Table) -> str:
    """What a person types to be rid of a table: a label has blanks in it."""
    return f"momentd runs drop {shlex.quote(table.record.run)}"


def _check_existing(table: Table, schema: Schema, mode: OpenMode) -> None:
    name = table.record.name
    _check_whole(table)
    if mode == "create":
        raise TableInUse(
            f"a table named {name!r} exists already: open it, or use another name", name=str(name)
        )
    if table.schema != schema:
        raise SchemaMismatch(
            f"table {name!r} has {_describe(table.schema)}, asked for was {_describe(schema)}: "
            f"use another name, or drop the tables of its run (`{_drop_command(table)}`)",
            name=str(name),
        )


def _describe(schema: Schema) -> str:
    fields = ", ".join(f"{f.name}: {f.dtype} x {f.width}" for f in schema.fields)
    return f"{schema.rows} rows of width {schema.width} ({fields}), rule {schema.rule!r}"


def _check_record(schema: Schema) -> None:
    if schema.rows < 1:
        raise InvalidArgument(f"a table needs at least 1 row, not {schema.rows}")
    if schema.record_bytes > MAX_RECORD_BYTES:
        raise InvalidArgument(
            f"a record of {schema.record_bytes} bytes (width {schema.width}) is above the limit "
            f"of {MAX_RECORD_BYTES}: use a smaller width"
        )
