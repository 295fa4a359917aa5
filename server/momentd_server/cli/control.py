"""A small client of the daemon's control calls, over gRPC. Rows are the matter of `rows`.

Every call is one RPC with a deadline; a failure is raised as an error of `momentd_wire.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Self, TypeVar, cast

import grpc

from momentd_server.cli.rows import Rows
from momentd_wire import errors, limits
from momentd_wire.addresses import Address
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc as rpc

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

# Statistics of some ten thousand tables.
_REPLY_BYTES: Final = 64 << 20
_OPTIONS: Final = (
    # A proxy of the environment knows nothing of sockets on this machine.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _REPLY_BYTES),
)


# The only request of its session.
_FIRST: Final = pb.Sequence(stream=1, number=1)
# Of what writes or reads a whole table.
_LONG_S: Final = 3600.0


class Control:
    """One connection to a daemon. Use as a context manager; not for several threads."""

    def __init__(
        self, address: Address, *, timeout_s: float, token: str = "", tls_ca: bytes | None = None
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._token = token
        target = address.control.target
        if address.kind == "unix":
            target = f"unix:{target}"
        if tls_ca is not None and address.kind == "tcp":
            credentials = grpc.ssl_channel_credentials(root_certificates=tls_ca)
            self._channel = grpc.secure_channel(target, credentials, options=_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = rpc.MomentdStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def stats(self, run: str | None = None) -> pb.StatsReply:
        """What the daemon holds and does."""
        return self._ask(self._stub.Stats, pb.StatsRequest(run=run))

    def watch(self, interval_s: float, run: str | None = None) -> Iterator[pb.StatsReply]:
        """The same every `interval_s` seconds until the caller stops asking."""
        request = pb.WatchStatsRequest(interval_s=interval_s, run=run)
        stream = self._stub.WatchStats(request, metadata=self._metadata())
        try:
            for reply in stream:
                yield reply.stats
        except grpc.RpcError as error:
            raise self._translate(error) from None
        finally:
            stream.cancel()

    def verify(self, bytes_per_s: int) -> Iterator[pb.VerifyReply]:
        """Let the daemon compare what is on disk with its checksums; takes as long as it takes."""
        request = pb.VerifyRequest(bytes_per_s=bytes_per_s)
        stream = self._stub.Verify(request, metadata=self._metadata())
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._translate(error) from None
        finally:
            stream.cancel()

    def tables(self, run: str | None = None) -> list[pb.TableInfo]:
        """All tables, or those of one run."""
        return list(self._ask(self._stub.ListTables, pb.ListTablesRequest(run=run)).tables)

    def drop_run(self, run: str, *, force: bool) -> int:
        """Drops all tables of a run, or none; returns how many. Raises TableInUse without force."""
        request = pb.DropTableRequest(sequence=_FIRST, run=run, force=force)
        return self._change(self._stub.DropTable, request).dropped

    def snapshots(self, run: str | None) -> list[pb.Snapshot]:
        """All snapshots, or those of one run, oldest first."""
        return list(self._ask(self._stub.ListSnapshots, pb.ListSnapshotsRequest(run=run)).snapshots)

    def create_snapshot(
        self, run: str, name: str | None, *, pinned: bool
    ) -> pb.CreateSnapshotReply:
        """Of all tables of a run. Takes as long as writing what has changed."""
        request = pb.CreateSnapshotRequest(sequence=_FIRST, run=run, name=name, pinned=pinned)
        return self._change(self._stub.CreateSnapshot, request, timeout_s=_LONG_S)

    def delete_snapshots(self, names: list[str]) -> int:
        """All of these or none; returns the bytes that nothing else needed."""
        request = pb.DeleteSnapshotRequest(sequence=_FIRST, names=names)
        return self._change(self._stub.DeleteSnapshot, request).bytes_freed

    def restore_table(self, content: bytes, name: str, *, replace: bool) -> pb.TableInfo:
        """A named table with the content of a snapshot's table."""
        request = pb.RestoreTableRequest(sequence=_FIRST, id=content, name=name, replace=replace)
        return self._change(self._stub.RestoreTable, request, timeout_s=_LONG_S).table

    def rows(self) -> Rows:
        """A session with tables and rows, over this connection."""
        return Rows(self._stub, self._metadata, self._translate, self._timeout_s)

    def _change(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout_s: float = 0.0,
    ) -> _Reply:
        """A call that changes something is numbered, and so needs a session."""
        hello = pb.HelloRequest(
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
            program="momentd command",
        )
        session = (limits.SESSION_METADATA, self._ask(self._stub.Hello, hello).session)
        try:
            return self._ask(method, request, session, timeout_s=timeout_s)
        finally:
            self._ask(self._stub.End, pb.EndRequest(), session)

    def stop(self, *, discard: bool) -> float:
        """Asks the daemon to stop; returns the seconds it expects to need."""
        return self._ask(self._stub.Stop, pb.StopRequest(discard=discard)).drain_s

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        *metadata: tuple[str, str | bytes],
        timeout_s: float = 0.0,
    ) -> _Reply:
        limit_s = max(self._timeout_s, timeout_s)
        try:
            return method(request, timeout=limit_s, metadata=self._metadata(*metadata))
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _metadata(self, *more: tuple[str, str | bytes]) -> tuple[tuple[str, str | bytes], ...]:
        token = ((limits.TOKEN_METADATA, self._token),) if self._token else ()
        return (*token, *more)

    def _translate(self, error: grpc.RpcError) -> errors.MomentdError:
        if not isinstance(error, grpc.Call):
            return errors.DaemonUnavailable(f"the call to {self._address} failed: {error}")
        trailers = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
        for key, value in trailers:
            if key == limits.ERROR_METADATA:
                return errors.from_wire(pb.Error.FromString(value))
        status, text = error.code(), error.details()
        if status is grpc.StatusCode.UNAVAILABLE:
            # gRPC wraps the cause, e.g. "No such file or directory", in a history of its attempts.
            cause = (text or "").rpartition(": ")[2] or "no answer"
            return errors.DaemonUnavailable(
                f"no daemon answers at {self._address} ({cause}): start one with `momentd serve`, "
                f"or name another with --address or $MOMENTD_ADDRESS"
            )
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DaemonUnavailable(
                f"the daemon at {self._address} did not answer within {self._timeout_s:g} s: "
                f"it may be busy; wait longer with --timeout"
            )
        return errors.MomentdError(f"the call to {self._address} failed: {status.name}: {text}")
