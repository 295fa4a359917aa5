# methods have the names that the service's definition gives them
"""The gRPC plane's methods: the dispatcher's calls, with bulk bytes in pieces."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import grpc
import numpy as np

from momentd_server.engine.sessions import Outcome, Session, Sessions
from momentd_server.rpc.bulks import StreamBulks, pieces, streamed_fields
from momentd_server.rpc.dispatcher import Call, Dispatcher, Peer, Request
from momentd_server.rpc.transfer import Transfer, Transfers
from momentd_wire import errors, limits
from momentd_wire.errors import InvalidArgument, SessionNotFound
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc as pb_grpc

_MIN_INTERVAL_S: Final = 0.1
_MAX_INTERVAL_S: Final = 3600.0
_Head = TypeVar("_Head", pb.UpdateRequest, pb.GatherRequest, pb.ScatterRequest, pb.PrefetchRequest)


class Service(pb_grpc.MomentdServicer):
    """One instance serves all callers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        sessions: Sessions,
        transfers: Transfers,
        *,
        uid: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._transfers = transfers
        # gRPC knows no peer's uid; the socket's mode admits only ours, and TCP has its token.
        self._uid = uid
        self._stopping = threading.Event()

    def stop_streams(self) -> None:
        """End streams that live as long as their client wants."""
        self._stopping.set()

    # ------------------------------------------------------------------------------- sessions

    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        reply, _ = self._dispatcher.hello(request, Peer("grpc", request.pid, self._uid))
        return reply

    def Attach(
        self, request: pb.AttachRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.AttachReply]:
        session = self._need_session(context)
        ended = threading.Event()
        if not context.add_callback(ended.set):
            return
        attachment = session.attach()
        try:
            yield pb.AttachReply()
            while not (ended.wait(1.0) or self._stopping.is_set()):
                self._sessions.get(session.id)
        finally:
            session.detach(attachment, time.monotonic())

    def End(self, request: pb.EndRequest, context: grpc.ServicerContext) -> pb.EndReply:
        self._dispatcher.end_session(self._need_session(context))
        return pb.EndReply()

    # ------------------------------------------------------------------------------- tables

    def OpenTable(self, request: pb.OpenTableRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).open_table

    def GetTable(self, request: pb.GetTableRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).get_table

    def ListTables(self, request: pb.ListTablesRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).list_tables

    def DropTable(self, request: pb.DropTableRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).drop_table

    def CloneTable(self, request: pb.CloneTableRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).clone_table

    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).flush

    def CreateSnapshot(
        self, request: pb.CreateSnapshotRequest, context: grpc.ServicerContext
    ) -> Any:
        return self._plain(request, context).create_snapshot

    def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).list_snapshots

    def GetSnapshot(self, request: pb.GetSnapshotRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).get_snapshot

    def DeleteSnapshot(
        self, request: pb.DeleteSnapshotRequest, context: grpc.ServicerContext
    ) -> Any:
        return self._plain(request, context).delete_snapshot

    def RestoreTable(self, request: pb.RestoreTableRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).restore_table

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).stop

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> Any:
        return self._plain(request, context).stats

    def WatchStats(
        self, request: pb.WatchStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchStatsReply]:
        interval_s = request.interval_s if request.HasField("interval_s") else 1.0
        if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
            raise InvalidArgument(
                f"interval_s is {interval_s}, it must be {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S}"
            )
        run = request.run if request.HasField("run") else None
        ended = threading.Event()
        if not context.add_callback(ended.set):
            return
        while not (ended.is_set() or self._stopping.is_set()):
            yield pb.WatchStatsReply(stats=self._dispatcher.stats(run))
            until_s = time.monotonic() + interval_s
            while not self._stopping.is_set() and (left_s := until_s - time.monotonic()) > 0:
                if ended.wait(min(left_s, 1.0)):
                    return

    def Verify(
        self, request: pb.VerifyRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.VerifyReply]:
        yield from self._dispatcher.verify(request.bytes_per_s)

    # ------------------------------------------------------------------------------- rows

    def Update(
        self, request_iterator: Iterator[pb.UpdatePart], context: grpc.ServicerContext
    ) -> Iterator[pb.UpdateReplyPart]:
        head = _head(request_iterator, pb.UpdateRequest)
        # Each sent row may come back with its id and a result as wide as its gradient.
        with self._transfers.admit(2 * _streamed_bytes(head), context) as transfer:
            reply, bulk = self._bulk(head, request_iterator, context, transfer)
            yield pb.UpdateReplyPart(head=reply.update)
            for data in _sent(bulk, transfer):
                yield pb.UpdateReplyPart(piece=pb.Piece(data=data))

    def Gather(
        self, request_iterator: Iterator[pb.GatherPart], context: grpc.ServicerContext
    ) -> Iterator[pb.GatherReplyPart]:
        head = _head(request_iterator, pb.GatherRequest)
        nbytes = _streamed_bytes(head) + self._dispatcher.gathered_bytes(head)
        with self._transfers.admit(nbytes, context) as transfer:
            reply, bulk = self._bulk(head, request_iterator, context, transfer)
            yield pb.GatherReplyPart(head=reply.gather)
            for data in _sent(bulk, transfer):
                yield pb.GatherReplyPart(piece=pb.Piece(data=data))

    def Scatter(
        self, request_iterator: Iterator[pb.ScatterPart], context: grpc.ServicerContext
    ) -> pb.ScatterReply:
        head = _head(request_iterator, pb.ScatterRequest)
        with self._transfers.admit(_streamed_bytes(head), context) as transfer:
            return self._bulk(head, request_iterator, context, transfer)[0].scatter

    def Prefetch(
        self, request_iterator: Iterator[pb.PrefetchPart], context: grpc.ServicerContext
    ) -> pb.PrefetchReply:
        head = _head(request_iterator, pb.PrefetchRequest)
        with self._transfers.admit(_streamed_bytes(head), context) as transfer:
            return self._bulk(head, request_iterator, context, transfer)[0].prefetch

    # ------------------------------------------------------------------------------- inside

    def _plain(self, call: Call, context: grpc.ServicerContext) -> pb.Reply:
        """A call without bulk arrays."""
        request = Request(call, StreamBulks([]), check_alive=Transfer(context).check_alive)
        outcome, _ = self._dispatcher.run(self._session(context), request)
        return _reply(outcome)

    def _bulk(
        self, head: _Head, parts: Iterator[Any], context: grpc.ServicerContext, transfer: Transfer
    ) -> tuple[pb.Reply, tuple[np.ndarray, ...]]:
        """Receive the pieces, run the call. Nothing changes before the last piece is here."""
        session = self._need_session(context)
        bulks = StreamBulks(streamed_fields(head))
        bulks.receive(_pieces(parts, transfer))
        transfer.check_alive()
        transfer.working()
        request = Request(
            head, bulks, content=_content(head, bulks.arrays), check_alive=transfer.check_alive
        )
        outcome, _ = self._dispatcher.run(session, request)
        transfer.moved()
        return _reply(outcome), outcome.bulk

    def _session(self, context: grpc.ServicerContext) -> Session | None:
        """The session named in the call's metadata; None if it names none."""
        for key, value in context.invocation_metadata():
            if key == limits.SESSION_METADATA:
                session = self._sessions.get(value if isinstance(value, bytes) else value.encode())
                if session.plane != "grpc":
                    raise SessionNotFound(f"session {session.short_id} is of the local plane")
                return session
        return None

    def _need_session(self, context: grpc.ServicerContext) -> Session:
        session = self._session(context)
        if session is None:
            raise SessionNotFound(
                f"this call needs a session: say Hello and send its session id as metadata "
                f"{limits.SESSION_METADATA!r}"
            )
        return session


def _head(parts: Iterator[Any], kind: type[_Head]) -> _Head:
    """The first part of a stream, which must be a head."""
    part = next(parts, None)
    if part is None or part.WhichOneof("part") != "head":
        raise InvalidArgument("the first message of the stream must be the head")
    assert isinstance(part.head, kind)
    return part.head


def _pieces(parts: Iterable[Any], transfer: Transfer) -> Iterator[bytes]:
    for part in parts:
        if part.WhichOneof("part") != "piece":
            raise InvalidArgument("only the first message of the stream may be a head")
        data: bytes = part.piece.data
        if not 1 <= len(data) <= limits.PIECE_BYTES:
            raise InvalidArgument(
                f"a piece has {len(data)} bytes, it must have 1 to {limits.PIECE_BYTES}"
            )
        transfer.moved()
        yield data


def _sent(bulk: tuple[np.ndarray, ...], transfer: Transfer) -> Iterator[bytes]:
    for data in pieces(bulk):
        yield data
        transfer.moved()


def _streamed_bytes(head: _Head) -> int:
    return sum(bulk.streamed for bulk in streamed_fields(head))


def _content(head: object, arrays: list[np.ndarray]) -> bytes:
    """Checksum of the bulk bytes of a request that may be repeated, the same in every process.

    It tells a repeated request from another one under the same number by mistake.
    """
    checksum = 0
    if isinstance(head, pb.UpdateRequest | pb.ScatterRequest):
        for array in arrays:
            checksum = zlib.crc32(array.data, checksum)
    return checksum.to_bytes(4, "little")


def _reply(outcome: Outcome) -> pb.Reply:
    """The outcome's reply. Raises the error that it may be."""
    reply = pb.Reply.FromString(outcome.body)
    if reply.WhichOneof("result") == "error":
        raise errors.from_wire(reply.error)
    return reply
