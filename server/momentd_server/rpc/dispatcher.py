"""The one dispatcher: a wire request, a session and its bulk arrays in, an outcome out.

Both planes call it. It knows no sockets; the engine knows no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from momentd_server.config import ServeConfig
from momentd_server.engine.api import Engine, Progress, TableOutcome
from momentd_server.engine.sessions import Outcome, Plane, Session, Ticket
from momentd_server.obs.logs import log
from momentd_server.rpc import decode, encode, handshake, outcomes
from momentd_server.rpc.bulks import Bulks
from momentd_server.rpc.stats import StatsSource
from momentd_wire import errors, limits
from momentd_wire.errors import (
    Cancelled,
    DaemonUnavailable,
    InvalidArgument,
    MomentdError,
    OutOfMemory,
    SessionNotFound,
)
from momentd_wire.v1 import momentd_pb2 as pb

Call: TypeAlias = (
    pb.OpenTableRequest | pb.GetTableRequest | pb.ListTablesRequest | pb.DropTableRequest
    | pb.CloneTableRequest | pb.UpdateRequest | pb.GatherRequest | pb.ScatterRequest
    | pb.PrefetchRequest | pb.FlushRequest | pb.StatsRequest | pb.StopRequest
    | pb.CreateSnapshotRequest | pb.ListSnapshotsRequest | pb.GetSnapshotRequest
    | pb.DeleteSnapshotRequest | pb.RestoreTableRequest
)  # fmt: skip

_SEQUENCED: Final = (
    pb.OpenTableRequest, pb.DropTableRequest, pb.CloneTableRequest, pb.UpdateRequest,
    pb.ScatterRequest, pb.CreateSnapshotRequest, pb.DeleteSnapshotRequest, pb.RestoreTableRequest,
)  # fmt: skip
_SESSIONLESS: Final = (
    pb.GetTableRequest, pb.ListTablesRequest, pb.StatsRequest, pb.StopRequest,
    pb.ListSnapshotsRequest, pb.GetSnapshotRequest,
)  # fmt: skip
# After these the request may be sent again under the same number.
_NOT_FINAL: Final = (DaemonUnavailable, Cancelled)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who said hello, as the plane knows it."""

    plane: Plane
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Request:
    """One call on its way through the dispatcher."""

    call: Call
    bulks: Bulks
    # Digest of bulk bytes that are part of the request itself (gRPC plane).
    content: bytes = b""
    progress: Progress | None = None
    # Of a numbered call, once it is its turn.
    ticket: Ticket | None = None
    # Raises Cancelled if the caller has gone away. Asked just before something changes.
    check_alive: Callable[[], None] | None = None


class Dispatcher:
    """Routes calls to the engine. Thread-safe; calls of one stream run one at a time."""

    def __init__(
        self,
        engine: Engine,
        config: ServeConfig,
        *,
        stats: StatsSource,
        request_stop: Callable[[bool], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._stats = stats
        self._request_stop = request_stop
        self._draining = False
        self._calls: dict[type, Callable[[Session | None, Request], pb.Reply]] = {
            pb.OpenTableRequest: self._open_table,
            pb.GetTableRequest: self._get_table,
            pb.ListTablesRequest: self._list_tables,
            pb.DropTableRequest: self._drop_table,
            pb.CloneTableRequest: self._clone_table,
            pb.GatherRequest: self._gather,
            pb.PrefetchRequest: self._prefetch,
            pb.FlushRequest: self._flush,
            pb.StatsRequest: self._get_stats,
            pb.StopRequest: self._stop,
            pb.CreateSnapshotRequest: self._create_snapshot,
            pb.ListSnapshotsRequest: self._list_snapshots,
            pb.GetSnapshotRequest: self._get_snapshot,
            pb.DeleteSnapshotRequest: self._delete_snapshot,
            pb.RestoreTableRequest: self._restore_table,
        }

    def drain(self) -> None:
        """Refuse new work from now on; what is in work is finished."""
        self._draining = True

    # ------------------------------------------------------------------------------- sessions

    def hello(self, request: pb.HelloRequest, peer: Peer) -> tuple[pb.HelloReply, Session | None]:
        """Agree on a protocol; open or resume a session unless the client wants none.

        Raises Incompatible (naming both ranges), LimitExceeded, DaemonUnavailable.
        """
        protocol = handshake.agree(request)
        self._check_serving()
        reply = handshake.reply(protocol, self._engine.info, self._config, self._stats.pid)
        if request.no_session:
            return reply, None
        session, resumed = self._session(request, peer)
        reply.session, reply.resumed = session.id, resumed
        if resumed:
            reply.done.extend(pb.Sequence(stream=s, number=n) for s, n in session.done())
        return reply, session

    def _session(self, request: pb.HelloRequest, peer: Peer) -> tuple[Session, bool]:
        sessions = self._engine.sessions
        if request.HasField("resume_session"):
            known = sessions.resume(request.resume_session, plane=peer.plane, uid=peer.uid)
            if known is not None:
                known.moved_to(peer.pid)
                return known, True
        opened = sessions.open(
            plane=peer.plane,
            pid=peer.pid,
            uid=peer.uid,
            run=decode.text(request.run, "run"),
            program=request.program[: decode.MAX_TEXT],
        )
        return opened, False

    def session(self, session_id: bytes) -> Session | None:
        """The session with this id, if there is one."""
        return self._engine.sessions.find(session_id)

    def resumed(self, session: Session) -> pb.Resumed:
        """What a client is told that outlived the engine it was connected to."""
        return pb.Resumed(
            engine_epoch=self._engine.info.engine_epoch,
            done=[pb.Sequence(stream=s, number=n) for s, n in session.done()],
        )

    def end_session(self, session: Session) -> None:
        """Drop the session's unnamed tables; it is unknown from now on."""
        if self._engine.sessions.end(session.id) is not None:
            self._engine.end_session(session.id)

    def gathered_bytes(self, call: pb.GatherRequest) -> int:
        """Bytes that a gather would send. Raises TableNotFound, InvalidArgument."""
        view = self._engine.get_table(id=call.table.id)
        fields = decode.fields(list(call.fields), view)
        count = call.range.count if call.HasField("range") else call.count
        return count * sum(spec.nbytes for spec in fields)

    # ------------------------------------------------------------------------------- calls

    def run(self, session: Session | None, request: Request) -> tuple[Outcome, bool]:
        """Run one call; returns its outcome and whether it is the stored one of a repeated call.

        Errors of the call are outcomes (a `Reply` with `error`), with two exceptions, which are
        raised: those after which the same request may be sent again, and those of the session
        itself (SessionNotFound, OutOfSequence).
        """
        call = request.call
        self._stats.requests += 1
        if session is not None:
            session.seen()
        elif not isinstance(call, _SESSIONLESS):
            raise SessionNotFound("this call needs a session: say hello first")
        self._check_serving()
        if not isinstance(call, _SEQUENCED):
            return self._outcome(session, request), False
        assert session is not None
        if not call.HasField("sequence") or call.sequence.stream < 1 or call.sequence.number < 1:
            raise InvalidArgument("sequence is missing: stream and number count from 1")
        sequence = call.sequence
        outcome, repeated = session.once(
            sequence.stream,
            sequence.number,
            outcomes.fingerprint(call, request.content),
            lambda ticket: self._outcome(session, replace(request, ticket=ticket)),
        )
        return (outcomes.as_repeated(outcome), True) if repeated else (outcome, False)

    def _outcome(self, session: Session | None, request: Request) -> Outcome:
        ticket = request.ticket
        try:
            if request.check_alive is not None:
                request.check_alive()
            if ticket is not None and isinstance(request.call, pb.UpdateRequest):
                body = self._update(request, ticket)
            elif ticket is not None and isinstance(request.call, pb.ScatterRequest):
                body = self._scatter(request, ticket)
            else:
                body = self._calls[type(request.call)](session, request).SerializeToString()
            return Outcome(body, request.bulks.streamed())
        except _NOT_FINAL:
            self._stats.errors += 1
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets an answer
            return Outcome(self.error_body(error))

    def error_body(self, error: BaseException) -> bytes:
        """The reply for an error; a fault of the daemon is logged with its traceback."""
        self._stats.errors += 1
        if isinstance(error, MemoryError):
            error = OutOfMemory(f"the daemon ran out of memory: {error}")
        if not isinstance(error, MomentdError):
            log.error("request_failed", cause=error)
        return pb.Reply(error=errors.to_wire(error)).SerializeToString()

    def _check_serving(self) -> None:
        if self._draining:
            raise DaemonUnavailable("the daemon is stopping: wait for the next one, or start it")

    # ------------------------------------------------------------------------------- tables

    def _open_table(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.OpenTableRequest)
        assert session is not None
        view, created = self._engine.open_table(
            session,
            name=decode.table_name(call.name) if call.HasField("name") else None,
            label=decode.text(call.label, "label"),
            schema=decode.schema(call.schema),
            run=decode.text(call.run, "run") if call.HasField("run") else session.run,
            mode=decode.open_mode(call.mode),
            ticket=request.ticket,
        )
        reply = pb.OpenTableReply(table=encode.table(view), created=created)
        return pb.Reply(open_table=reply)

    def _get_table(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.GetTableRequest)
        which = call.WhichOneof("which")
        if which is None:
            raise InvalidArgument("say which table: id or name")
        view = (
            self._engine.get_table(id=call.id)
            if which == "id"
            else self._engine.get_table(name=call.name)
        )
        return pb.Reply(get_table=pb.GetTableReply(table=encode.table(view)))

    def _list_tables(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.ListTablesRequest)
        views = self._engine.list_tables(call.run if call.HasField("run") else None)
        return pb.Reply(list_tables=pb.ListTablesReply(tables=[encode.table(v) for v in views]))

    def _drop_table(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.DropTableRequest)
        run = call.run if call.HasField("run") else None
        if bool(call.ids) == (run is not None):
            raise InvalidArgument("say which tables: either ids or a run")
        dropped = self._engine.drop_tables(
            session, ids=list(call.ids), run=run, force=call.force, ticket=request.ticket
        )
        return pb.Reply(drop_table=pb.DropTableReply(dropped=dropped))

    def _clone_table(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.CloneTableRequest)
        assert session is not None
        view = self._engine.clone_table(
            session,
            id=call.source.id,
            generation=call.source.generation,
            name=decode.table_name(call.name) if call.HasField("name") else None,
            label=decode.text(call.label, "label"),
            run=decode.text(call.run, "run") if call.HasField("run") else session.run,
            ticket=request.ticket,
        )
        return pb.Reply(clone_table=pb.CloneTableReply(table=encode.table(view)))

    # ------------------------------------------------------------------------------- rows

    def _update(self, request: Request, ticket: Ticket) -> bytes:
        call, bulks = request.call, request.bulks
        assert isinstance(call, pb.UpdateRequest)
        if not 1 <= len(call.tables) <= limits.REQUEST_TABLES:
            raise InvalidArgument(
                f"an update concerns 1 to {limits.REQUEST_TABLES} tables, not {len(call.tables)}"
            )
        engine = self._engine
        batches = [
            decode.batch(item, engine.get_table(id=item.table.id), bulks) for item in call.tables
        ]
        bodies: list[bytes] = []

        def encode(outcomes: list[TableOutcome]) -> bytes:
            reply = pb.Reply()
            for item, outcome in zip(call.tables, outcomes, strict=True):
                _add_result(reply.update, item, outcome, bulks)
            bodies.append(reply.SerializeToString())
            return bodies[0]

        progress = request.progress if call.report_progress else None
        engine.update(batches, progress, ticket, encode)
        return bodies[0]

    def _gather(self, session: Session | None, request: Request) -> pb.Reply:
        call, bulks = request.call, request.bulks
        assert isinstance(call, pb.GatherRequest)
        view = self._engine.get_table(id=call.table.id)
        fields = decode.fields(list(call.fields), view)
        rows = row_range = None
        if call.HasField("range"):
            row_range = decode.row_range(call.range, view)
            count = row_range[1]
        else:
            count = call.count
            rows = bulks.read(call.row_ids, decode.INT64, (count,), "row_ids")
        if call.result_values and len(call.result_values) != len(fields):
            raise InvalidArgument(
                f"result_values has {len(call.result_values)} regions for {len(fields)} fields"
            )
        outs: list[np.ndarray] = []
        for index, spec in enumerate(fields):
            region = call.result_values[index] if call.result_values else None
            shape = (count, spec.width)
            out = bulks.room(region, np.dtype(spec.dtype), shape, "result_values")
            if out is not None:
                outs.append(out)
        outcome = self._engine.gather(
            id=view.id,
            generation=call.table.generation,
            rows=rows,
            range=row_range,
            fields=[spec.name for spec in fields],
            outs=outs if len(outs) == len(fields) else None,
        )
        reply = pb.GatherReply(
            step=outcome.step,
            update_number=outcome.update_number,
            rows=count,
            fields=[encode.field(spec) for spec in outcome.fields],
            values=[bulk for values in outcome.values if (bulk := bulks.place(values))],
        )
        return pb.Reply(gather=reply)

    def _scatter(self, request: Request, ticket: Ticket) -> bytes:
        call, bulks = request.call, request.bulks
        assert isinstance(call, pb.ScatterRequest)
        view = self._engine.get_table(id=call.table.id)
        if not call.fields:
            raise InvalidArgument("fields is empty: name the fields to write")
        fields = decode.fields(list(call.fields), view)
        if len(call.values) != len(fields):
            raise InvalidArgument(f"values has {len(call.values)} arrays for {len(fields)} fields")
        rows = row_range = None
        if call.HasField("range"):
            row_range = decode.row_range(call.range, view)
            count = row_range[1]
        else:
            count = call.count
            rows = bulks.read(call.row_ids, decode.INT64, (count,), "row_ids")
        values = [
            bulks.read(value, np.dtype(spec.dtype), (count, spec.width), f"values.{spec.name}")
            for value, spec in zip(call.values, fields, strict=True)
        ]
        bodies: list[bytes] = []

        def encode(step: int, update_number: int) -> bytes:
            reply = pb.ScatterReply(step=step, update_number=update_number)
            bodies.append(pb.Reply(scatter=reply).SerializeToString())
            return bodies[0]

        self._engine.scatter(
            id=view.id,
            generation=call.table.generation,
            rows=rows,
            range=row_range,
            fields=[spec.name for spec in fields],
            values=values,
            step=call.step if call.HasField("step") else None,
            ticket=ticket,
            encode=encode,
        )
        return bodies[0]

    def _prefetch(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.PrefetchRequest)
        rows = request.bulks.read(call.row_ids, decode.INT64, (call.count,), "row_ids")
        reading = self._engine.prefetch(
            id=call.table.id, generation=call.table.generation, rows=rows
        )
        return pb.Reply(prefetch=pb.PrefetchReply(reading=reading))

    # ------------------------------------------------------------------------------- snapshots

    def _create_snapshot(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.CreateSnapshotRequest)
        if bool(call.tables) == call.HasField("run"):
            raise InvalidArgument("say of what: either tables or a run")
        view, created, written = self._engine.create_snapshot(
            [(table.id, table.generation) for table in call.tables],
            run=decode.text(call.run, "run") if call.HasField("run") else None,
            name=call.name if call.HasField("name") else None,
            pinned=call.pinned,
        )
        reply = pb.CreateSnapshotReply(
            snapshot=encode.snapshot(view), created=created, bytes_written=written
        )
        return pb.Reply(create_snapshot=reply)

    def _list_snapshots(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.ListSnapshotsRequest)
        views = self._engine.list_snapshots(call.run if call.HasField("run") else None)
        return pb.Reply(
            list_snapshots=pb.ListSnapshotsReply(snapshots=[encode.snapshot(v) for v in views])
        )

    def _get_snapshot(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.GetSnapshotRequest)
        which = call.WhichOneof("which")
        if which is None:
            raise InvalidArgument("say which snapshot: id or name")
        view = (
            self._engine.get_snapshot(id=call.id)
            if which == "id"
            else self._engine.get_snapshot(name=call.name)
        )
        return pb.Reply(get_snapshot=pb.GetSnapshotReply(snapshot=encode.snapshot(view)))

    def _delete_snapshot(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.DeleteSnapshotRequest)
        freed = self._engine.delete_snapshots(list(call.names), request.ticket)
        return pb.Reply(delete_snapshot=pb.DeleteSnapshotReply(bytes_freed=freed))

    def _restore_table(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.RestoreTableRequest)
        assert session is not None
        view = self._engine.restore_table(
            session,
            id=call.id,
            name=decode.table_name(call.name) if call.HasField("name") else None,
            label=decode.text(call.label, "label") if call.HasField("label") else None,
            run=decode.text(call.run, "run") if call.HasField("run") else session.run,
            replace=call.replace,
            ticket=request.ticket,
        )
        return pb.Reply(restore_table=pb.RestoreTableReply(table=encode.table(view)))

    # ------------------------------------------------------------------------------- the rest

    def _flush(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.FlushRequest)
        return pb.Reply(flush=pb.FlushReply(bytes_written=self._engine.flush(list(call.ids))))

    def _get_stats(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.StatsRequest)
        return pb.Reply(stats=self.stats(call.run if call.HasField("run") else None))

    def stats(self, run: str | None) -> pb.StatsReply:
        """All counters as of now."""
        return self._stats.collect(self._engine, run)

    def verify(self, bytes_per_s: int) -> Iterator[pb.VerifyReply]:
        """Compare everything on disk with its checksums, step by step."""
        self._stats.requests += 1
        self._check_serving()
        for step in self._engine.verify(bytes_per_s):
            yield encode.verify_step(step)

    def _stop(self, session: Session | None, request: Request) -> pb.Reply:
        call = request.call
        assert isinstance(call, pb.StopRequest)
        drain_s = 0.0 if call.discard else self._engine.stats().totals.drain_s
        self._request_stop(call.discard)
        return pb.Reply(stop=pb.StopReply(drain_s=drain_s))


def _add_result(
    reply: pb.UpdateReply, item: pb.TableUpdate, outcome: TableOutcome, bulks: Bulks
) -> None:
    reply.tables.add(
        step=outcome.step,
        update_number=outcome.update_number,
        rows=outcome.rows,
        dtype=item.dtype,
        result=item.result,
        row_ids=bulks.place(outcome.out_rows),
        values=bulks.place(outcome.out_values),
        factors=bulks.place(outcome.out_factors),
    )
