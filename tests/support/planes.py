"""Raw clients of both planes, written from the wire contract alone, and a daemon in this process.

Nothing here is of the momentd client: what the two ends share is the contract.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

from momentd_server.app import Daemon
from momentd_server.config import GIB, ServeConfig
from momentd_server.engine.api import Engine
from momentd_server.rpc.socket_path import SocketPath
from momentd_wire import addresses, codec, errors, limits
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc as pb_grpc

HYPER = pb.SparseAdamHyper(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8)


def make_config(path: Path, **changes: Any) -> ServeConfig:
    config = ServeConfig(
        data_dir=path / "data",
        cache_bytes=GIB,
        address=addresses.parse(f"unix:{path}/m.sock"),
        stop_timeout_s=5.0,
    )
    return replace(config, **changes)


@contextmanager
def serving(config: ServeConfig, engine: Engine) -> Iterator[Daemon]:
    """A daemon over `engine`, in this process; stopped at the end."""
    where = SocketPath(Path(config.address.target), shared=bool(config.allow_uids))
    try:
        daemon = Daemon(config, engine, where)
        daemon.open()
        try:
            yield daemon
        finally:
            assert daemon.close(), "requests in work did not end"
    finally:
        where.close()


def schema(rows: int = 1000, width: int = 4, dtype: str = "float32") -> pb.Schema:
    kind = codec.to_wire(dtype)
    fields = [pb.FieldSpec(name=n, dtype=kind, width=width) for n in ("exp_avg", "exp_avg_sq")]
    return pb.Schema(rows=rows, width=width, fields=fields, rule="sparse_adam")


class LocalClient:
    """One connection of the local plane. Arrays are put into one arena, one after the other."""

    def __init__(self, path: Path | str, *, arena_bytes: int = 0, **hello: Any) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(str(path))
        self._ids = 0
        self._at = 0
        self.arena: pb.GrowArenaReply | None = None
        self.memory: mmap.mmap | None = None
        self.hello: pb.HelloReply | None = None
        self.progress: list[pb.UpdateProgress] = []
        try:
            if hello.pop("greet", True):
                self.hello = self.call(hello=hello_request(**hello)).hello
            if arena_bytes:
                self.grow(arena_bytes)
        except BaseException:
            self.sock.close()
            raise

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, **call: Any) -> int:
        self._ids += 1
        self.sock.send(pb.Request(id=self._ids, **call).SerializeToString())
        return self._ids

    def receive(self) -> pb.Reply:
        """The next whole reply; progress is put aside. EOFError if the daemon hung up."""
        data = b""
        while True:
            packet, fds, _, _ = socket.recv_fds(self.sock, limits.PACKET_BYTES, 1)
            if not packet:
                raise EOFError
            reply = pb.Reply.FromString(packet)
            kind = reply.WhichOneof("result")
            if kind == "progress":
                self.progress.append(reply.progress)
                continue
            if kind == "fragment":
                data += reply.fragment.data
                if not reply.fragment.last:
                    continue
                reply = pb.Reply.FromString(data)
            for fd in fds:
                self.memory = mmap.mmap(fd, reply.grow_arena.bytes)
                os.close(fd)
            return reply

    def call(self, **call: Any) -> pb.Reply:
        """Send, receive, raise what the daemon refused."""
        number = self.send(**call)
        reply = self.receive()
        assert reply.id in (number, 0)
        if reply.WhichOneof("result") == "error":
            raise errors.from_wire(reply.error)
        return reply

    def grow(self, nbytes: int) -> pb.GrowArenaReply:
        self.arena = self.call(grow_arena=pb.GrowArenaRequest(bytes=nbytes)).grow_arena
        self._at = 0
        return self.arena

    def region(self, nbytes: int) -> pb.Region:
        assert self.arena is not None
        region = pb.Region(arena=self.arena.arena, offset=self._at, length=nbytes)
        self._at += -(-nbytes // limits.ARENA_ALIGN) * limits.ARENA_ALIGN
        assert self._at <= self.arena.bytes
        return region

    def put(self, array: np.ndarray) -> pb.Region:
        region = self.region(array.nbytes)
        self.array(region, array.dtype, array.shape)[...] = array
        return region

    def array(self, region: pb.Region, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, dtype, self.memory, region.offset)

    def open_table(self, number: int = 1, stream: int = 1, **fields: Any) -> pb.TableInfo:
        fields.setdefault("schema", schema())
        sequence = pb.Sequence(stream=stream, number=number)
        request = pb.OpenTableRequest(sequence=sequence, **fields)
        return self.call(open_table=request).open_table.table

    def table_update(
        self, table: pb.TableInfo, rows: np.ndarray, grads: np.ndarray, mask=None, weights=None,
        result: pb.ResultKind = pb.RESULT_KIND_DELTA, **fields: Any,
    ) -> pb.TableUpdate:  # fmt: skip
        """One table's part, with its arrays in the arena and room for its results."""
        self._at = self._at if fields.pop("keep", False) else 0
        update = pb.TableUpdate(
            table=table.table, count=len(rows), dtype=codec.to_wire(grads.dtype), result=result,
            sparse_adam=fields.pop("hyper", HYPER), row_ids=pb.Bulk(arena=self.put(rows)),
            grads=pb.Bulk(arena=self.put(grads)), **fields,
        )  # fmt: skip
        if mask is not None:
            update.mask.arena.CopyFrom(self.put(mask))
        if weights is not None:
            update.weights.arena.CopyFrom(self.put(weights))
        room = min(len(rows), table.schema.rows)
        update.result_rows.CopyFrom(self.region(room * 8))
        update.result_values.CopyFrom(self.region(room * grads.itemsize * grads.shape[1]))
        return update

    def results(
        self, part: pb.TableUpdate, result: pb.TableResult, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self.array(part.result_rows, np.int64, (result.rows,)).copy()
        dtype = codec.to_numpy(result.dtype)
        return rows, self.array(part.result_values, dtype, (result.rows, width)).copy()

    def update(
        self, number: int, *parts: pb.TableUpdate, stream: int = 1, **fields: Any
    ) -> pb.UpdateReply:
        sequence = pb.Sequence(stream=stream, number=number)
        request = pb.UpdateRequest(sequence=sequence, tables=parts, **fields)
        return self.call(update=request).update

    def gather(self, table: pb.TableInfo, rows: np.ndarray, fields=("exp_avg", "exp_avg_sq")):
        self._at = 0
        width = table.schema.width
        dtype = codec.to_numpy(table.schema.fields[0].dtype)
        row_ids = pb.Bulk(arena=self.put(rows))
        regions = [self.region(len(rows) * width * dtype.itemsize) for _ in fields]
        request = pb.GatherRequest(
            table=table.table, fields=fields, count=len(rows), row_ids=row_ids,
            result_values=regions,
        )  # fmt: skip
        self.call(gather=request)
        return [self.array(r, dtype, (len(rows), width)).copy() for r in regions]


def hello_request(**fields: Any) -> pb.HelloRequest:
    fields.setdefault("protocol_min", limits.PROTOCOL_MIN)
    fields.setdefault("protocol_max", limits.PROTOCOL_MAX)
    return pb.HelloRequest(pid=os.getpid(), client_version="test", **fields)


@contextmanager
def raising() -> Iterator[None]:
    """Status errors as the daemon's errors, from the trailer."""
    try:
        yield
    except grpc.RpcError as error:
        for key, value in error.trailing_metadata() or ():
            if key == limits.ERROR_METADATA:
                raise errors.from_wire(pb.Error.FromString(value)) from error
        raise


class GrpcClient:
    """One channel of the gRPC plane with a session."""

    def __init__(self, target: str, *, metadata: Sequence[tuple] = (), greet=True, **hello: Any):
        self.channel = grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)])
        self.stub = pb_grpc.MomentdStub(self.channel)
        self.metadata = list(metadata)
        self.hello: pb.HelloReply | None = None
        if greet:
            try:
                self.hello = self.call("Hello", hello_request(**hello))
            except BaseException:
                self.channel.close()
                raise
            if self.hello.session:
                self.metadata.append((limits.SESSION_METADATA, self.hello.session))

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, request: Any, timeout: float = 30) -> Any:
        with raising():
            return getattr(self.stub, method)(request, metadata=self.metadata, timeout=timeout)

    def stream(self, method: str, parts: Iterator[Any], timeout: float = 60):
        """(head, bulk bytes) of a call whose reply is a head and pieces."""
        with raising():
            replies = getattr(self.stub, method)(parts, metadata=self.metadata, timeout=timeout)
            head = next(replies).head
            return head, b"".join(self._piece(part) for part in replies)

    @staticmethod
    def _piece(part: Any) -> bytes:
        assert part.WhichOneof("part") == "piece"
        assert 0 < len(part.piece.data) <= limits.PIECE_BYTES
        return part.piece.data

    def open_table(self, number: int = 1, stream: int = 1, **fields: Any) -> pb.TableInfo:
        fields.setdefault("schema", schema())
        sequence = pb.Sequence(stream=stream, number=number)
        return self.call("OpenTable", pb.OpenTableRequest(sequence=sequence, **fields)).table

    @staticmethod
    def table_update(
        table: pb.TableInfo, rows: np.ndarray, grads: np.ndarray, mask=None, weights=None,
        result: pb.ResultKind = pb.RESULT_KIND_DELTA, **fields: Any,
    ) -> tuple[pb.TableUpdate, list[np.ndarray]]:  # fmt: skip
        update = pb.TableUpdate(
            table=table.table, count=len(rows), dtype=codec.to_wire(grads.dtype), result=result,
            sparse_adam=fields.pop("hyper", HYPER), row_ids=pb.Bulk(streamed=rows.nbytes),
            grads=pb.Bulk(streamed=grads.nbytes), **fields,
        )  # fmt: skip
        arrays = [rows, grads]
        for field, array in ((update.mask, mask), (update.weights, weights)):
            if array is not None:
                field.streamed = array.nbytes
                arrays.append(array)
        return update, arrays

    def update(
        self, number: int, *parts: tuple[pb.TableUpdate, list[np.ndarray]], stream: int = 1,
        piece_bytes: int = limits.PIECE_BYTES,
    ) -> tuple[pb.UpdateReply, list[tuple[np.ndarray, np.ndarray]]]:  # fmt: skip
        sequence = pb.Sequence(stream=stream, number=number)
        head = pb.UpdateRequest(sequence=sequence, tables=[part for part, _ in parts])
        arrays = [array for _, arrays in parts for array in arrays]
        reply, data = self.stream("Update", update_parts(head, arrays, piece_bytes))
        results, at = [], 0
        for part in reply.tables:
            rows = np.frombuffer(data, np.int64, part.rows, at)
            at += part.row_ids.streamed
            dtype = codec.to_numpy(part.dtype)
            values = np.frombuffer(data, dtype, part.values.streamed // dtype.itemsize, at)
            at += part.values.streamed
            results.append((rows, values.reshape(part.rows, -1) if part.rows else values))
        assert at == len(data)
        return reply, results

    def gather(self, table: pb.TableInfo, rows: np.ndarray, fields=("exp_avg", "exp_avg_sq")):
        head = pb.GatherRequest(
            table=table.table, fields=fields, count=len(rows), row_ids=pb.Bulk(streamed=rows.nbytes)
        )
        parts = [pb.GatherPart(head=head)]
        for data in cut(rows.tobytes()):
            parts.append(pb.GatherPart(piece=pb.Piece(data=data)))
        reply, data = self.stream("Gather", iter(parts))
        values, at = [], 0
        for spec, bulk in zip(reply.fields, reply.values, strict=True):
            dtype = codec.to_numpy(spec.dtype)
            value = np.frombuffer(data, dtype, bulk.streamed // dtype.itemsize, at)
            values.append(value.reshape(reply.rows, spec.width))
            at += bulk.streamed
        assert at == len(data)
        return values


def cut(data: bytes, piece_bytes: int = limits.PIECE_BYTES) -> Iterator[bytes]:
    for start in range(0, len(data), piece_bytes):
        yield data[start : start + piece_bytes]


def update_parts(
    head: pb.UpdateRequest, arrays: Sequence[np.ndarray], piece_bytes: int = limits.PIECE_BYTES
) -> Iterator[pb.UpdatePart]:
    yield pb.UpdatePart(head=head)
    for data in cut(b"".join(array.tobytes() for array in arrays), piece_bytes):
        yield pb.UpdatePart(piece=pb.Piece(data=data))
