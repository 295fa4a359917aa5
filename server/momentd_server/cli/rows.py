"""A session of a command, over gRPC: tables and rows, for `momentd export` and `import`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Self

import grpc
import numpy as np

from momentd_wire import codec, limits
from momentd_wire.errors import InternalError, MomentdError
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc as rpc

# Of what writes or reads a whole table.
_LONG_S: Final = 3600.0
_ID: Final = np.dtype("<i8")

Metadata = tuple[tuple[str, str | bytes], ...]


class Rows:
    """Use as a context manager. Its tables are gone when it ends, also when it is killed."""

    def __init__(
        self,
        stub: rpc.MomentdStub,
        metadata: Callable[..., Metadata],
        translate: Callable[[grpc.RpcError], MomentdError],
        timeout_s: float,
    ) -> None:
        self._stub = stub
        self._plain = metadata
        self._translate = translate
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._metadata: Metadata = ()
        self._attached: Any = None

    def __enter__(self) -> Self:
        hello = pb.HelloRequest(
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
            program="momentd command",
        )
        session = self._call(self._stub.Hello, hello, self._plain()).session
        self._metadata = self._plain((limits.SESSION_METADATA, session))
        # The daemon ends the session some time after this stream has broken.
        self._attached = self._stub.Attach(pb.AttachRequest(), metadata=self._metadata)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._call(self._stub.End, pb.EndRequest(), self._metadata)
        except MomentdError:
            if error is None:
                raise
        finally:
            self._attached.cancel()

    def _call(self, method: Any, request: Any, metadata: Metadata, timeout_s: float = 0.0) -> Any:
        try:
            return method(request, timeout=max(self._timeout_s, timeout_s), metadata=metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _next(self) -> pb.Sequence:
        return pb.Sequence(stream=1, number=next(self._numbers))

    def restore(self, content: bytes) -> pb.TableInfo:
        """A table of this session with the content of a snapshot's table."""
        request = pb.RestoreTableRequest(sequence=self._next(), id=content)
        return self._call(self._stub.RestoreTable, request, self._metadata, _LONG_S).table

    def create(self, schema: pb.Schema, label: str, run: str) -> pb.TableInfo:
        """A fresh table of this session."""
        request = pb.OpenTableRequest(sequence=self._next(), schema=schema, label=label, run=run)
        return self._call(self._stub.OpenTable, request, self._metadata).table

    def snapshot(self, tables: Iterable[pb.TableInfo], name: str | None) -> pb.Snapshot:
        """A pinned one of these tables."""
        request = pb.CreateSnapshotRequest(
            sequence=self._next(), tables=[each.table for each in tables], name=name, pinned=True
        )
        return self._call(self._stub.CreateSnapshot, request, self._metadata, _LONG_S).snapshot

    def gather(self, table: pb.TableInfo, start: int, count: int) -> dict[str, np.ndarray]:
        """All fields of rows [start, start + count): name -> (count, width)."""
        head = pb.GatherRequest(table=table.table, range=pb.RowRange(start=start, count=count))
        parts = self._call(
            self._stub.Gather, iter([pb.GatherPart(head=head)]), self._metadata, _LONG_S
        )
        fields: list[pb.FieldSpec] = []
        received = bytearray()
        try:
            for part in parts:
                if part.HasField("head"):
                    fields = list(part.head.fields)
                else:
                    received += part.piece.data
        except grpc.RpcError as error:
            raise self._translate(error) from None
        return _split(received, fields, count)

    def scatter(
        self, table: pb.TableInfo, rows: np.ndarray, values: dict[str, np.ndarray], step: int
    ) -> None:
        """Write fields of rows, and the table's step."""
        arrays = [rows, *values.values()]
        head = pb.ScatterRequest(
            sequence=self._next(), table=table.table, fields=list(values), count=len(rows),
            step=step, row_ids=pb.Bulk(streamed=rows.nbytes),
            values=[pb.Bulk(streamed=value.nbytes) for value in values.values()],
        )  # fmt: skip
        parts = itertools.chain(
            [pb.ScatterPart(head=head)],
            (pb.ScatterPart(piece=pb.Piece(data=data)) for data in _pieces(arrays)),
        )
        self._call(self._stub.Scatter, parts, self._metadata, _LONG_S)


def _pieces(arrays: Iterable[np.ndarray]) -> Iterator[bytes]:
    for array in arrays:
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), limits.PIECE_BYTES):
            yield bytes(data[start : start + limits.PIECE_BYTES])


def _split(received: bytearray, fields: list[pb.FieldSpec], count: int) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    at = 0
    for field in fields:
        dtype = codec.to_numpy(field.dtype)
        nbytes = count * field.width * dtype.itemsize
        if at + nbytes > len(received):
            raise InternalError(
                f"the daemon sent {len(received)} bytes of {count} rows, at least {at + nbytes} "
                "were announced"
            )
        value = np.frombuffer(received, dtype, count * field.width, at)
        values[field.name] = value.reshape(count, field.width)
        at += nbytes
    return values
