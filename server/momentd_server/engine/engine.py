"""The engine: one store with its cache, rules and sessions. See engine/api.py for its promises."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, Literal

import numpy as np

from momentd_server import jit, rules
from momentd_server.config import MIN_CACHE_BYTES, ServeConfig
from momentd_server.engine.api import (
    EngineInfo,
    EngineStats,
    EngineTotals,
    GatherOutcome,
    OpenMode,
    Progress,
    Rows,
    TableBatch,
    TableOutcome,
    TableView,
    VerifyStep,
)
from momentd_server.engine.arenas import take_inherited
from momentd_server.engine.cache import Cache, SlabStock
from momentd_server.engine.compaction import Compactor
from momentd_server.engine.flight import Touch
from momentd_server.engine.inherit import Inheritance
from momentd_server.engine.lane import Lane
from momentd_server.engine.ledger import Ledger
from momentd_server.engine.lifecycle import BASE_BYTES, Tables
from momentd_server.engine.mutations import Encode, EncodeCounters, Mutations, Scatter
from momentd_server.engine.prefetch import Prefetcher
from momentd_server.engine.scratch import Scratches
from momentd_server.engine.sessions import Session, Sessions, Ticket
from momentd_server.engine.snapshots import Snapshots, SnapshotView
from momentd_server.engine.spill import Cleaner
from momentd_server.engine.table import Table
from momentd_server.engine.touch import Toucher
from momentd_server.engine.verify import OnlineCheck
from momentd_server.jit import Pool
from momentd_server.keeper import Kept
from momentd_server.keeper.code import code_version
from momentd_server.obs import machine
from momentd_server.schema import Schema
from momentd_server.storage import files, frames
from momentd_server.storage.catalog import Catalog, DropSession, Put, Stopped
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.diskio import ReadPool, aligned_buffer
from momentd_server.storage.failure import StorageFailure
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.space import ROW_BYTES, SLAB_BYTES, Space
from momentd_wire.errors import (
    DaemonUnavailable,
    InvalidArgument,
    OutOfMemory,
    RowOutOfRange,
    SessionNotFound,
    StorageFailed,
    TableInUse,
    TableNotFound,
)

log = logging.getLogger("momentd.engine")

# Rows whose results are announced together: fewer would cost more in hand-offs than overlap wins.
_PROGRESS_ROWS: Final = 4096
_LEAST_ROWS: Final = 512
# Cold rows of a gather are read through a buffer of this size.
_GATHER_BYTES: Final = 16 << 20
# What an orderly stop is expected to write a second, until it was measured.
_WRITE_BYTES_PER_S: Final = 500e6

# An engine that was killed with less than this left to its cgroup or machine was killed for that.
_SCARCE_BYTES: Final = 128 << 20

State = Literal["starting", "serving", "draining", "failed"]


class LocalEngine:
    """The engine over a data directory. Make it with `start`."""

    def __init__(
        self, config: ServeConfig, datadir: DataDir, catalog: Catalog, space: Space
    ) -> None:
        self._config = config
        self._datadir = datadir
        self._catalog = catalog
        self._space = space
        self._words = space.words.view(np.int64)
        self._lane = Lane()
        self._failure = catalog.failure
        self._failure.keep_in(space.header)
        self._store = SegmentStore(datadir, catalog.allocate_segment, self._failure, space.segments)
        self._readers = ReadPool(config.read_threads)
        self._pool = Pool(config.worker_threads)
        self._stock = SlabStock(space)
        self._cache = Cache(space, self._stock, self._all_tables)
        self.tables = Tables(space, self._lane, self._cache, catalog, self._store)
        limit = space.slabs * SLAB_BYTES // 4
        self._cleaner = Cleaner(
            self._lane, self._cache, self.tables.spiller, self._all_tables, self._progressed
        )
        self.compactor = Compactor(
            space, self._lane, self._store, self.tables, config.disk_ratio, self._cleaner.wake
        )
        self.tables.spiller.wake_compactor = self.compactor.wake
        self.tables.spiller.make_room = self.compactor.make_room
        self._toucher = Toucher(
            space, self._lane, self._pool, self._cache, self._cleaner, self._store, self._readers,
            limit, self.tables.spiller.spill_listed,
        )  # fmt: skip
        self.snapshots = Snapshots(space, self._lane, self.tables, catalog, self._store)
        self.compactor.find_out = self.snapshots.find_out
        self._ledger = Ledger(space)
        self.sessions = Sessions(config.max_sessions, config.attach_grace_s, ledger=self._ledger)
        self._mutations = Mutations(space, self._ledger, self._toucher, self._pool)
        self.info = EngineInfo(
            store_id=datadir.store_id,
            engine_epoch=int(space.header["engine_epoch"][0]),
            data_dir=str(datadir.path),
            cache_bytes=config.cache_bytes,
            request_record_bytes=limit,
        )
        self._direct_io = files.takes_direct_io(datadir.path)
        self._scratches = Scratches()
        self._prefetcher = Prefetcher(self._toucher, self._in_table)
        # Whoever waits for frames need not wait any longer.
        self._failure.when_it_fails(self._toucher.notify)
        self._work = threading.Condition()  # guards the two fields below
        self._requests = 0
        self.state: State = "starting"
        self._stop_lock = threading.Lock()
        self._stopped = False

    # ------------------------------------------------------------------------------ life

    @classmethod
    def start(
        cls, config: ServeConfig, warm_up: Callable[[], None] = jit.warm_up,
        kept: Kept | None = None,
    ) -> LocalEngine:  # fmt: skip
        """Open the data directory and bring back what the last stop left.

        Or, if `kept` has the memory of an engine that is gone, go on where that was. `warm_up`
        loads the kernels, after everything that can be refused at once was looked at: on the first
        start of a version it compiles them.

        Raises OutOfMemory for a cache that does not fit, and what opening raises.
        """
        kept = kept or Kept()
        space_fd = kept.take("space")
        if space_fd is None:
            _check_cache(config.cache_bytes)
        datadir = DataDir.open(
            config.data_dir,
            allow_network=config.allow_network_fs,
            lock_fd=kept.take("lock"),
            pid=kept.pid,
        )
        try:
            kept.keep("lock", datadir.lock_fd)
            failure = StorageFailure()
            space = None
            if space_fd is not None:
                space = Space.attach(space_fd, code_version=code_version())
                failure.keep_in(space.header)  # before anything is written
            catalog = Catalog.open(datadir, failure)
            warm_up()
            if space is not None:
                space.header["engine_epoch"] = catalog.epoch + 1
                engine = cls(config, datadir, catalog, space)
                engine._inherit(kept)
            else:
                space = Space.create(
                    config.cache_bytes, engine_epoch=catalog.epoch + 1, code_version=code_version()
                )
                engine = cls(config, datadir, catalog, space)
                engine._recover(in_order=catalog.stopped_in_order)
                # Whole from here on: an engine that follows takes it over.
                kept.keep("space", space.fd)
            engine._begin_epoch()
        except BaseException:
            datadir.close()
            raise
        engine._stock.start()
        engine._cleaner.start()
        engine.compactor.start()
        engine._prefetcher.start()
        engine.state = "serving"
        return engine

    def _recover(self, *, in_order: bool) -> None:
        # Only an orderly stop saves sessions that are complete.
        self.sessions.restore(self._catalog.sessions() if in_order else [])
        kept = [session.id for session in self.sessions.all()]
        self.snapshots.recover()
        self.tables.recover(kept, in_order=in_order)
        self._assign_tables()

    def _inherit(self, kept: Kept) -> None:
        self._store.inherit()
        known = self.sessions.inherit()
        for session, arenas in known:
            take_inherited(session, arenas, kept)
        self.snapshots.recover()
        inheritance = Inheritance(self._space, self._lane, self._pool, self._store)
        self.tables.inherit(inheritance, [session.id for session, _ in known])
        self._mutations.roll_forward(self.tables.find, self.sessions.by_stream)
        self.sessions.inherit_streams()
        if kept.killed and machine.memory_available_bytes() < _SCARCE_BYTES:
            lost = self.tables.give_back_clean()
            log.warning("memory is scarce: the cache shrinks by %d MiB", lost * SLAB_BYTES >> 20)
        self._assign_tables()
        for session in self.sessions.all():
            for table_id in session.opened:
                table = self.tables.find(table_id)
                if table is not None:
                    table.openers.add(session.id)

    def _assign_tables(self) -> None:
        for session in self.sessions.all():
            session.tables = {t.id for t in self._all_tables() if t.record.owner == session.id}
            for table_id in session.tables:
                self.tables.get(table_id).openers.add(session.id)

    def _begin_epoch(self) -> None:
        """From here on the last stop counts no more: what it saved is out of date."""
        if self.failure is not None:
            return  # nothing is written any more; the next start brings back what was committed
        saved = [DropSession(record.session) for record in self._catalog.sessions()]
        self._catalog.next_epoch()
        if saved:
            self._catalog.commit(saved)

    def stop(self, *, discard: bool = False) -> None:
        with self._work:
            self.state = "draining"
            while self._requests:
                self._work.wait()
        with self._stop_lock:
            if self._stopped:
                return
            self._stopped = True
            self._prefetcher.stop()
            self.compactor.stop()
            self._cleaner.stop()
            self._stock.stop()
            if not discard:
                self._failure.refuse()
                self.tables.flush_all(final=True)
                saved = [Put(record) for record in self.sessions.save()]
                self._catalog.commit([*saved, Stopped()])

    def close(self) -> None:
        """Release everything after `stop`. Nothing of the engine may be used afterwards."""
        self._pool.close()
        self._readers.close()
        self.compactor.close()
        self._store.close()
        self._catalog.close()
        self._datadir.close()
        self._space.close()

    @property
    def failure(self) -> str | None:
        return self._failure.text

    def _all_tables(self) -> list[Table]:
        return self.tables.all()

    def _progressed(self) -> None:
        self._toucher.notify()

    @contextlib.contextmanager
    def _request(self, *, reads: bool = False) -> Generator[None]:
        """A request in work. After a failed sync only such as read: what they read is checked."""
        with self._work:
            if self.state not in ("serving", "starting"):
                raise DaemonUnavailable(
                    "the daemon is stopping: nothing was changed; try again when it is back"
                )
            if not reads:
                self._failure.refuse()
            self._requests += 1
        try:
            yield
        finally:
            with self._work:
                self._requests -= 1
                if not self._requests:
                    self._work.notify_all()

    # ------------------------------------------------------------------------------ tables

    def open_table(
        self, session: Session, *, name: str | None, label: str, schema: Schema, run: str,
        mode: OpenMode, ticket: Ticket | None = None,
    ) -> tuple[TableView, bool]:  # fmt: skip
        with self._request():
            table, created = self.tables.open(session, name, label, schema, run, mode, ticket)
            self._check_open(session)
            return self._view(table), created

    def get_table(self, *, id: int | None = None, name: str | None = None) -> TableView:  # noqa: A002
        table = self.tables.by_name(name) if name is not None else self.tables.get(id or 0)
        return self._view(table)

    def list_tables(self, run: str | None = None) -> list[TableView]:
        tables = sorted(self._all_tables(), key=lambda table: table.id)
        return [self._view(t) for t in tables if run is None or t.record.run == run]

    def drop_tables(
        self, session: Session | None, *, ids: Sequence[int], run: str | None, force: bool,
        ticket: Ticket | None = None,
    ) -> int:  # fmt: skip
        with self._request():
            if run is not None:
                tables = [t for t in self._all_tables() if t.record.run == run]
            elif ticket is not None and ticket.repeated:
                # Those that are not there were dropped by the engine that is gone.
                tables = [t for i in dict.fromkeys(ids) if (t := self.tables.find(i)) is not None]
            else:
                tables = [self.tables.get(table_id) for table_id in dict.fromkeys(ids)]
            if not force:
                for table in tables:
                    self._check_unused(table, session)
            self._drop(tables)
            return len(tables) if run is not None else len(set(ids))

    def _check_unused(self, table: Table, session: Session | None) -> None:
        own = session.id if session else None
        for other in self.sessions.all():
            if other.id in table.openers and other.id != own:
                raise TableInUse(
                    f"table {table.record.name or table.id} is used by process {other.pid} "
                    f"(session {other.short_id}): stop it first, or drop with --force",
                    table=table.id,
                )

    def _drop(self, tables: Sequence[Table]) -> None:
        for session in self.sessions.all():
            session.tables.difference_update(table.id for table in tables)
        self.tables.drop(tables)
        self._progressed()

    def clone_table(
        self, session: Session, *, id: int, generation: int, name: str | None, label: str, run: str,  # noqa: A002
        ticket: Ticket | None = None,
    ) -> TableView:  # fmt: skip
        with self._request():
            source = self.tables.enter(id, generation)
            source.gate.leave()
            table = self.tables.clone(session, source, name, label, run, ticket)
            self._check_open(session)
            return self._view(table)

    def _check_open(self, session: Session) -> None:
        """A session that ended while a table was made for it takes that table along."""
        try:
            self.sessions.get(session.id)
        except SessionNotFound:
            self._drop_tables_of(session.id)
            raise

    def end_session(self, session_id: bytes) -> None:
        with contextlib.suppress(DaemonUnavailable, StorageFailed), self._request():
            # While stopping, or after a failed sync, its tables are dropped by the next start: the
            # session is not saved.
            self._drop_tables_of(session_id)

    def _drop_tables_of(self, session_id: bytes) -> None:
        self._drop([t for t in self._all_tables() if t.record.owner == session_id])

    # ------------------------------------------------------------------------------ snapshots

    def create_snapshot(
        self, tables: Sequence[tuple[int, int]], *, run: str | None, name: str | None, pinned: bool
    ) -> tuple[SnapshotView, bool, int]:
        if run is not None:
            found = [t for t in self._all_tables() if t.record.run == run and t.broken is None]
            tables = [(table.id, table.generation) for table in found]
        if not tables:
            raise TableNotFound(
                f"there is nothing to make a snapshot of: no table in run {run!r}"
                if run is not None
                else "there is nothing to make a snapshot of: name tables, or a run"
            )
        with self._request(), self._entered(tables) as entered:
            label = run if run is not None else entered[0].record.run
            ordered = sorted(entered, key=lambda table: table.id)
            return self.snapshots.create(ordered, label, name, pinned=pinned)

    def list_snapshots(self, run: str | None = None) -> list[SnapshotView]:
        return self.snapshots.all(run)

    def get_snapshot(
        self,
        *,
        id: bytes | None = None,  # noqa: A002
        name: str | None = None,
    ) -> SnapshotView:
        if id is not None:
            return self.snapshots.find(id)[0]
        return self.snapshots.get(name or "")

    def delete_snapshots(self, names: Sequence[str], ticket: Ticket | None = None) -> int:
        with self._request():
            return self.snapshots.delete(names, ticket)

    def restore_table(
        self, session: Session, *, id: bytes, name: str | None, label: str | None, run: str,  # noqa: A002
        replace: bool, ticket: Ticket | None = None,
    ) -> TableView:  # fmt: skip
        with self._request():
            made = self.tables.made_by(ticket)
            if made is not None:
                return self._view(made)
            if replace and name is not None:
                known = next((t for t in self._all_tables() if t.record.name == name), None)
                if known is not None:
                    self._check_unused(known, None)
            table = self.snapshots.restore(
                session, id, name=name, label=label, run=run, replace=replace, ticket=ticket
            )
            self._check_open(session)
            return self._view(table)

    # ------------------------------------------------------------------------------ flush

    def flush(self, ids: Sequence[int]) -> int:
        with self._request():
            if not ids:
                return self.tables.flush_all()
            return self.tables.flush([self.tables.get(table_id) for table_id in ids])

    def _view(self, table: Table) -> TableView:
        return table.view(self.info.request_record_bytes)

    # ------------------------------------------------------------------------------ update

    def update(
        self, tables: Sequence[TableBatch], progress: Progress | None = None,
        ticket: Ticket | None = None, encode: Encode | None = None,
    ) -> list[TableOutcome]:  # fmt: skip
        began = time.perf_counter()
        wanted = [(batch.id, batch.generation) for batch in tables]
        with (
            self._request(),
            self._entered(wanted) as entered,
            self._scratches.lend(len(tables)) as scratches,
        ):
            planned = [
                self._mutations.plan_update(*one)
                for one in zip(tables, entered, scratches, strict=True)
            ]
            outcomes = self._mutations.update(planned, progress, ticket, encode)
        elapsed = time.perf_counter() - began
        for item in planned:
            counters = item.table.counters
            counters.updates += 1
            counters.rows_updated.add(item.touch.rows.size)
            counters.latency.add(elapsed)
        return outcomes

    @contextlib.contextmanager
    def _entered(self, wanted: Sequence[tuple[int, int]]) -> Generator[list[Table]]:
        """The tables, entered in order of id: so that nobody waits in a circle."""
        by_id: dict[int, Table] = {}
        try:
            for table_id, generation in sorted(wanted):
                if table_id in by_id:
                    raise InvalidArgument(f"table {table_id} is in the request twice: merge them")
                by_id[table_id] = self.tables.enter(table_id, generation)
            yield [by_id[table_id] for table_id, _ in wanted]
        finally:
            for table in by_id.values():
                table.gate.leave()

    # ------------------------------------------------------------------------------ rows

    def gather(
        self, *, id: int, generation: int, rows: Rows | None, range: tuple[int, int] | None,  # noqa: A002
        fields: Sequence[str], outs: Sequence[np.ndarray] | None,
    ) -> GatherOutcome:  # fmt: skip
        with self._request(reads=True), self._entered([(id, generation)]) as (table,):
            wanted = _wanted_rows(table, rows, range)
            chosen = _fields(table.schema, fields)
            specs = [table.schema.fields[k] for k in chosen]
            if outs is None:
                outs = [np.empty((wanted.size, f.width), f.dtype) for f in specs]
            views = [out[: wanted.size].view(np.uint8).reshape(wanted.size, -1) for out in outs]
            offsets = [table.schema.offsets[k] for k in chosen]
            step, number = self._gather(table, wanted, offsets, views)
            values = [out[: wanted.size] for out in outs]
            return GatherOutcome(step, number, tuple(specs), values)

    def _gather(
        self, table: Table, rows: Rows, offsets: Sequence[int], outs: Sequence[np.ndarray]
    ) -> tuple[int, int]:
        """One cut: what is in frames is copied in one job, slots do not change afterwards."""
        source = np.empty(rows.size, np.int64)
        with self._lane:
            slots = frames.locate(rows, table.location, table.geo, source)
            for at, out in zip(offsets, outs, strict=True):
                self._pool.run(
                    frames.copy_field, rows.size, source, self._space.bytes, at, table.initial,
                    out, least=_LEAST_ROWS,
                )  # fmt: skip
            step, number = table.step, table.update_number
            cold = np.flatnonzero(source < -1) if slots else source[:0]
            checks = table.check[rows[cold]]
            read = table.retirement.begin_read() if slots else -1
        if slots:
            try:
                self._gather_cold(table, rows, -2 - source[cold], cold, checks, offsets, outs)
            finally:
                with self._lane:
                    table.retirement.end_read(read)
        return step, number

    def _gather_cold(
        self, table: Table, rows: Rows, slots: Rows, cold: Rows, checks: np.ndarray,
        offsets: Sequence[int], outs: Sequence[np.ndarray],
    ) -> None:  # fmt: skip
        record_bytes = table.geometry.record_bytes
        at_once = max(1, _GATHER_BYTES // record_bytes)
        records = aligned_buffer(min(at_once, cold.size) * record_bytes)
        for start in range(0, cold.size, at_once):
            part = slice(start, start + at_once)
            which = cold[part]
            places = np.arange(which.size, dtype=np.int64) * record_bytes
            self._toucher.read_slots(table, rows[which], slots[part], checks[part], records, places)
            for at, out in zip(offsets, outs, strict=True):
                frames.copy_fetched_field(which, records, record_bytes, at, out)

    def scatter(  # noqa: PLR0913  # as the port has it
        self, *, id: int, generation: int, rows: Rows | None, range: tuple[int, int] | None,  # noqa: A002
        fields: Sequence[str], values: Sequence[np.ndarray], step: int | None,
        ticket: Ticket | None = None, encode: EncodeCounters | None = None,
    ) -> tuple[int, int]:  # fmt: skip
        with (
            self._request(),
            self._entered([(id, generation)]) as (table,),
            self._scratches.lend(1) as (scratch,),
        ):
            if step is not None and step >= rules.STEP_LIMIT:
                raise InvalidArgument(f"step must be below {rules.STEP_LIMIT}, not {step}")
            wanted = _wanted_rows(table, rows, range)
            chosen = _fields(table.schema, fields)
            if len(values) != len(chosen):
                raise InvalidArgument(f"{len(values)} arrays are given for {len(chosen)} fields")
            views = [
                _field_bytes(table.schema, k, array, wanted.size)
                for k, array in zip(chosen, values, strict=True)
            ]
            plan = rules.plan(wanted, table.rows, scratch)
            if plan.distinct != plan.sent:
                twice = int(plan.unique[np.flatnonzero(np.diff(plan.starts) > 1)[0]])
                raise InvalidArgument(f"row {twice} is given twice: a scatter takes distinct rows")
            offsets = [table.schema.offsets[k] for k in chosen]
            item = Scatter(
                table, Touch(table, plan.unique), plan.order, offsets, views,
                scratch.private[: plan.sent], step,
            )  # fmt: skip
            return self._mutations.scatter(item, ticket, encode)

    def prefetch(self, *, id: int, generation: int, rows: Rows) -> int:  # noqa: A002
        with self._request(), self._entered([(id, generation)]) as (table,):
            with self._scratches.lend(1) as (scratch,):
                wanted = rules.plan(rows, table.rows, scratch).unique.copy()
            source = np.empty(wanted.size, np.int64)
            with self._lane:
                frames.locate(wanted, table.location, table.geo, source)
            wanted = wanted[source < -1]
            if wanted.size and not self._prefetcher.offer(table, wanted):
                return 0
            return wanted.size

    @contextlib.contextmanager
    def _in_table(self, table_id: int, generation: int) -> Generator[Table]:
        with self._request(), self._entered([(table_id, generation)]) as (table,):
            yield table

    # ------------------------------------------------------------------------------ stats

    def verify(self, bytes_per_s: int) -> Iterator[VerifyStep]:
        return OnlineCheck(
            self._lane, self.tables, self._store, self._catalog,
            request=lambda: self._request(reads=True),
            stopping=lambda: self.state == "draining",
            bytes_per_s=bytes_per_s,
        ).run()  # fmt: skip

    def progress(self) -> int | None:
        return self._lane.progress()

    def tidy(self) -> None:
        self._scratches.tidy()

    def stats(self, run: str | None = None) -> EngineStats:
        if self._stopped:
            raise DaemonUnavailable("the daemon has stopped")
        tables = sorted(self._all_tables(), key=lambda table: table.id)
        limit = self.info.request_record_bytes
        each = [t.stats(limit) for t in tables if run is None or t.record.run == run]
        return EngineStats(self._totals(tables), each)

    def _totals(self, tables: Sequence[Table]) -> EngineTotals:
        segments = {s.id: s for table in tables for s in list(table.segments.values())}
        dirty_bytes = sum(t.dirty * t.geometry.record_bytes for t in tables)
        return EngineTotals(
            state="failed" if self.failure and self.state == "serving" else self.state,
            failure=self.failure or "",
            cache_bytes=self._config.cache_bytes,
            cache_used_bytes=self._stock.populated * SLAB_BYTES,
            slabs=self._stock.total,
            slabs_free=self._stock.free,
            frames=sum(t.frames for t in tables),
            frames_dirty=sum(t.dirty for t in tables),
            location_bytes=sum(t.rows * ROW_BYTES for t in tables),
            space_bytes=self._space.allocated_bytes(),
            segments=len(segments),
            disk_bytes=sum(s.reserved for s in segments.values()),
            disk_free_bytes=self._datadir.free_bytes(),
            bytes_read=sum(t.counters.bytes_read for t in tables),
            bytes_written=sum(t.counters.bytes_written for t in tables),
            page_cache_bytes=self._store.page_cache_bytes(),
            direct_io=self._direct_io,
            drain_s=dirty_bytes / _WRITE_BYTES_PER_S,
            needed_bytes=sum(t.needed_bytes() for t in tables),
            bytes_compacted=sum(t.counters.bytes_compacted for t in tables),
            segments_compacted=sum(t.counters.segments_compacted for t in tables),
            disk_bytes_written=self._store.written.total,
            disk_bytes_written_per_s=self._store.written.per_second(),
            rows_prefetched=sum(t.counters.rows_prefetched for t in tables),
            reads_shared=sum(t.counters.reads_shared for t in tables),
            rows_updated=sum(t.counters.rows_updated.total for t in tables),
        )


def _check_cache(cache_bytes: int) -> None:
    available = machine.memory_available_bytes()
    needed = cache_bytes + BASE_BYTES
    if needed > available:
        most_mib = (available - BASE_BYTES) * 3 // 4 >> 20
        least_mib = (MIN_CACHE_BYTES + BASE_BYTES) >> 20
        raise OutOfMemory(
            f"a cache of {cache_bytes >> 20} MiB and {BASE_BYTES >> 20} MiB for the daemon itself "
            f"do not fit: {available >> 20} MiB of memory are available to this machine or "
            "cgroup; "
            + (
                f"use --cache {most_mib}MiB or less"
                if most_mib << 20 >= MIN_CACHE_BYTES
                else f"at least {least_mib} MiB must be free"
            ),
            needed_bytes=needed,
            available_bytes=available,
        )


def _wanted_rows(table: Table, rows: Rows | None, span: tuple[int, int] | None) -> Rows:
    """A private, checked copy of the row ids. Raises RowOutOfRange."""
    if span is not None:
        start, count = span
        if start < 0 or count < 0 or start + count > table.rows:
            raise RowOutOfRange(
                f"rows [{start}, {start + count}) reach beyond [0, {table.rows})",
                row=start + count,
                rows=table.rows,
            )
        return np.arange(start, start + count, dtype=np.int64)
    if rows is None:
        raise InvalidArgument("neither row ids nor a range of rows is given")
    private = rows.copy()
    bad = np.flatnonzero((private < 0) | (private >= table.rows))
    if bad.size:
        position = int(bad[0])
        raise RowOutOfRange(
            f"row id {private[position]} at position {position} is outside [0, {table.rows}); "
            "nothing was read or changed",
            row=int(private[position]),
            position=position,
            rows=table.rows,
        )
    return private


def _fields(schema: Schema, names: Sequence[str]) -> list[int]:
    """Positions of the named fields; all if none is named. Raises InvalidArgument."""
    known = [field.name for field in schema.fields]
    if not names:
        return list(range(len(known)))
    for name in names:
        if name not in known:
            raise InvalidArgument(f"there is no field {name!r}; the table has {', '.join(known)}")
    return [known.index(name) for name in names]


def _field_bytes(schema: Schema, position: int, values: np.ndarray, rows: int) -> np.ndarray:
    """Values of one field as uint8, (rows, field bytes). Raises InvalidArgument."""
    field = schema.fields[position]
    if values.shape != (rows, field.width) or values.dtype != np.dtype(field.dtype):
        raise InvalidArgument(
            f"field {field.name!r} takes {field.dtype} of shape ({rows}, {field.width}), not "
            f"{values.dtype} of shape {values.shape}"
        )
    return np.ascontiguousarray(values).view(np.uint8).reshape(rows, field.nbytes)
