"""The gRPC plane: the same requests, with bulk arrays behind the head in pieces.

Imported only when an address asks for it: importing grpc takes a while and starts threads on use.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, ClassVar, Final

import grpc
import numpy as np

from momentd._arena import HeapBlock
from momentd._transport import Block, Call, ConnectionLost, Hook
from momentd._waits import TICK_S, Patience
from momentd_wire import errors, limits
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc

_OPTIONS: Final = (
    # A proxy of the environment must not see local or private traffic.
    ("grpc.enable_http_proxy", 0),
    # Each channel has its own connections: closing one must not depend on another session.
    ("grpc.use_local_subchannel_pool", 1),
    # The defaults wait up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Pieces are small; heads and lists of tables may be longer than the 4 MiB default.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
# A deadline must leave time for the bytes: what the slowest useful network moves in a second.
_SLOWEST_BYTES_S: Final = 10 << 20
# Saying good-bye must not keep a program from ending.
_END_S: Final = 2.0
# Channels of a parent process, kept as they are: closing one in a forked child may hang.
_ABANDONED: Final[list[object]] = []

# Kind of a request -> method and part message, for calls whose request is streamed.
_STREAMED: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "update": ("Update", pb.UpdatePart),
    "gather": ("Gather", pb.GatherPart),
    "scatter": ("Scatter", pb.ScatterPart),
    "prefetch": ("Prefetch", pb.PrefetchPart),
}
_UNARY: Final[dict[str, str]] = {
    "hello": "Hello",
    "open_table": "OpenTable",
    "get_table": "GetTable",
    "list_tables": "ListTables",
    "drop_table": "DropTable",
    "clone_table": "CloneTable",
    "flush": "Flush",
    "stats": "Stats",
    "stop": "Stop",
    "create_snapshot": "CreateSnapshot",
    "list_snapshots": "ListSnapshots",
    "get_snapshot": "GetSnapshot",
    "delete_snapshot": "DeleteSnapshot",
    "restore_table": "RestoreTable",
}
_REPLY_STREAMED: Final = frozenset({"update", "gather"})


class GrpcTransport:
    """See `Transport`. `target` is what grpc calls one: unix:PATH or HOST:PORT.

    Every attempt at a call is made by a worker thread, and the caller waits for that: an exception
    (Ctrl-C) that hits grpc's Python code can leave its locks held, and the channel dead.
    """

    plane: ClassVar[str] = "grpc"

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Makes the channel; connects with the first call."""
        self.target = target
        self.lost = False
        options = list(_OPTIONS)
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._stub = momentd_pb2_grpc.MomentdStub(self._channel)
        self._metadata: tuple[tuple[str, str | bytes], ...] = ()
        if token is not None:
            self._metadata = ((limits.TOKEN_METADATA, token),)
        self._piece_bytes = limits.PIECE_BYTES
        self._greeted = False
        # Inboxes of workers without work. None in an inbox ends its worker.
        self._idle: deque[SimpleQueue[_Attempt | None]] = deque()

    def __del__(self) -> None:
        for inbox in getattr(self, "_idle", ()):
            inbox.put(None)

    def __repr__(self) -> str:
        return f"GrpcTransport({self.target}, {'lost' if self.lost else 'open'})"

    def welcome(self, hello: pb.HelloReply) -> None:
        """See `Transport.welcome`. Opens the stream that keeps the session alive."""
        if not hello.session:
            return
        self._piece_bytes = min(limits.PIECE_BYTES, hello.limits.piece_bytes or limits.PIECE_BYTES)
        self._metadata = (*self._metadata, (limits.SESSION_METADATA, hello.session))
        self._greeted = True
        _start("momentd-attached", _attach, weakref.ref(self), self._stub, self._metadata)

    def owns(self, block: Block) -> bool:
        """See `Transport.owns`."""
        return isinstance(block, HeapBlock)

    def announce_to(self, mapped: Hook, unmapped: Hook | None) -> None:
        """See `Transport.announce_to`: there are no arenas here."""

    def allocate(self, nbytes: int) -> HeapBlock:
        """See `Transport.allocate`."""
        return HeapBlock(nbytes)

    # ------------------------------------------------------------------------------------ calls

    def post(self, call: Call) -> None:
        """See `Transport.post`."""
        attempt = call.attempt
        if not isinstance(attempt, _Attempt) or attempt.transport is not self:
            attempt = call.attempt = _Attempt(self, call)
        # If an earlier post was broken off after this point, a second worker finds it taken.
        self._worker().put(attempt)
        call.on = self

    def _worker(self) -> SimpleQueue[_Attempt | None]:
        """The inbox of an idle worker, or of a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            inbox: SimpleQueue[_Attempt | None] = SimpleQueue()
            _start("momentd-grpc", _work, inbox, self._idle)
            return inbox

    def advance(self, call: Call, patience: Patience) -> None:
        """See `Transport.advance`. There is no partial progress on this plane."""
        attempt = call.attempt
        if not isinstance(attempt, _Attempt):
            raise TypeError("post() the call first")
        # Whoever is interrupted between the two looks at `done` first when it comes back.
        while not attempt.done and not attempt.finished.acquire(timeout=TICK_S):
            patience.tick()
        error = attempt.error
        if error is not None:
            call.on = None
            call.attempt = None
            if not isinstance(error, grpc.RpcError):
                raise error
            call.reply = self._failure(error, patience)
        else:
            call.reply = attempt.reply

    def exchange(self, call: Call) -> pb.Reply:
        """Do a call. Raises grpc.RpcError. Runs in the thread of an attempt."""
        request = call.request
        kind = None if request is None else request.WhichOneof("call")
        if kind is None:
            raise TypeError("prepare() the call first")
        head = getattr(request, kind)
        sources = call.sources()
        payload = sum(source.nbytes for source in sources)
        options: dict[str, Any] = {
            "timeout": call.timeout_s + payload / _SLOWEST_BYTES_S,
            "metadata": self._metadata,
        }
        if kind in _UNARY:
            return pb.Reply(**{kind: getattr(self._stub, _UNARY[kind])(head, **options)})
        method, part = _STREAMED[kind]
        parts = _parts(part, head, sources, self._piece_bytes)
        reply = getattr(self._stub, method)(parts, **options)
        return _receive(reply, call, kind) if kind in _REPLY_STREAMED else pb.Reply(**{kind: reply})

    def _failure(self, error: grpc.RpcError, patience: Patience) -> pb.Reply:
        """What a failed call means. Raises ConnectionLost."""
        code = error.code()
        detail = _wire_error(error)
        if detail is not None:
            return pb.Reply(error=detail)
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
            self.lost = True
            raise ConnectionLost(error.details() or str(code)) from error
        reason = _REASONS.get(code, pb.REASON_INTERNAL)
        text = f"{patience.where} refused {patience.what} ({code.name}): {error.details()}"
        return pb.Reply(error=pb.Error(reason=reason, message=text))

    # ------------------------------------------------------------------------------------ ending

    def close(self, *, resume: bool = False) -> None:
        """See `Transport.close`. Tells the daemon, which would wait for a while otherwise."""
        say_so = self._greeted and not resume
        self.lost, self._greeted = True, False
        ending = threading.Thread(target=self._end, args=(say_so,), name="momentd-end", daemon=True)
        try:
            ending.start()
        except RuntimeError:
            return  # the interpreter is shutting down, and the connection with it
        ending.join(_END_S + 1)

    def _end(self, say_so: bool) -> None:
        if say_so:
            with contextlib.suppress(grpc.RpcError):
                self._stub.End(pb.EndRequest(), timeout=_END_S, metadata=self._metadata)
        self._channel.close()
        while self._idle:
            self._idle.pop().put(None)

    def abandon(self) -> None:
        """See `Transport.abandon`."""
        self.lost = True
        _ABANDONED.append((self._channel, self._stub))
        # Their threads have stayed in the parent.
        self._idle.clear()


class _Attempt:
    """One try at a call, made by the first of the workers that it was given to."""

    def __init__(self, transport: GrpcTransport, call: Call) -> None:
        self.transport = transport
        self.call = call
        self.done = False
        # Held until it is done. A bare lock: see Call.wake.
        self.finished = threading.Lock()
        self.finished.acquire()
        self.reply: pb.Reply | None = None
        self.error: BaseException | None = None
        self._runner: dict[int, int] = {}

    def run(self) -> None:
        """Do the call, unless another worker does."""
        thread = threading.get_ident()
        if self.done or self._runner.setdefault(0, thread) != thread:
            return
        try:
            self.reply = self.transport.exchange(self.call)
        except BaseException as error:  # noqa: BLE001  # raised where the call is waited for
            self.error = error
        finally:
            self.done = True
            self.finished.release()


def _work(inbox: SimpleQueue[_Attempt | None], idle: deque[SimpleQueue[_Attempt | None]]) -> None:
    """A worker: do what comes in, one after the other. Holds on to nothing in between."""
    while (attempt := inbox.get()) is not None:
        attempt.run()
        del attempt
        idle.append(inbox)


def _start(name: str, target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()


def _attach(
    transport: weakref.ref[GrpcTransport],
    stub: momentd_pb2_grpc.MomentdStub,
    metadata: tuple[tuple[str, str | bytes], ...],
) -> None:
    """Keep the session attached; when that ends, the connection is no longer one."""
    with contextlib.suppress(grpc.RpcError, ValueError):
        for _ in stub.Attach(pb.AttachRequest(), metadata=metadata):
            pass
    alive = transport()
    if alive is not None:
        alive.lost = True


# What a status says that carries no error of ours: it comes from grpc itself or from a proxy.
_REASONS: Final = {
    # Whether it was done is open; the same number may be sent again while patience lasts.
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.REASON_UNAVAILABLE,
    grpc.StatusCode.INVALID_ARGUMENT: pb.REASON_INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: pb.REASON_SESSION_NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED: pb.REASON_PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED: pb.REASON_PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.REASON_LIMIT_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED: pb.REASON_INCOMPATIBLE,
}


def _wire_error(error: grpc.RpcError) -> pb.Error | None:
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == limits.ERROR_METADATA:
            return pb.Error.FromString(value)
    return None


def _parts(
    part: Callable[..., Any], head: Any, sources: list[np.ndarray], piece_bytes: int
) -> Iterator[Any]:
    yield part(head=head)
    for data in pieces(sources, piece_bytes):
        yield part(piece=pb.Piece(data=data))


def pieces(sources: Iterable[np.ndarray], piece_bytes: int) -> Iterator[bytes]:
    """The bytes of all arrays one after the other, in pieces of `piece_bytes` but the last."""
    held: list[memoryview] = []
    room = piece_bytes
    for source in sources:
        rest = source.reshape(-1).view(np.uint8).data
        while rest.nbytes:
            held.append(rest[:room])
            room -= held[-1].nbytes
            rest = rest[held[-1].nbytes :]
            if room == 0:
                yield b"".join(held)
                held, room = [], piece_bytes
    if held:
        yield b"".join(held)


def _receive(rpc: Any, call: Call, kind: str) -> pb.Reply:
    """Read a streamed reply: the head, then the bytes of its bulk fields into the call's sinks."""
    parts = iter(rpc)
    first = next(parts, None)
    if first is None or not first.HasField("head"):
        raise ConnectionLost("the daemon's reply ended before it began")
    reply = pb.Reply(**{kind: first.head})
    sinks = [
        sink.reshape(-1).view(np.uint8)[: bulk.streamed]
        for index, field, bulk in _reply_bulks(reply)
        if bulk.streamed and (sink := call.sink(index, field)) is not None
    ]
    for data in (memoryview(part.piece.data) for part in parts):
        _scatter(data, sinks)
    if sinks:
        raise ConnectionLost("the daemon's reply ended before its last byte")
    return reply


def _scatter(data: memoryview, sinks: list[np.ndarray]) -> None:
    """Put the next bytes where they belong; `sinks` keeps what is still to be filled."""
    while data.nbytes:
        while sinks and not sinks[0].size:
            del sinks[0]
        if not sinks:
            raise errors.InternalError("the daemon sent more bytes than it announced")
        taken = min(data.nbytes, sinks[0].size)
        sinks[0][:taken] = data[:taken]
        sinks[0] = sinks[0][taken:]
        data = data[taken:]
    while sinks and not sinks[0].size:
        del sinks[0]


def _reply_bulks(reply: pb.Reply) -> Iterator[tuple[int, str, pb.Bulk]]:
    """(index, field, bulk) of a reply's bulk fields, in wire order."""
    if reply.HasField("update"):
        for index, table in enumerate(reply.update.tables):
            yield index, "row_ids", table.row_ids
            yield index, "values", table.values
            yield index, "factors", table.factors
    else:
        for index, bulk in enumerate(reply.gather.values):
            yield index, "values", bulk


def unix_target(path: str) -> str:
    """How grpc writes a Unix socket."""
    return f"unix:{path}"


def tls(ca_file: str | None) -> grpc.ChannelCredentials:
    """Credentials for TLS: the roots of the system, or of one file (PEM)."""
    if ca_file is None:
        return grpc.ssl_channel_credentials()
    with contextlib.closing(open(ca_file, "rb")) as file:  # noqa: PTH123
        return grpc.ssl_channel_credentials(file.read())
