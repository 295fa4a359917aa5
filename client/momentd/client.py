"""The service itself, without an optimizer: `momentd.connect()`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import DTypeLike

from momentd import rules
from momentd._session import Session
from momentd.snapshots import Snapshot, TableSnapshot
from momentd.table import Table
from momentd_wire.errors import InvalidArgument
from momentd_wire.v1 import momentd_pb2 as pb

_MODES: Final = {
    "open_or_create": pb.OpenTableRequest.MODE_OPEN_OR_CREATE,
    "create": pb.OpenTableRequest.MODE_CREATE,
    "open": pb.OpenTableRequest.MODE_OPEN,
}


def connect(address: str | None = None, run: str | None = None) -> Client:
    """A client of a daemon, which is found, or started, on first use.

    Args:
        address: "unix:PATH", "grpc+unix:PATH" or "HOST:PORT"; default: what `momentd.init` was
            told, $MOMENTD_ADDRESS, this user's daemon, the machine's, a new one.
        run: A label of the experiment, for people; default: program, host, start time.
    """
    return Client(Session(address, run))


class Client:
    """A session of its own with a daemon. Thread-safe; a context manager; may be pickled.

    Leaving the context (or `close`) ends the session and drops its unnamed tables.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.session})"

    def __reduce__(self) -> tuple[Any, ...]:
        return connect, (self.session.address, self.session.run)

    def close(self) -> None:
        """End the session. The client may be used again; that is a new session."""
        self.session.close()

    def open_table(
        self,
        name: str | None,
        *,
        rows: int,
        dim: int,
        rule: rules.Rule | None = None,
        dtype: DTypeLike = np.float32,
        label: str = "",
        mode: Literal["open_or_create", "create", "open"] = "open_or_create",
    ) -> Table:
        """Open a named table, or create it.

        Args:
            name: None for a table of this session alone, which ends with it.
            rows: Row ids are in [0, rows).
            dim: Elements of one row of the parameter and of its gradient.
            rule: How rows are updated; default: `momentd.rules.SparseAdam()`.
            dtype: Of the state: float32 or float64.
            label: For people.
            mode: "create" fails if the name is taken, "open" if it is not.

        Raises:
            SchemaMismatch: The name exists with another shape, dtype or rule.
            TableInUse, TableNotFound: As `mode` says.
            OutOfMemory: 12 bytes a row do not fit.
        """
        if mode not in _MODES:
            raise InvalidArgument(f"mode is {mode!r}, it must be one of {', '.join(_MODES)}")
        schema = (rule or rules.SparseAdam()).schema(rows, dim, dtype)
        return self.session.open_table(schema, name=name, label=label, mode=_MODES[mode])

    def get_table(self, name: str | None = None, *, id: int | None = None) -> Table:  # noqa: A002
        """A handle of an existing table. Raises TableNotFound."""
        if (name is None) == (id is None):
            raise InvalidArgument("say which table: its name, or id=")
        return self.session.get_table(id=id, name=name)

    def list_tables(self, run: str | None = None) -> list[Table]:
        """Handles of all tables, or of one run's."""
        return self.session.list_tables(run)

    def drop(
        self, tables: Table | Iterable[Table] = (), *, run: str | None = None, force: bool = False
    ) -> int:
        """Drop tables, or all of a run: all or none. Returns how many.

        Raises TableInUse for one that another live session uses, unless `force`.
        """
        chosen = [tables] if isinstance(tables, Table) else list(tables)
        return self.session.drop_tables([table.id for table in chosen], run=run, force=force)

    def snapshot(
        self,
        tables: Table | Iterable[Table] = (),
        *,
        run: str | None = None,
        name: str | None = None,
        pinned: bool = False,
    ) -> Snapshot:
        """Make a durable, consistent snapshot of tables, or of all tables of a run.

        Updates go on meanwhile. If nothing has changed since a snapshot of the same tables, that
        one is returned.

        Args:
            tables: Of which tables.
            run: All tables of this run instead; default: of this client's run.
            name: Unique; default: made of the run and the time.
            pinned: Never deleted by itself (`serve --snapshot-every` prunes its own).

        Raises:
            TableInUse: The name is taken.
            OutOfSpace: Tables might not be able to go on beside it; says what takes most.
            StorageFailed: The disk did not take it.
        """
        chosen = [tables] if isinstance(tables, Table) else list(tables)
        if not chosen and run is None:
            run = self.session.run_label
        return self.session.create_snapshot(chosen, run=run, name=name, pinned=pinned)

    def snapshots(self, run: str | None = None) -> list[Snapshot]:
        """All snapshots, or those of one run, oldest first."""
        return self.session.list_snapshots(run)

    def restore(
        self, snapshot: TableSnapshot | str, name: str | None = None, *, replace: bool = False
    ) -> Table:
        """A new table with the content of a snapshot's table: itself, or its id.

        Args:
            snapshot: `client.snapshots()[-1].tables[0]`, or the 32 hex digits of its id.
            name: None for a table of this session alone.
            replace: A table of that name that no session uses goes.

        Raises SnapshotNotFound, TableInUse, CorruptRecord.
        """
        snapshot_id = snapshot if isinstance(snapshot, str) else snapshot.id
        return self.session.restore_table(bytes.fromhex(snapshot_id), name=name, replace=replace)

    def delete_snapshot(self, *names: str) -> int:
        """Delete snapshots: all or none; returns the bytes that nothing else needed.

        Raises SnapshotNotFound.
        """
        return self.session.delete_snapshots(names)

    def flush(self) -> int:
        """Make all tables durable as they are now; returns the record bytes written."""
        return self.session.flush([])

    def stats(self, run: str | None = None) -> pb.StatsReply:
        """What the daemon holds and does: `.totals`, `.tables`, `.sessions`.

        The fields are described in `momentd.proto`: bytes, counts since the start, seconds.
        """
        request = pb.Request(stats=pb.StatsRequest(run=run))
        return self.session.ask(request, "stats").stats

    def watch_stats(
        self, interval_s: float = 1.0, run: str | None = None
    ) -> Iterator[pb.StatsReply]:
        """The same every `interval_s` seconds, for ever."""
        while True:
            yield self.stats(run)
            time.sleep(interval_s)

    def stop(self, discard: bool = False) -> float:
        """Let the daemon end in an orderly way; returns the seconds it expects to need.

        `discard`: write nothing. Live tables are lost, named ones stay as last committed.
        """
        request = pb.Request(stop=pb.StopRequest(discard=discard))
        return self.session.ask(request, "a stop").stop.drain_s
