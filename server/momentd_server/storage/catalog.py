"""The catalog: what exists. LMDB, one environment, one writer thread, nothing per step.

Everything is read once, at the start, and kept as values; LMDB is written, never searched. So no
read transaction can be in the way when the map has to grow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from momentd_server.storage import records
from momentd_server.storage.catalog_check import Need, check_entries
from momentd_server.storage.catalog_file import CatalogFile, Kind, Write
from momentd_server.storage.damage import Damage
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.failure import StorageFailure
from momentd_server.storage.location import GENERATION_SHIFT
from momentd_server.storage.records import (
    Manifest,
    SessionRecord,
    SnapshotRecord,
    StreamRecord,
    TableRecord,
    TableSnapshot,
)
from momentd_wire.errors import MomentdError, SchemaMismatch, StorageFailed

__all__ = [
    "Catalog",
    "Change",
    "DropSession",
    "DropSnapshot",
    "DropTable",
    "Manifest",
    "Put",
    "SessionRecord",
    "SnapshotRecord",
    "Stopped",
    "StreamRecord",
    "TableRecord",
    "TableSnapshot",
]

_Result = TypeVar("_Result")

# How many ids one durable transaction reserves; a restart skips what was left of them.
_BLOCKS: Final = {"table": 64, "family": 64, "segment": 1024}
_MOST_GENERATIONS: Final = 1 << (64 - int(GENERATION_SHIFT))


@dataclass(frozen=True, slots=True)
class Put:
    """Add or replace a record."""

    record: TableRecord | SessionRecord | SnapshotRecord


@dataclass(frozen=True, slots=True)
class DropTable:
    id: int


@dataclass(frozen=True, slots=True)
class DropSession:
    session: bytes


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    name: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Everything is in the catalog. The next start's epoch ends it, durably, before it serves."""


Change = Put | DropTable | DropSession | DropSnapshot | Stopped


@dataclass(slots=True)
class _State:
    """The catalog's contents. Changed only by the writer thread, after its commit."""

    tables: dict[int, TableRecord] = field(default_factory=dict[int, TableRecord])
    sessions: dict[bytes, SessionRecord] = field(default_factory=dict[bytes, SessionRecord])
    snapshots: dict[str, SnapshotRecord] = field(default_factory=dict[str, SnapshotRecord])
    # Family id -> last generation given out. Kept for dropped families until the process ends:
    # a clone that is being made may still need it.
    generations: dict[int, int] = field(default_factory=dict[int, int])
    # Counter -> ids below this are, or may have been, given out.
    reserved: dict[str, int] = field(default_factory=dict[str, int])


class Catalog:
    """All methods are thread-safe and block until what they did is durable."""

    def __init__(self, file: CatalogFile, state: _State, failure: StorageFailure) -> None:
        self.failure = failure  # shared with the segments
        self._file = file
        self._state = state
        # Nothing was served since the last orderly stop: what the catalog says is complete.
        self.stopped_in_order = state.reserved.get("stopped") == state.reserved.get("epoch", 0)
        self._next = {counter: state.reserved.get(counter, 1) for counter in _BLOCKS}
        self._lock = threading.Lock()  # guards the dicts of _state and _next
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="catalog-writer")

    @classmethod
    def open(cls, datadir: DataDir, failure: StorageFailure | None = None) -> Catalog:
        """Open or create. Raises Incompatible, CorruptRecord, StorageFailed, OutOfSpace.

        Every entry is read and checked; a catalog that is refused is left as it was. After a
        `failure` that an earlier engine met it is only read.
        """
        failure = failure or StorageFailure()
        file = CatalogFile.open(datadir)
        try:
            catalog = cls(file, _load(file), failure)
            if failure.text is None:
                catalog._forget_empty_families()
        except BaseException:
            file.close()
            raise
        return catalog

    @property
    def epoch(self) -> int:
        """The number of the last engine start."""
        return self._state.reserved.get("epoch", 0)

    def commit(self, changes: Sequence[Change]) -> None:
        """One durable transaction: all changes or none.

        Raises SchemaMismatch (a name that another table has), OutOfSpace (nothing changed),
        StorageFailed (final: every later call raises it too).
        """
        self._in_writer(lambda: self._commit(changes))

    def tables(self) -> list[TableRecord]:
        """All tables, by id."""
        with self._lock:
            return sorted(self._state.tables.values(), key=lambda table: table.id)

    def sessions(self) -> list[SessionRecord]:
        with self._lock:
            return list(self._state.sessions.values())

    def snapshots(self) -> list[SnapshotRecord]:
        """All snapshots, oldest first."""
        with self._lock:
            return sorted(self._state.snapshots.values(), key=lambda each: each.created_s)

    def allocate_table(self) -> int:
        """A table id never given out before, from 1."""
        return self._allocate("table")

    def allocate_family(self) -> int:
        """A family id never given out before, from 1."""
        return self._allocate("family")

    def allocate_segment(self) -> int:
        """A segment id never given out before, from 1; unique over all families."""
        return self._allocate("segment")

    def allocate_generation(self, family_id: int) -> int:
        """A generation number never given out in that family, from 1."""
        return self._in_writer(lambda: self._next_generation(family_id))

    def next_epoch(self) -> int:
        """The number of this engine start, from 1."""
        return self._in_writer(self._next_epoch)

    def check(self) -> tuple[Contents, list[Damage]]:
        """What it holds, and what of its file does not match that."""
        return self._in_writer(self._check)

    def close(self) -> None:
        """Finish what was handed to the writer, then close the file."""
        self._writer.shutdown()
        self._file.close()

    # -- in the writer thread ---------------------------------------------------------------

    def _in_writer(self, work: Callable[[], _Result]) -> _Result:
        return self._writer.submit(work).result()

    def _write(self, writes: Sequence[Write]) -> None:
        self.failure.refuse()
        try:
            self._file.write(writes)
        except StorageFailed as error:
            # LMDB does not say whether its sync failed: nobody knows what is on disk.
            raise self.failure.declare(error.message) from error

    def _check(self) -> tuple[Contents, list[Damage]]:
        state, path = self._state, self._file.path
        contents = _contents(path, state)
        try:
            self._file.check_pages()
            found = _load(self._file)
        except MomentdError as error:
            return contents, [Damage(error.message, str(path))]
        damages = check_entries(path, contents.tables, contents.needs())
        if (found.tables, found.snapshots, found.sessions) != (
            state.tables,
            state.snapshots,
            state.sessions,
        ):
            what = "the file has other entries than the daemon committed"
            damages.append(Damage(f"{what}: see the kernel log (dmesg)", str(path)))
        return contents, damages

    def _commit(self, changes: Sequence[Change]) -> None:
        tables = dict(self._state.tables)
        sessions = dict(self._state.sessions)
        snapshots = dict(self._state.snapshots)
        writes: list[Write] = []
        for change in changes:
            if isinstance(change, Put):
                writes += self._put(change.record, tables, sessions, snapshots)
            elif isinstance(change, DropSnapshot):
                if snapshots.pop(change.name, None) is not None:
                    writes.append((Kind.SNAPSHOT, change.name.encode(), None))
            elif isinstance(change, Stopped):
                epoch = self._state.reserved.get("epoch", 0)
                writes.append((Kind.COUNTER, b"stopped", {"value": epoch}))
            elif isinstance(change, DropTable):
                if tables.pop(change.id, None) is not None:
                    writes.append((Kind.TABLE, _key(change.id), None))
            elif sessions.pop(change.session, None) is not None:
                writes.append((Kind.SESSION, change.session, None))
        _check_names(tables)
        left = _families(tables, snapshots)
        gone = _families(self._state.tables, self._state.snapshots) - left
        writes += [(Kind.FAMILY, _key(family), None) for family in gone]
        if writes:
            self._write(writes)
        with self._lock:
            self._state.tables = tables
            self._state.sessions = sessions
            self._state.snapshots = snapshots

    def _put(
        self,
        record: TableRecord | SessionRecord | SnapshotRecord,
        tables: dict[int, TableRecord],
        sessions: dict[bytes, SessionRecord],
        snapshots: dict[str, SnapshotRecord],
    ) -> list[Write]:
        if isinstance(record, SnapshotRecord):
            snapshots[record.name] = record
            return [(Kind.SNAPSHOT, record.name.encode(), records.snapshot_body(record))]
        if isinstance(record, SessionRecord):
            sessions[record.session] = record
            return [(Kind.SESSION, record.session, records.session_body(record))]
        tables[record.id] = record
        table_write = (Kind.TABLE, _key(record.id), records.table_body(record))
        return [table_write, self._family_write(record)]

    def _family_write(self, table: TableRecord) -> Write:
        known = self._state.generations.get(table.family, 0)
        last = max(known, table.manifest.generation)
        self._state.generations[table.family] = last
        return (Kind.FAMILY, _key(table.family), {"generation": last})

    def _next_generation(self, family_id: int) -> int:
        last = self._state.generations.get(family_id, 0)
        if last + 1 >= _MOST_GENERATIONS:
            raise MomentdError(
                f"family {family_id} has used all {_MOST_GENERATIONS} generations: save the state "
                "with full_state_dict() and load it into a new optimizer"
            )
        # The first one needs no commit: its table's does it, and family ids are never reused.
        if last:
            self._write([(Kind.FAMILY, _key(family_id), {"generation": last + 1})])
        self._state.generations[family_id] = last + 1
        return last + 1

    def _next_epoch(self) -> int:
        epoch = self._state.reserved.get("epoch", 0) + 1
        self._write([(Kind.COUNTER, b"epoch", {"value": epoch})])
        self._state.reserved["epoch"] = epoch
        return epoch

    def _allocate(self, counter: str) -> int:
        while True:
            with self._lock:
                given = self._next[counter]
                if given < self._state.reserved.get(counter, 1):
                    self._next[counter] = given + 1
                    return given
            self._in_writer(lambda: self._reserve(counter))

    def _reserve(self, counter: str) -> None:
        with self._lock:
            reserved = self._state.reserved.get(counter, 1)
            if self._next[counter] < reserved:
                return  # another thread was faster
        reserved += _BLOCKS[counter]
        self._write([(Kind.COUNTER, counter.encode(), {"value": reserved})])
        with self._lock:
            self._state.reserved[counter] = reserved

    def _forget_empty_families(self) -> None:
        """Families of tables that were never committed, or of drops: their ids are not reused."""
        used = _families(self._state.tables, self._state.snapshots)
        empty = self._state.generations.keys() - used
        if empty:
            self._in_writer(
                lambda: self._write([(Kind.FAMILY, _key(family), None) for family in empty])
            )


@dataclass(frozen=True, slots=True)
class Contents:
    """A catalog as it was read, not opened for use."""

    path: Path
    tables: list[TableRecord]
    snapshots: list[SnapshotRecord]
    generations: dict[int, int]  # family id -> last generation given out

    def needs(self) -> list[Need]:
        """Every manifest of tables and snapshots, with whose it is."""
        found = [
            Need(table.family, table.layout, table.schema, table.manifest, table.id)
            for table in self.tables
        ]
        for snapshot in self.snapshots:
            found += [
                Need(part.family, part.layout, part.schema, part.manifest, None, snapshot.name,
                     part.id)
                for part in snapshot.tables
            ]  # fmt: skip
        return found


def read_contents(datadir: DataDir) -> Contents:
    """Read and check every entry; not a byte changes. Raises CorruptRecord, Incompatible."""
    file = CatalogFile.open_for_reading(datadir)
    try:
        state = _load(file)
    finally:
        file.close()
    return _contents(file.path, state)


def _contents(path: Path, state: _State) -> Contents:
    return Contents(
        path, list(state.tables.values()), list(state.snapshots.values()), dict(state.generations)
    )


def _load(file: CatalogFile) -> _State:
    state = _State()
    for kind, key, body in file.entries():
        match kind:
            case Kind.TABLE:
                table = records.table_of(body)
                state.tables[table.id] = table
            case Kind.SNAPSHOT:
                snapshot = records.snapshot_of(body)
                state.snapshots[snapshot.name] = snapshot
            case Kind.SESSION:
                state.sessions[key] = records.session_of(key, body)
            case Kind.FAMILY:
                state.generations[int.from_bytes(key, "big")] = body["generation"]
            case Kind.COUNTER:
                state.reserved[key.decode()] = body["value"]
    return state


def _families(tables: dict[int, TableRecord], snapshots: dict[str, SnapshotRecord]) -> set[int]:
    """Those that somebody needs."""
    of_snapshots = {table.family for each in snapshots.values() for table in each.tables}
    return {table.family for table in tables.values()} | of_snapshots


def _check_names(tables: dict[int, TableRecord]) -> None:
    owners: dict[str, int] = {}
    for table in tables.values():
        if table.name is None:
            continue
        other = owners.setdefault(table.name, table.id)
        if other != table.id:
            raise SchemaMismatch(
                f"table {other} is called {table.name!r} already: choose another name, or drop it",
                name=table.name,
                table=other,
            )


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")
