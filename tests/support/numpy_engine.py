# ruff: noqa: A002  # the port names arguments after what they are
"""A second implementation of the engine's port: whole tables as numpy arrays, nothing on disk.

It keeps every promise of `engine/api.py` (all or none, private row ids, generations, ownership),
and really computes sparse_adam, in the state's dtype and in torch's order of operations. Hooks let
a test hold a request where a disk would.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

import numpy as np

from momentd_server import rules
from momentd_server.engine.api import (
    EngineInfo,
    EngineStats,
    EngineTotals,
    GatherOutcome,
    TableBatch,
    TableOutcome,
    TableStats,
    TableView,
    VerifyStep,
)
from momentd_server.engine.sessions import Session, Sessions
from momentd_server.engine.snapshots import SnapshotView
from momentd_server.schema import Schema
from momentd_server.storage.catalog import Manifest, SnapshotRecord, TableSnapshot
from momentd_server.storage.damage import Counts
from momentd_wire.errors import (
    CacheTooSmall,
    DaemonUnavailable,
    InvalidArgument,
    RowOutOfRange,
    SchemaMismatch,
    SnapshotNotFound,
    StateRolledBack,
    TableInUse,
    TableNotFound,
)


@dataclass
class NumpyTable:
    view: TableView
    fields: dict[str, np.ndarray]  # (rows, field width) each
    touched: np.ndarray  # bool, (rows,)
    updates: int = 0


class NumpyEngine:
    """One big lock stands for the lane."""

    def __init__(self, *, cache_bytes: int = 1 << 32, max_sessions: int = 256, saved=()) -> None:
        self.info = EngineInfo(
            store_id=os.urandom(16), engine_epoch=1, data_dir="(memory)", cache_bytes=cache_bytes,
            request_record_bytes=cache_bytes // 4,
        )  # fmt: skip
        self.sessions = Sessions(max_sessions=max_sessions)
        self.sessions.restore(saved)
        self.before_update: Callable[[], None] = lambda: None
        self.before_gather: Callable[[], None] = lambda: None
        self.update_calls = 0
        self.failure: str | None = None
        self.stopped: bool | None = None  # whether the stop discarded
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._tables: dict[int, NumpyTable] = {}
        self._snapshots: dict[str, tuple[SnapshotRecord, dict[bytes, NumpyTable]]] = {}

    # ------------------------------------------------------------------------------ tables

    def open_table(self, session, *, name, label, schema: Schema, run, mode, ticket=None):
        rules.get(schema.rule).check_schema(schema)
        with self._lock:
            known = next((t for t in self._tables.values() if name and t.view.name == name), None)
            if known is not None:
                if mode == "create":
                    raise TableInUse(f"table {name!r} exists")
                if known.view.schema != schema:
                    raise SchemaMismatch(f"table {name!r} has another schema")
                return known.view, False
            if name and mode == "open":
                raise TableNotFound(f"there is no table named {name!r}")
            return self._create(session, name, label, schema, run).view, True

    def _create(self, session: Session, name, label, schema: Schema, run) -> NumpyTable:
        table_id = next(self._ids)
        view = TableView(
            id=table_id, generation=1, name=name, label=label, run=run, schema=schema,
            record_bytes=schema.record_bytes, step=0, update_number=0,
            request_rows=self.info.request_record_bytes // schema.record_bytes,
            created_s=time.time(), owner=None if name else session.id,
        )  # fmt: skip
        fields = {
            f.name: np.full((schema.rows, f.width), f.initial, f.dtype) for f in schema.fields
        }
        table = NumpyTable(view, fields, np.zeros(schema.rows, bool))
        self._tables[table_id] = table
        if not name:
            session.tables.add(table_id)
        return table

    def get_table(self, *, id=None, name=None) -> TableView:
        if name is not None:
            for table in list(self._tables.values()):
                if table.view.name == name:
                    return table.view
            raise TableNotFound(f"there is no table named {name!r}")
        return self._table(id).view

    def list_tables(self, run=None) -> list[TableView]:
        with self._lock:
            return [t.view for t in self._tables.values() if run in (None, t.view.run)]

    def drop_tables(self, session, *, ids: Sequence[int], run, force, ticket=None) -> int:
        with self._lock:
            if run is None:
                doomed = [self._table(i) for i in ids]
            else:
                doomed = [t for t in self._tables.values() if t.view.run == run]
            own = session.id if session else None
            for table in doomed:
                if table.view.owner not in (None, own) and not force:
                    raise TableInUse(f"table {table.view.id} belongs to another session")
            self._drop([t.view.id for t in doomed])
            return len(doomed)

    def _drop(self, ids: Sequence[int]) -> None:
        for table_id in ids:
            del self._tables[table_id]
        for session in self.sessions.all():
            session.tables.difference_update(ids)

    def clone_table(self, session, *, id, generation, name, label, run, ticket=None) -> TableView:
        with self._lock:
            source = self._table(id, generation)
            clone = self._create(session, name, label, source.view.schema, run)
            clone.fields = {key: values.copy() for key, values in source.fields.items()}
            clone.touched = source.touched.copy()
            clone.view = changed(clone.view, step=source.view.step)
            return clone.view

    def _table(self, table_id: int, generation: int | None = None) -> NumpyTable:
        table = self._tables.get(table_id)
        if table is None:
            raise TableNotFound(f"there is no table {table_id}")
        if generation not in (None, table.view.generation):
            raise StateRolledBack(f"table {table_id} is of another generation than {generation}")
        return table

    # ------------------------------------------------------------------------------ rows

    def update(
        self, tables: Sequence[TableBatch], progress=None, ticket=None, encode=None
    ) -> list[TableOutcome]:
        self._check_serving()
        # Private copies before any check: the originals are a client's memory.
        rows = [batch.rows.copy() for batch in tables]
        self.before_update()
        with self._lock:
            self.update_calls += 1
            for batch, ids in zip(tables, rows, strict=True):
                self._check(batch, ids)
            outcomes = []
            for index, (batch, ids) in enumerate(zip(tables, rows, strict=True)):
                outcomes.append(self._apply(batch, ids))
                if progress is not None:
                    progress(index, outcomes[-1].rows, outcomes[-1].rows)
            if encode is not None:
                encode(outcomes)
            return outcomes

    def _check(self, batch: TableBatch, ids: np.ndarray) -> None:
        table = self._table(batch.id, batch.generation)
        _check_rows(ids, table.view.schema.rows)
        expected = batch.expected_update_number
        if expected not in (None, table.view.update_number):
            raise StateRolledBack(
                f"table {batch.id} is at update {table.view.update_number}, not {expected}"
            )
        if len(np.unique(ids)) > table.view.request_rows:
            raise CacheTooSmall(f"{len(np.unique(ids))} rows > {table.view.request_rows}")
        if batch.result == "value" and batch.weights is None:
            raise InvalidArgument("result VALUE needs weights")

    def _apply(self, batch: TableBatch, ids: np.ndarray) -> TableOutcome:
        table = self._tables[batch.id]
        view = table.view
        kind = view.schema.state_dtype
        unique, inverse = np.unique(ids, return_inverse=True)
        grads = np.zeros((len(unique), view.schema.width), kind)
        present = np.zeros(grads.shape, bool)
        if batch.mask is None:
            np.add.at(grads, inverse, batch.grads)  # in the order in which they stand
            present[:] = True
        else:
            for position, row in enumerate(inverse):
                mask = batch.mask[position] != 0
                grads[row, mask] += batch.grads[position, mask]
                present[row, mask] = True
        step = view.step + 1 if batch.step is None else batch.step
        delta = self._adam(table, unique, grads, present, batch.hyper, step)
        values = None
        if batch.result == "delta":
            values = delta
        elif batch.result == "value":
            first = {row: position for position, row in reversed(list(enumerate(inverse)))}
            values = batch.weights[[first[r] for r in range(len(unique))]] + delta
        out_rows = _into(batch.out_rows, unique)
        out_values = None if values is None else _into(batch.out_values, values)
        table.touched[unique] = True
        table.updates += 1
        table.view = changed(view, step=step, update_number=view.update_number + 1)
        return TableOutcome(step, table.view.update_number, len(unique), out_rows, out_values, None)

    def _adam(self, table: NumpyTable, unique, grads, present, hyper, step: int) -> np.ndarray:
        kind = grads.dtype.type
        m, v = table.fields["exp_avg"][unique], table.fields["exp_avg_sq"][unique]
        g = -grads if hyper.maximize else grads
        m_new = m + (g - m) * kind(1 - hyper.beta1)
        v_new = v + (g * g - v) * kind(1 - hyper.beta2)
        delta = m_new / (np.sqrt(v_new) + kind(hyper.eps)) * kind(-hyper.step_size(step))
        table.fields["exp_avg"][unique] = np.where(present, m_new, m)
        table.fields["exp_avg_sq"][unique] = np.where(present, v_new, v)
        return np.where(present, delta, kind(0))

    def gather(self, *, id, generation, rows, range, fields, outs) -> GatherOutcome:
        self._check_serving()
        ids = rows.copy() if rows is not None else np.arange(range[0], sum(range))
        self.before_gather()
        with self._lock:
            table = self._table(id, generation)
            _check_rows(ids, table.view.schema.rows)
            specs = (
                tuple(f for name in fields for f in table.view.schema.fields if f.name == name)
                or table.view.schema.fields
            )
            values = [table.fields[spec.name][ids] for spec in specs]
            if outs is not None:
                values = [_into(out, value) for out, value in zip(outs, values, strict=True)]
            return GatherOutcome(table.view.step, table.view.update_number, specs, values)

    def scatter(
        self, *, id, generation, rows, range, fields, values, step, ticket=None, encode=None
    ):
        self._check_serving()
        ids = rows.copy() if rows is not None else np.arange(range[0], sum(range))
        with self._lock:
            table = self._table(id, generation)
            _check_rows(ids, table.view.schema.rows)
            if len(np.unique(ids)) != len(ids):
                raise InvalidArgument("a row is written twice")
            for name, value in zip(fields, values, strict=True):
                table.fields[name][ids] = value
            table.touched[ids] = True
            new_step = table.view.step if step is None else step
            number = table.view.update_number + 1
            table.view = changed(table.view, step=new_step, update_number=number)
            if encode is not None:
                encode(new_step, number)
            return new_step, number

    def prefetch(self, *, id, generation, rows) -> int:
        _check_rows(rows.copy(), self._table(id, generation).view.schema.rows)
        return 0

    def flush(self, ids) -> int:
        return sum(self._table(i).view.record_bytes for i in ids)

    # ------------------------------------------------------------------------------ snapshots

    def create_snapshot(self, tables, *, run, name, pinned):
        self._check_serving()
        with self._lock:
            if run is not None:
                chosen = [t for t in self._tables.values() if t.view.run == run]
            else:
                chosen = [self._table(*each) for each in tables]
            if not chosen:
                raise TableNotFound("there is nothing to make a snapshot of")
            chosen.sort(key=lambda table: table.view.id)
            entries = tuple(_snapshot_of(table) for table in chosen)
            for record, _ in reversed(self._snapshots.values()):
                if record.tables == entries and name in (None, record.name):
                    return self._snapshot_view(record), False, 0
            name = name or f"{run or chosen[0].view.run}-{next(self._ids)}"
            if name in self._snapshots:
                raise TableInUse(f"a snapshot named {name!r} exists already")
            record = SnapshotRecord(name, run or chosen[0].view.run, time.time(), pinned, entries)
            contents = {e.id: _copied(t) for e, t in zip(entries, chosen, strict=True)}
            self._snapshots[name] = (record, contents)
            view = self._snapshot_view(record)
            return view, True, view.nbytes

    def _snapshot_view(self, record: SnapshotRecord) -> SnapshotView:
        nbytes = sum(entry.rows_touched * entry.schema.record_bytes for entry in record.tables)
        return SnapshotView(record, nbytes, nbytes)

    def list_snapshots(self, run=None):
        records = [record for record, _ in self._snapshots.values()]
        return [self._snapshot_view(each) for each in records if run in (None, each.run)]

    def get_snapshot(self, *, id=None, name=None):
        for record, contents in reversed(self._snapshots.values()):
            if name == record.name or id in contents:
                return self._snapshot_view(record)
        raise SnapshotNotFound(f"there is no snapshot {name or id!r}")

    def delete_snapshots(self, names, ticket=None):
        with self._lock:
            freed = sum(self.get_snapshot(name=name).only_bytes for name in names)
            for name in names:
                del self._snapshots[name]
            return freed

    def restore_table(self, session, *, id, name, label, run, replace, ticket=None):
        with self._lock:
            name_of = self.get_snapshot(id=id).record.name
            source = self._snapshots[name_of][1][id]
            known = next((t for t in self._tables.values() if name and t.view.name == name), None)
            if known is not None:
                if not replace:
                    raise TableInUse(f"a table named {name!r} exists already")
                self._drop([known.view.id])
            view = source.view
            table = self._create(
                session, name, view.label if label is None else label, view.schema, run
            )
            copied = _copied(source)
            table.fields, table.touched = copied.fields, copied.touched
            table.view = changed(table.view, step=view.step)
            return table.view

    # ------------------------------------------------------------------------------ life

    def stats(self, run=None) -> EngineStats:
        tables = [
            TableStats(t.view, rows_touched=int(t.touched.sum()), updates=t.updates)
            for t in list(self._tables.values())
            if run in (None, t.view.run)
        ]
        state = "serving" if self.stopped is None else "draining"
        return EngineStats(EngineTotals(state, self.info.cache_bytes), tables)

    def end_session(self, session_id: bytes) -> None:
        with self._lock:
            self._drop([i for i, t in self._tables.items() if t.view.owner == session_id])

    def progress(self) -> None:
        return None

    def tidy(self) -> None:
        """Nothing is kept between requests."""

    def verify(self, bytes_per_s):
        yield VerifyStep(0, 0, counts=Counts(tables=len(self._tables)))

    def stop(self, *, discard: bool = False) -> None:
        with self._lock:
            if self.stopped is None:
                self.stopped = discard

    def close(self) -> None:
        with self._lock:
            self._tables.clear()

    def _check_serving(self) -> None:
        if self.stopped is not None:
            raise DaemonUnavailable("the daemon is stopping")


def _copied(table: NumpyTable) -> NumpyTable:
    fields = {name: values.copy() for name, values in table.fields.items()}
    return NumpyTable(table.view, fields, table.touched.copy())


def _snapshot_of(table: NumpyTable) -> TableSnapshot:
    view = table.view
    digest = hashlib.blake2b(repr((view.schema, view.step)).encode(), digest_size=16)
    for values in table.fields.values():
        digest.update(values.tobytes())
    return TableSnapshot(
        id=digest.digest(), table=view.id, label=view.label, family=view.id, layout=1,
        schema=view.schema, rows_touched=int(table.touched.sum()),
        manifest=Manifest(view.generation, view.step, view.update_number),
    )  # fmt: skip


def _check_rows(ids: np.ndarray, rows: int) -> None:
    bad = (ids < 0) | (ids >= rows)
    if bad.any():
        position = int(bad.argmax())
        raise RowOutOfRange(
            f"row {ids[position]} at position {position} is outside [0, {rows})",
            row=ids[position], position=position,
        )  # fmt: skip


def _into(out: np.ndarray | None, values: np.ndarray) -> np.ndarray:
    """The first len(values) rows of `out`, filled; or the values themselves."""
    if out is None:
        return values
    out[: len(values)] = values
    return out[: len(values)]
