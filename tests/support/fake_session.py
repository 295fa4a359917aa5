"""A second implementation of the client port: sessions, streams and tables in this process.

`FakeDaemon` holds tables as numpy arrays and applies sparse_adam in float32 or float64 with torch's
order of operations. It can be told to refuse, to go away, and to report results in small ranges.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from momentd import snapshots
from momentd._stream import UpdateInput, UpdateResult, UpdateSpec
from momentd.errors import (
    DaemonUnavailable,
    InvalidArgument,
    MomentdError,
    RowOutOfRange,
    SnapshotNotFound,
    StateRolledBack,
    TableNotFound,
)
from momentd.snapshots import Snapshot
from momentd_wire import codec
from momentd_wire.v1 import momentd_pb2 as pb


def sparse_adam(m, v, grad, mask, hyper, step):
    """One update of rows (n, d) in place; returns what to add to the weights."""
    kind = m.dtype.type
    g = -grad if hyper.maximize else grad
    add_m = (g - m) * kind(1 - hyper.beta1)
    add_v = (g * g - v) * kind(1 - hyper.beta2)
    size = hyper.lr * math.sqrt(1 - hyper.beta2**step) / (1 - hyper.beta1**step)
    delta = (add_m + m) / (np.sqrt(add_v + v) + kind(hyper.eps)) * kind(-size)
    present = np.ones(m.shape, bool) if mask is None else mask != 0
    m += np.where(present, add_m, kind(0))
    v += np.where(present, add_v, kind(0))
    return np.where(present, delta, kind(0))


@dataclass
class Stored:
    id: int
    owner: object
    label: str
    schema: Any
    fields: dict[str, np.ndarray]
    step: int = 0
    update_number: int = 0
    generation: int = 1


@dataclass
class FakeSnapshot:
    message: pb.Snapshot
    tables: dict[bytes, Stored]


@dataclass
class FakeDaemon:
    """What a daemon holds, and how it fails: see the fields after `outcomes`.

    `down`: nobody answers. `lose_replies`: so many outcomes do not arrive. `refuse`: errors that
    the next updates get. `progress_rows`: length of the ranges in which results appear.
    """

    tables: dict[int, Stored] = field(default_factory=dict)
    snapshots: dict[str, FakeSnapshot] = field(default_factory=dict)
    data_dir: str = "/fake"
    outcomes: dict[tuple[int, int], Any] = field(default_factory=dict)
    down: bool = False
    lose_replies: int = 0
    refuse: list[Exception] = field(default_factory=list)
    progress_rows: int = 1 << 30
    updates: int = 0
    scattered_rows: int = 0
    gathered_rows: int = 0
    log: list[str] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _streams: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def session(self, address: str | None = None, run: str | None = None) -> FakeSession:
        return FakeSession(self, address, run)

    def get(self, table: FakeTable) -> Stored:
        try:
            return self.tables[table.id]
        except KeyError:
            raise TableNotFound(f"no table {table.id}") from None

    def reach(self, what: str) -> None:
        if self.down:
            raise DaemonUnavailable(f"{what}: the daemon does not answer")
        self.log.append(what)
        if what == "update" and self.refuse:
            raise self.refuse.pop(0)

    # ------------------------------------------------------------------ update, all or nothing

    def apply(self, specs: Sequence[UpdateSpec], inputs: Sequence[UpdateInput]):
        self.reach("update")
        stored = [self.get(spec.table) for spec in specs]
        plans = [_plan(*each) for each in zip(stored, specs, inputs, strict=True)]
        results = [_run(*each) for each in zip(stored, specs, plans, strict=True)]
        self.updates += 1
        return results


def _plan(table: Stored, spec: UpdateSpec, given: UpdateInput):
    """Check everything, sum duplicates in order of position. Changes nothing."""
    if spec.expected_update_number not in {None, table.update_number}:
        raise StateRolledBack(f"table {table.id} is at update {table.update_number}")
    rows, grads = given.rows.copy(), given.grads
    bad = np.flatnonzero((rows < 0) | (rows >= table.schema.rows))
    if bad.size:
        at = int(bad[0])
        raise RowOutOfRange(f"row {rows[at]} at position {at}", row=rows[at], position=at)
    unique, place = np.unique(rows, return_inverse=True)
    summed = np.zeros((len(unique), grads.shape[1]), grads.dtype)
    np.add.at(summed, place, grads)
    mask = None
    if given.mask is not None:
        mask = np.zeros(summed.shape, np.uint8)
        np.maximum.at(mask, place, given.mask)
    return unique, summed, mask


def _run(table: Stored, spec: UpdateSpec, plan) -> UpdateResult:
    rows, grads, mask = plan
    step = spec.step if spec.step is not None else table.step + 1
    m, v = table.fields["exp_avg"][rows], table.fields["exp_avg_sq"][rows]
    delta = sparse_adam(m, v, grads, mask, spec.hyper, step)
    table.fields["exp_avg"][rows], table.fields["exp_avg_sq"][rows] = m, v
    table.step, table.update_number = step, table.update_number + 1
    return UpdateResult(step, table.update_number, rows, delta)


class FakeTable:
    def __init__(self, session: FakeSession, stored: Stored) -> None:
        self._session = session
        self._daemon = session.daemon
        self.id = stored.id
        self.generation = stored.generation
        self.label = stored.label
        self.rows = stored.schema.rows
        self.width = stored.schema.width
        self.schema = stored.schema
        self.step = stored.step
        self.update_number = stored.update_number

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(codec.to_numpy(self.schema.fields[0].dtype))

    def refresh(self) -> FakeTable:
        stored = self._daemon.get(self)
        self.step, self.update_number = stored.step, stored.update_number
        return self

    def gather(self, rows=None, fields=None):
        self._daemon.reach("gather")
        stored = self._daemon.get(self)
        where = slice(None) if rows is None else rows
        names = list(stored.fields) if fields is None else fields
        self._daemon.gathered_rows += self.rows if rows is None else len(rows)
        self.step, self.update_number = stored.step, stored.update_number
        if isinstance(names, str):
            return np.array(stored.fields[names][where])
        return {name: np.array(stored.fields[name][where]) for name in names}

    def scatter(self, rows=None, *, step=None, **values) -> None:
        self._daemon.reach("scatter")
        stored = self._daemon.get(self)
        where = np.arange(self.rows) if rows is None else rows
        for name, value in values.items():
            stored.fields[name][where] = value
        stored.step = stored.step if step is None else step
        stored.update_number += 1
        self._daemon.scattered_rows += len(where)
        self.refresh()

    def drop(self, force: bool = False) -> None:
        self._session.drop_tables([self.id])


class FakeSession:
    def __init__(self, daemon: FakeDaemon, address: str | None, run: str | None) -> None:
        self.daemon = daemon
        self.address = address
        self.run = run
        self.is_open = False

    @property
    def where(self) -> str:
        return "fake:" if self.is_open else "(not connected)"

    def _reach(self, what: str) -> None:
        self.daemon.reach(what)
        self.is_open = True

    def open_table(self, schema, *, name=None, label="", mode=None) -> FakeTable:
        self._reach("open_table")
        fields = {
            spec.name: np.full((schema.rows, spec.width), spec.initial, codec.to_numpy(spec.dtype))
            for spec in schema.fields
        }
        stored = Stored(next(self.daemon._ids), self, label, schema, fields)
        self.daemon.tables[stored.id] = stored
        return FakeTable(self, stored)

    def clone_table(self, table: FakeTable, *, name=None, label="") -> FakeTable:
        self._reach("clone_table")
        old = self.daemon.get(table)
        fields = {name: value.copy() for name, value in old.fields.items()}
        new = Stored(next(self.daemon._ids), self, label, old.schema, fields, old.step)
        self.daemon.tables[new.id] = new
        return FakeTable(self, new)

    @property
    def hello(self) -> pb.HelloReply:
        return pb.HelloReply(data_dir=self.daemon.data_dir)

    def create_snapshot(self, tables, *, run, name, pinned) -> Snapshot:
        assert run is None
        self._reach("create_snapshot")
        stored = sorted((self.daemon.get(table) for table in tables), key=lambda each: each.id)
        entries = [
            pb.TableSnapshot(
                id=_content_id(each), label=each.label, schema=each.schema, step=each.step,
                update_number=each.update_number, table_id=each.id,
            )
            for each in stored
        ]  # fmt: skip
        for known in reversed(self.daemon.snapshots.values()):
            if list(known.message.tables) == entries and name in {None, known.message.name}:
                return snapshots.from_wire(known.message)
        name = name or f"s{next(self.daemon._ids)}"
        message = pb.Snapshot(name=name, run=self.run, pinned=pinned, tables=entries, bytes=1)
        copies = {_content_id(each): _copied(each) for each in stored}
        self.daemon.snapshots[name] = FakeSnapshot(message, copies)
        return snapshots.from_wire(message)

    def find_snapshot(self, snapshot_id: bytes) -> Snapshot:
        self._reach("find_snapshot")
        return snapshots.from_wire(self._find(snapshot_id).message)

    def _find(self, snapshot_id: bytes) -> FakeSnapshot:
        for known in reversed(self.daemon.snapshots.values()):
            if snapshot_id in known.tables:
                return known
        raise SnapshotNotFound(f"no snapshot {snapshot_id.hex()}")

    def delete_snapshots(self, names) -> int:
        self._reach("delete_snapshots")
        for name in names:
            if name not in self.daemon.snapshots:
                raise SnapshotNotFound(f"no snapshot {name}")
            del self.daemon.snapshots[name]
        return 0

    def restore_table(self, snapshot_id, *, name=None, label=None, replace=False) -> FakeTable:
        self._reach("restore_table")
        old = _copied(self._find(snapshot_id).tables[snapshot_id])
        old.id, old.owner, old.label = next(self.daemon._ids), self, label or old.label
        self.daemon.tables[old.id] = old
        return FakeTable(self, old)

    def drop_tables(self, ids=(), *, run=None, force=False) -> int:
        self._reach("drop_tables")
        ids = list(ids)
        if missing := [each for each in ids if each not in self.daemon.tables]:
            raise TableNotFound(f"no tables {missing}")
        for each in ids:
            del self.daemon.tables[each]
        return len(ids)

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def on_arena(self, mapped: Callable[[int, int], None], unmapped=None) -> None:
        """No arenas here: memory is on the heap, as on the gRPC plane."""


def _copied(stored: Stored) -> Stored:
    return replace(stored, fields={name: value.copy() for name, value in stored.fields.items()})


def _content_id(stored: Stored) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(stored.schema.SerializeToString(deterministic=True))
    digest.update(str(stored.step).encode())
    for value in stored.fields.values():
        digest.update(value.tobytes())
    return digest.digest()


class FakeStream:
    def __init__(self, session: FakeSession) -> None:
        self.session = session
        self.id = next(session.daemon._streams)
        self.number = 0
        self.current: FakeUpdate | None = None

    @property
    def pending(self) -> FakeUpdate | None:
        return self.current

    def new_update(self, specs, *, report_progress: bool = True) -> FakeUpdate:
        del report_progress  # one range for each table is progress too
        if self.current is not None:
            raise InvalidArgument("complete and close the pending update first")
        self.session._reach("new_update")
        return FakeUpdate(self, tuple(specs))


class FakeUpdate:
    def __init__(self, stream: FakeStream, specs: tuple[UpdateSpec, ...]) -> None:
        self._stream = stream
        self._daemon = stream.session.daemon
        self.specs = specs
        self.inputs = tuple(_room(spec) for spec in specs)
        self.number: int | None = None
        self._closed = False
        self._heard = False

    @property
    def _key(self) -> tuple[int, int]:
        assert self.number is not None
        return self._stream.id, self.number

    @property
    def _decided(self) -> bool:
        """Whether the daemon has applied or refused it; the client may not have heard of it."""
        return self.number is not None and self._key in self._daemon.outcomes

    @property
    def done(self) -> bool:
        return self._heard

    def send(self) -> None:
        if self.number is None:
            self._stream.current = self
            self.number = self._stream.number + 1
        self._ask()

    def _ask(self) -> None:
        """The daemon's half: once for each number."""
        if self._daemon.down:
            return
        if not self._decided:
            try:
                outcome = self._daemon.apply(self.specs, self.inputs)
            except DaemonUnavailable:
                return
            except MomentdError as error:
                outcome = error
            self._daemon.outcomes[self._key] = outcome

    def results(self) -> list[UpdateResult]:
        self._ask()
        if self._daemon.lose_replies:
            self._daemon.lose_replies -= 1
            raise DaemonUnavailable("the reply got lost")
        if not self._decided:
            raise DaemonUnavailable("nobody answered in time")
        outcome = self._daemon.outcomes[self._key]
        self._heard = True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def progress(self):
        for index, result in enumerate(self.results()):
            size = self._daemon.progress_rows
            for start in range(0, len(result.rows), size):
                yield index, start, min(start + size, len(result.rows))

    def output(self, index: int):
        result = self.results()[index]
        return result.rows, result.values

    def close(self) -> None:
        if self._closed or self.number is None:
            self._closed = True
            return
        if not self.done:
            raise InvalidArgument("the outcome is open")
        self._stream.number = self.number
        self._stream.current = None
        self._closed = True


def _room(spec: UpdateSpec) -> UpdateInput:
    shape = (spec.count, spec.table.width)
    return UpdateInput(
        np.empty(spec.count, np.int64),
        np.empty(shape, spec.dtype),
        np.empty(shape, np.uint8) if spec.masked else None,
    )
