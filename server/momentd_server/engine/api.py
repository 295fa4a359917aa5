"""The engine's port: what the dispatcher may ask of it, in domain types. No wire types here.

Guarantees every implementation gives
* All methods block and are thread-safe; the caller's thread does the waiting.
* An update is applied to all its tables or to none. Everything that can fail (unknown table, older
  generation, a row out of range, no room in the cache, a disk error) fails before the first row
  changes.
* Row ids come from memory that a client can still write: they are copied before they are checked,
  and only the copy is used. Gradients, masks, weights and values are read, never trusted as sizes.
* A `ticket` says which numbered request this is: one that an engine has done, and whose outcome
  died with it, is not done again by the next.
* Errors are those of `momentd_wire.errors`; anything else is a fault of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from momentd_server.obs.latency import LatencySummary

if TYPE_CHECKING:
    from momentd_server.engine.sessions import Session, Sessions, Ticket
    from momentd_server.engine.snapshots import SnapshotView
    from momentd_server.rules import SparseAdamHyper
    from momentd_server.schema import FieldSpec, Schema
    from momentd_server.storage.damage import Counts, Damage

Rows = NDArray[np.int64]
Result = Literal["delta", "value", "none"]
OpenMode = Literal["open_or_create", "create", "open"]
# (index into the request's tables, distinct rows finished, distinct rows in all). Called only once
# the request can no longer fail; results up to `rows finished` are in the out arrays by then.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client is told at hello. Constant while the engine runs."""

    store_id: bytes
    engine_epoch: int
    data_dir: str
    cache_bytes: int
    # Most record bytes of one request: a quarter of the cache.
    request_record_bytes: int


@dataclass(frozen=True, slots=True)
class TableView:
    """One table as of one instant."""

    id: int
    generation: int
    # None for a table that belongs to a session.
    name: str | None
    label: str
    run: str
    schema: Schema
    record_bytes: int
    step: int
    update_number: int
    # Most rows of one update, gather or scatter of this table alone.
    request_rows: int
    # Unix time, seconds.
    created_s: float
    # Session id of the owner; None for a named table.
    owner: bytes | None


@dataclass(slots=True)
class TableBatch:
    """The part of an update that concerns one table; n = len(rows).

    Arrays are C-contiguous; they may be views of client memory. `grads` and `weights` have the
    state's dtype. The out arrays have room for min(n, table rows) rows; the engine writes the
    first m = distinct rows of each, and makes those it needs that are None.
    """

    id: int
    generation: int
    # None: the table's counter + 1.
    step: int | None
    expected_update_number: int | None
    hyper: SparseAdamHyper
    result: Result
    rows: Rows  # (n,), untrusted, duplicates allowed
    grads: NDArray[np.floating]  # (n, width)
    mask: NDArray[np.uint8] | None = None  # (n, width)
    weights: NDArray[np.floating] | None = None  # (n, width)
    out_rows: Rows | None = None  # (>= m,)
    out_values: NDArray[np.floating] | None = None  # (>= m, width)
    out_factors: NDArray[np.floating] | None = None  # (>= m,)


@dataclass(frozen=True, slots=True)
class TableOutcome:
    """What an update did to one table. Arrays are the first m rows of the out arrays."""

    step: int
    update_number: int
    rows: int  # m
    out_rows: Rows  # (m,), ascending
    out_values: NDArray[np.floating] | None  # (m, width); None for result "none"
    out_factors: NDArray[np.floating] | None  # (m,); None for rules without factors


@dataclass(frozen=True, slots=True)
class GatherOutcome:
    """Fields of rows as of one instant, in the order asked for."""

    step: int
    update_number: int
    fields: tuple[FieldSpec, ...]
    values: list[np.ndarray]  # one (n, field width) for each field


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """The engine's share of `Totals`; units as there. Counters count since the engine started."""

    state: Literal["starting", "serving", "draining", "failed"]
    cache_bytes: int
    cache_used_bytes: int = 0
    slabs: int = 0
    slabs_free: int = 0
    frames: int = 0
    frames_dirty: int = 0
    location_bytes: int = 0
    space_bytes: int = 0
    segments: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    page_cache_bytes: int = 0
    direct_io: bool = False
    # Seconds an orderly stop would need for writing what is dirty.
    drain_s: float = 0.0
    needed_bytes: int = 0
    bytes_compacted: int = 0
    segments_compacted: int = 0
    disk_bytes_written: int = 0
    disk_bytes_written_per_s: float = 0.0
    rows_prefetched: int = 0
    reads_shared: int = 0
    rows_updated: int = 0
    # State "failed": what happened and what to do.
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TableStats:
    """One table's counters; units as in the wire's `TableStats`."""

    table: TableView
    rows_touched: int = 0
    frames: int = 0
    frames_dirty: int = 0
    segments: int = 0
    disk_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    hits: int = 0
    misses: int = 0
    first_touches: int = 0
    updates: int = 0
    rows_updated: int = 0
    rows_per_s: float = 0.0
    update_latency: LatencySummary = field(default_factory=LatencySummary)
    broken: bool = False
    needed_bytes: int = 0
    bytes_compacted: int = 0
    segments_compacted: int = 0
    rows_prefetched: int = 0
    reads_shared: int = 0


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """How far a check of the store is, and what it found since the last step."""

    bytes_done: int
    bytes_total: int
    damages: Sequence[Damage] = ()
    counts: Counts | None = None  # of the last step


@dataclass(frozen=True, slots=True)
class EngineStats:
    totals: EngineTotals
    tables: list[TableStats]


class Engine(Protocol):
    """One store with its cache, rules and sessions."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def sessions(self) -> Sessions:
        """The registry; restored from the catalog by the engine's start, saved by its stop."""
        ...

    @property
    def failure(self) -> str | None:
        """What happened and what to do, after a sync failed; None before.

        It is final: whatever would change something raises StorageFailed, reads go on.
        """
        ...

    def open_table(
        self,
        session: Session,
        *,
        name: str | None,
        label: str,
        schema: Schema,
        run: str,
        mode: OpenMode,
        ticket: Ticket | None = None,
    ) -> tuple[TableView, bool]:
        """Open the named table or create one; True if it was created.

        A table without a name is the session's: its id is added to `session.tables`, and it is
        dropped when the session ends. `mode` concerns named tables only.

        Raises SchemaMismatch, TableInUse ("create"), TableNotFound ("open"), InvalidArgument (a
        schema the rule does not accept), UnsupportedFeature (unknown rule), OutOfMemory,
        LimitExceeded.
        """
        ...

    def get_table(self, *, id: int | None = None, name: str | None = None) -> TableView:  # noqa: A002
        """Describe the table with this id, or this name. Raises TableNotFound. Cheap (< 2 us)."""
        ...

    def list_tables(self, run: str | None = None) -> list[TableView]:
        """All tables, or those of one run, by ascending id."""
        ...

    def drop_tables(
        self,
        session: Session | None,
        *,
        ids: Sequence[int],
        run: str | None,
        force: bool,
        ticket: Ticket | None = None,
    ) -> int:
        """Drop all of `ids` (or all tables of `run`), or none. Returns how many.

        Raises TableNotFound (an id), TableInUse (another live session owns or uses it and `force`
        is off).
        """
        ...

    def clone_table(
        self,
        session: Session,
        *,
        id: int,  # noqa: A002
        generation: int,
        name: str | None,
        label: str,
        run: str,
        ticket: Ticket | None = None,
    ) -> TableView:
        """Make a copy-on-write copy as of one instant. Without a name it is the session's."""
        ...

    def update(
        self,
        tables: Sequence[TableBatch],
        progress: Progress | None = None,
        ticket: Ticket | None = None,
        encode: Callable[[list[TableOutcome]], bytes] | None = None,
    ) -> list[TableOutcome]:
        """Gather, rule, write back, for all tables or none; outcomes in the order of `tables`.

        With a ticket, a killed engine's successor finishes what was begun. `encode` is called once,
        before the first row changes: what it returns is stored as the outcome, with the effect.

        Raises RowOutOfRange, TableNotFound, StateRolledBack (generation, expected number),
        CacheTooSmall, OutOfSpace, StorageFailed, InvalidArgument, DaemonUnavailable (stopping).
        """
        ...

    def gather(
        self,
        *,
        id: int,  # noqa: A002
        generation: int,
        rows: Rows | None,
        range: tuple[int, int] | None,  # noqa: A002
        fields: Sequence[str],
        outs: Sequence[np.ndarray] | None,
    ) -> GatherOutcome:
        """Read fields of `rows` (any order, duplicates allowed), or of rows [start, start+count).

        No `fields`: all, in schema order. `outs`: one (n, field width) array for each field.
        """
        ...

    def scatter(  # noqa: PLR0913
        self,
        *,
        id: int,  # noqa: A002
        generation: int,
        rows: Rows | None,
        range: tuple[int, int] | None,  # noqa: A002
        fields: Sequence[str],
        values: Sequence[np.ndarray],
        step: int | None,
        ticket: Ticket | None = None,
        encode: Callable[[int, int], bytes] | None = None,
    ) -> tuple[int, int]:
        """Write fields of distinct rows as they are; returns (step, update number) after it.

        `ticket` and `encode` (of those two numbers) as in `update`.

        Raises InvalidArgument for a duplicate row.
        """
        ...

    def prefetch(self, *, id: int, generation: int, rows: Rows) -> int:  # noqa: A002
        """Start reading rows that are on disk; returns how many will be read, at once."""
        ...

    def flush(self, ids: Sequence[int]) -> int:
        """Make tables (none named: all) durable as they are now; returns record bytes written."""
        ...

    def create_snapshot(
        self, tables: Sequence[tuple[int, int]], *, run: str | None, name: str | None, pinned: bool
    ) -> tuple[SnapshotView, bool, int]:
        """One consistent cut of tables (id, generation), or of all tables of a run.

        Returns (snapshot, whether it is new, bytes written). Durable on return; updates go on
        meanwhile. If nothing has changed since a snapshot of the same tables, that is returned.

        Raises TableNotFound, TableInUse (the name), OutOfSpace, StorageFailed.
        """
        ...

    def list_snapshots(self, run: str | None = None) -> list[SnapshotView]:
        """All snapshots, or those of one run, oldest first."""
        ...

    def get_snapshot(
        self,
        *,
        id: bytes | None = None,  # noqa: A002
        name: str | None = None,
    ) -> SnapshotView:
        """The one with this name, or the newest with a table of this id. SnapshotNotFound."""
        ...

    def delete_snapshots(self, names: Sequence[str], ticket: Ticket | None = None) -> int:
        """All of these or none; returns the bytes that nothing else needed. SnapshotNotFound."""
        ...

    def restore_table(
        self,
        session: Session,
        *,
        id: bytes,  # noqa: A002
        name: str | None,
        label: str | None,
        run: str,
        replace: bool,
        ticket: Ticket | None = None,
    ) -> TableView:
        """A new table with the content of a snapshot's table (its 16-byte id).

        Without a name it is the session's. `replace`: a table of that name that no session uses
        goes. Raises SnapshotNotFound, TableInUse, CorruptRecord.
        """
        ...

    def stats(self, run: str | None = None) -> EngineStats:
        """What the engine holds and did. Cheap enough to be called every 0.1 s."""
        ...

    def verify(self, bytes_per_s: int) -> Iterator[VerifyStep]:
        """Compare everything on disk with its checksums while the engine works; 0: no limit.

        Raises DaemonUnavailable when the engine stops meanwhile.
        """
        ...

    def end_session(self, session_id: bytes) -> None:
        """Drop the session's unnamed tables. Unknown ids are ignored (it may be repeated)."""
        ...

    def progress(self) -> int | None:
        """A number that changes as work gets on; None if there is none. Never waits."""
        ...

    def tidy(self) -> None:
        """Give back memory that no request needed lately. To be called every few seconds."""
        ...

    def stop(self, *, discard: bool = False) -> None:
        """Make everything durable (or, with `discard`, nothing) and save sessions; idempotent.

        Requests in work are finished; later ones raise DaemonUnavailable.
        """
        ...

    def close(self) -> None:
        """Release memory, threads and the data directory after `stop`."""
        ...
