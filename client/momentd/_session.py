"""One connection of this process to a daemon: opened lazily, resumed after a daemon restart."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from momentd import _discovery, snapshots
from momentd._control import Control, NumberedCall
from momentd._stream import Stream
from momentd._transport import Block, Call, ConnectionLost, Hook, Transport
from momentd._waits import Patience, say
from momentd_wire import limits
from momentd_wire.errors import DaemonUnavailable, MomentdError, StateRolledBack, from_wire
from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from momentd.snapshots import Snapshot
    from momentd.table import Table

# Stream numbers: calls of the session itself, then whoever asks.
_CONTROL_STREAM = 1
# Seconds that an `attempt` waits: shorter than what is worth a notice to a person.
_ATTEMPT_S = 1.5

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[tuple[str | None, str | None], Session] = (
    weakref.WeakValueDictionary()
)


class Session:
    """A session of this process. Creating one does nothing; the first call opens it.

    Thread-safe. A forked child that uses it gets a session of its own.
    """

    def __init__(self, address: str | None = None, run: str | None = None) -> None:
        self.address = address
        """As asked for; None: found by `momentd._discovery` on first use."""
        self.run = run
        self.incarnation = 0
        """Counts the sessions that the daemon has opened for this object. One that is resumed is
        the same; after a new one, numbers of streams start again and live tables are gone."""
        self.forks = 0
        """How many forks away from the process that made it."""
        self._hooks: list[tuple[Hook, Hook | None]] = []
        self._stream_numbers = itertools.count(_CONTROL_STREAM + 1)
        self._reset()
        _sessions.add(self)

    def _reset(self) -> None:
        # Guards the fields below while a connection is made. Re-entrant, see Arena._lock.
        self._lock = threading.RLock()
        self._transport: Transport | None = None
        self._hello: pb.HelloReply | None = None
        self._found: _discovery.Found | None = None
        self._control = Control(_CONTROL_STREAM)

    @classmethod
    def shared(cls, address: str | None = None, run: str | None = None) -> Session:
        """This process's session for an address and a run; it lives while somebody holds it."""
        key = (_discovery.asked_for(address), run)
        session = _shared.get(key)
        if session is None:
            # Two threads may get here: the first one's is kept.
            session = _shared.setdefault(key, cls(address, run))
        return session

    def __repr__(self) -> str:
        return f"Session({self.where}, run={self.run!r}, {'open' if self.is_open else 'closed'})"

    def __del__(self) -> None:
        if hasattr(self, "_transport") and self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------------- what it is

    @property
    def is_open(self) -> bool:
        """Whether a connection exists now (in this process)."""
        return self._transport is not None and not self._transport.lost

    @property
    def where(self) -> str:
        """The daemon's address if one was found, else the one asked for, else a remark."""
        if self._found is not None:
            return str(self._found.address)
        return _discovery.asked_for(self.address) or "(not connected)"

    @property
    def hello(self) -> pb.HelloReply:
        """What the daemon said of itself. Opens the session."""
        self.connected()
        if self._hello is None:
            raise DaemonUnavailable(f"the session with {self.where} was closed")
        return self._hello

    # ------------------------------------------------------------------------------- tables

    def open_table(
        self,
        schema: pb.Schema,
        *,
        name: str | None = None,
        label: str = "",
        mode: pb.OpenTableRequest.Mode = pb.OpenTableRequest.MODE_OPEN_OR_CREATE,
    ) -> Table:
        """Open or create a table. Without a name it belongs to this session and ends with it.

        Raises SchemaMismatch, TableInUse, TableNotFound, OutOfMemory.
        """
        request = pb.OpenTableRequest(name=name, label=label, schema=schema, mode=mode)
        return self._make(
            pb.Request(open_table=request),
            lambda reply: self._table(reply.open_table.table),
            named=name is not None,
        )

    def _make(
        self, request: pb.Request, wrap: Callable[[pb.Reply], Table], *, named: bool
    ) -> Table:
        """A call that makes a table and needs nothing that the session has.

        If the session turns out to have ended (the daemon was killed), an unnamed table would have
        ended with it: the next session makes it.
        """
        try:
            return self._control.run(self, request, wrap)
        except StateRolledBack:
            if named:
                raise
            return self._control.run(self, request, wrap)

    def clone_table(self, table: Table, *, name: str | None = None, label: str = "") -> Table:
        """A copy-on-write copy of a table, as of now."""
        source = pb.TableRef(id=table.id, generation=table.generation)
        request = pb.CloneTableRequest(source=source, name=name, label=label)
        return self._control.run(
            self,
            pb.Request(clone_table=request),
            lambda reply: self._table(reply.clone_table.table),
        )

    def get_table(self, *, id: int | None = None, name: str | None = None) -> Table:  # noqa: A002
        """A handle of an existing table. Raises TableNotFound."""
        return self._table(self.describe(id=id, name=name))

    def describe(
        self,
        *,
        id: int | None = None,  # noqa: A002
        name: str | None = None,
    ) -> pb.TableInfo:
        """What the daemon knows of a table. Raises TableNotFound."""
        request = pb.GetTableRequest(name=name) if id is None else pb.GetTableRequest(id=id)
        return self.ask(pb.Request(get_table=request), "a table").get_table.table

    def list_tables(self, run: str | None = None) -> list[Table]:
        """Handles of all tables, or of one run's."""
        request = pb.Request(list_tables=pb.ListTablesRequest(run=run))
        return [self._table(info) for info in self.ask(request, "tables").list_tables.tables]

    def drop_tables(
        self, ids: Iterable[int] = (), *, run: str | None = None, force: bool = False
    ) -> int:
        """Drop tables (all or none); returns how many. Raises TableNotFound, TableInUse."""
        request = pb.DropTableRequest(ids=ids, run=run, force=force)
        if run is None and not request.ids:
            return 0
        return self.change(pb.Request(drop_table=request)).drop_table.dropped

    # ------------------------------------------------------------------------------- snapshots

    @property
    def run_label(self) -> str:
        """The run of tables that do not say another."""
        return self.run if self.run is not None else _discovery.default_run()

    def create_snapshot(
        self, tables: Sequence[Table], *, run: str | None, name: str | None, pinned: bool
    ) -> Snapshot:
        """Of these tables, or of a run. See `Client.snapshot`."""
        refs = [pb.TableRef(id=table.id, generation=table.generation) for table in tables]
        request = pb.CreateSnapshotRequest(tables=refs, run=run, name=name, pinned=pinned)
        return self._control.run(
            self,
            pb.Request(create_snapshot=request),
            lambda reply: snapshots.from_wire(
                reply.create_snapshot.snapshot, reply.create_snapshot.bytes_written
            ),
        )

    def list_snapshots(self, run: str | None = None) -> list[Snapshot]:
        """All snapshots, or those of one run, oldest first."""
        request = pb.Request(list_snapshots=pb.ListSnapshotsRequest(run=run))
        reply = self.ask(request, "snapshots").list_snapshots
        return [snapshots.from_wire(each) for each in reply.snapshots]

    def find_snapshot(self, snapshot_id: bytes) -> Snapshot:
        """The newest snapshot with a table of this id. Raises SnapshotNotFound."""
        request = pb.Request(get_snapshot=pb.GetSnapshotRequest(id=snapshot_id))
        return snapshots.from_wire(self.ask(request, "a snapshot").get_snapshot.snapshot)

    def restore_table(
        self, snapshot_id: bytes, *, name: str | None = None, label: str | None = None,
        replace: bool = False,
    ) -> Table:  # fmt: skip
        """A new table with the content of a snapshot's table. Raises SnapshotNotFound."""
        request = pb.RestoreTableRequest(id=snapshot_id, name=name, label=label, replace=replace)
        return self._make(
            pb.Request(restore_table=request),
            lambda reply: self._table(reply.restore_table.table),
            named=name is not None,
        )

    def delete_snapshots(self, names: Iterable[str]) -> int:
        """All of these or none; returns the bytes that nothing else needed."""
        request = pb.DeleteSnapshotRequest(names=names)
        return self.change(pb.Request(delete_snapshot=request)).delete_snapshot.bytes_freed

    def _table(self, info: pb.TableInfo) -> Table:
        from momentd.table import Table  # the two know each other

        return Table(self, info)

    # ------------------------------------------------------------------------------- memory

    def stream(self) -> Stream:
        """A new stream; opens nothing."""
        return Stream(self, next(self._stream_numbers))

    def on_arena(self, mapped: Hook, unmapped: Hook | None = None) -> None:
        """Call `mapped(address, nbytes)` for each arena, existing and future (local plane only).

        `unmapped` is called before an arena's memory goes away. For registering with CUDA. After an
        interrupt the same arena may be told twice.
        """
        self._hooks.append((mapped, unmapped))
        if self._transport is not None:
            self._transport.announce_to(mapped, unmapped)

    def allocate(self, nbytes: int) -> Block:
        """Memory for a call, reachable for the daemon. Raises LimitExceeded, OutOfMemory."""
        patience = self.patience("memory")
        while True:
            try:
                return self.connected(patience).allocate(nbytes)
            except ConnectionLost as lost:
                patience.pause(lost)

    # ------------------------------------------------------------------------------- calls

    def patience(self, what: str) -> Patience:
        """The clock of one call that waits for `what`."""
        return Patience(_discovery.timeout_s(), what, self.where)

    def ask(self, request: pb.Request, what: str) -> pb.Reply:
        """A call that changes nothing, or may be repeated. Raises the daemon's error."""
        return self.finish(Call(request), what)

    def flush(self, tables: Iterable[int]) -> int:
        """Make tables, or all, durable as they are now; returns the record bytes written.

        Repeated within this session only: of a daemon that came back without it, success would
        say that an older state is durable.
        """
        self.connected()
        call = Call(pb.Request(flush=pb.FlushRequest(ids=tables)))
        return self.finish(call, "a flush", self.incarnation).flush.bytes_written

    def change(self, request: pb.Request | NumberedCall) -> pb.Reply:
        """A call that changes something, done exactly once. Raises the daemon's error."""
        return self._control.run(self, request, lambda reply: reply)

    def finish(self, call: Call, what: str, incarnation: int | None = None) -> pb.Reply:
        """Bring a call to its end. Raises the daemon's error."""
        patience = self.patience(what)
        while not call.settled:
            self.advance(call, patience, incarnation)
        reply = call.reply
        if reply is None or reply.HasField("error"):
            raise from_wire(pb.Error() if reply is None else reply.error)
        return reply

    def attempt(self, call: Call) -> None:
        """A call that nobody depends on: only if the connection stands, and not waited for long."""
        transport = self._transport
        if transport is None or transport.lost:
            return
        patience = Patience(_ATTEMPT_S, "an answer", self.where)
        # If no answer comes in time, its memory is kept until it does.
        with contextlib.suppress(ConnectionLost, MomentdError):
            self._post(transport, call)
            while call.reply is None:
                transport.advance(call, patience)

    def try_post(self, call: Call, incarnation: int) -> None:
        """Send a call if the connection stands; otherwise leave that to `advance`."""
        transport = self._transport
        if transport is None or transport.lost or incarnation != self.incarnation:
            return
        try:
            self._post(transport, call)
        except ConnectionLost:
            return

    def advance(self, call: Call, patience: Patience, incarnation: int | None = None) -> None:
        """Wait for news of a call: progress, or a reply that settles it. Reconnects if need be.

        `incarnation`: the call makes sense in that session only (its number does).

        Raises DaemonUnavailable when patience is at its end, StateRolledBack when the daemon has
        come back without that session.
        """
        transport = self.connected(patience)
        if incarnation is not None and incarnation != self.incarnation:
            raise StateRolledBack(
                f"the daemon at {self.where} does not know this session any more (it was "
                "killed, or the session was closed): its live tables are gone, and whether this "
                "call was done is not known. Build the optimizer anew and load a checkpoint"
            )
        try:
            self._post(transport, call)
            if call.reply is None:
                transport.advance(call, patience)
                if call.reply is None:
                    patience.extend()  # there was progress
        except ConnectionLost as lost:
            call.on = None
            self._disconnect(transport)
            patience.pause(lost)
        reply = call.reply
        if reply is not None and not call.settled:
            if reply.error.reason == pb.REASON_SESSION_NOT_FOUND:
                self._disconnect(transport)
            call.again()
            patience.pause(reply.error.message)

    def _post(self, transport: Transport, call: Call) -> None:
        if call.reply is None and call.on is not transport:
            call.timeout_s = _discovery.timeout_s()
            call.prepare(transport)
            transport.post(call)

    # ------------------------------------------------------------------------------- connection

    def connected(self, patience: Patience | None = None) -> Transport:
        """The connection; made, or made anew, if there is none.

        Raises DaemonUnavailable, PermissionDenied, Incompatible.
        """
        transport = self._transport
        if transport is not None and not transport.lost:
            return transport
        patience = patience or self.patience("a daemon")
        with self._lock:
            while self._transport is None or self._transport.lost:
                self._disconnect(self._transport)
                self._connect_locked(patience)
            return self._transport

    def _disconnect(self, transport: Transport | None) -> None:
        if transport is not None and self._transport is transport:
            self._transport = None
            transport.close(resume=True)

    def _connect_locked(self, patience: Patience) -> None:
        """One attempt. Leaves `_transport` set, or pauses."""
        try:
            if self._found is None:
                found, transport = _discovery.find(self.address, self._hooks, patience)
            else:
                found, transport = self._found, self._found.connect(self._hooks)
        except ConnectionLost as lost:
            patience.pause(lost)
            return
        patience.where = str(found.address)
        try:
            hello = self._greet(transport, found, patience)
        except BaseException:
            transport.close()
            raise
        if hello is None:
            transport.close()
            return
        self._found = found
        self._welcome(hello, transport)

    def _greet(
        self, transport: Transport, found: _discovery.Found, patience: Patience
    ) -> pb.HelloReply | None:
        """Say hello. None: not now, try again. Raises what the daemon refuses us for."""
        known = self._hello
        request = pb.HelloRequest(
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
            client_version=_discovery.version(),
            features=sorted(limits.FEATURES),
            pid=os.getpid(),
            run=self.run if self.run is not None else _discovery.default_run(),
            program=_discovery.program(),
            resume_session=known.session if known is not None else None,
            token=found.token,
        )
        call = Call(pb.Request(hello=request))
        call.timeout_s = patience.remaining_s
        try:
            transport.post(call)
            while call.reply is None:
                transport.advance(call, patience)
        except ConnectionLost as lost:
            patience.pause(lost)
            return None
        if call.reply.HasField("error"):
            if call.settled:
                raise from_wire(call.reply.error)
            patience.pause(call.reply.error.message)
            return None
        return call.reply.hello

    def _welcome(self, hello: pb.HelloReply, transport: Transport) -> None:
        """Make a greeted connection the session's. The last assignment makes it count."""
        known = self._hello
        transport.welcome(hello)
        if known is not None:
            kept = hello.resumed and hello.store_id == known.store_id
            say(
                f"connected again to the daemon at {self.where} (pid {hello.pid})"
                f"{'' if kept else '; it does not know this session any more'}"
            )
        if known is None or not hello.resumed:
            self.incarnation += 1
        self._hello = hello
        self._transport = transport

    def close(self) -> None:
        """End the session: its unnamed tables are dropped. It opens again on next use."""
        with self._lock:
            transport, self._transport = self._transport, None
            # Not resumed: the next use is a new session.
            self._hello = None
            self.incarnation += 1
        if transport is not None:
            transport.close()

    # ------------------------------------------------------------------------------- fork

    def _forked(self) -> None:
        """In a forked child: the parent's connection is not ours, and neither are its locks."""
        transport = self._transport
        self.forks += 1
        self.incarnation += 1
        if transport is not None:
            transport.abandon()
        self._hooks = []
        self._reset()


def _forked() -> None:
    for session in list(_sessions):
        session._forked()


def _end_all() -> None:
    """A daemon on another machine would keep a session for minutes after its process."""
    for session in list(_sessions):
        session.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_end_all)
