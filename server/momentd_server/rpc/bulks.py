"""Where the bulk arrays of a request and of its reply are: in an arena, or in pieces on a stream.

The dispatcher sees only the `Bulks` port, so it serves both planes with the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from momentd_wire import limits
from momentd_wire.errors import InvalidArgument
from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from momentd_server.engine.arenas import Arena


class Bulks(Protocol):
    """The bulk side of one request.

    `read` and `room` give views of memory that the client may still change (local plane), or
    private arrays (gRPC). All raise InvalidArgument naming the field.
    """

    def read(self, bulk: pb.Bulk, dtype: np.dtype, shape: tuple[int, ...], what: str) -> np.ndarray:
        """The array that a request's field refers to; C-contiguous, of exactly this shape."""
        ...

    def room(
        self, region: pb.Region | None, dtype: np.dtype, shape: tuple[int, ...], what: str
    ) -> np.ndarray | None:
        """Where a result of at most this shape goes; None: the engine makes the array."""
        ...

    def place(self, array: np.ndarray | None) -> pb.Bulk | None:
        """How the reply refers to a result; None: not at all, it is where it was asked for.

        Called in the order in which results are sent.
        """
        ...

    def streamed(self) -> tuple[np.ndarray, ...]:
        """Results that follow the reply, in the order of `place`."""
        ...


class ArenaBulks:
    """Local plane: bulk fields are regions of the session's arenas, results go into regions."""

    def __init__(self, arenas: Mapping[int, Arena]) -> None:
        self._arenas = arenas

    def read(self, bulk: pb.Bulk, dtype: np.dtype, shape: tuple[int, ...], what: str) -> np.ndarray:
        place = bulk.WhichOneof("place")
        if place == "arena":
            region = bulk.arena
            nbytes = prod(shape) * dtype.itemsize
            if region.length != nbytes:
                raise _wrong_length(what, region.length, nbytes, shape, dtype)
            return self._view(region, dtype, shape, what)
        return _inline(bulk, place, dtype, shape, what)

    def room(
        self, region: pb.Region | None, dtype: np.dtype, shape: tuple[int, ...], what: str
    ) -> np.ndarray | None:
        nbytes = prod(shape) * dtype.itemsize
        if region is None:
            if nbytes == 0:
                return None
            raise InvalidArgument(
                f"{what} is missing: on the local plane results go into a region of an arena "
                f"({nbytes} bytes are needed)"
            )
        if region.length < nbytes:
            raise InvalidArgument(
                f"{what} has room for {region.length} bytes, the result may have {nbytes}: "
                f"{shape} of {dtype.name}"
            )
        return self._view(region, dtype, shape, what)

    def place(self, array: np.ndarray | None) -> pb.Bulk | None:
        return None

    def streamed(self) -> tuple[np.ndarray, ...]:
        return ()

    def packet(self, region: pb.Region) -> bytes:
        """A private copy of an oversize request."""
        array = self._view(region, np.dtype(np.uint8), (region.length,), "oversize")
        return array.tobytes()

    def _view(
        self, region: pb.Region, dtype: np.dtype, shape: tuple[int, ...], what: str
    ) -> np.ndarray:
        arena = self._arenas.get(region.arena)
        if arena is None:
            raise InvalidArgument(
                f"{what} is in arena {region.arena}, which this session does not have; it has "
                f"{sorted(self._arenas) or 'none'}"
            )
        offset, length = region.offset, region.length
        if offset % limits.ARENA_ALIGN:
            raise InvalidArgument(
                f"{what} starts at byte {offset} of arena {region.arena}, which is not a multiple "
                f"of {limits.ARENA_ALIGN}"
            )
        if offset + length > arena.nbytes:
            raise InvalidArgument(
                f"{what} is bytes {offset}..{offset + length} of arena {region.arena}, which has "
                f"{arena.nbytes} bytes"
            )
        return np.ndarray(shape, dtype, arena.memory, offset)


class StreamBulks:
    """gRPC plane: bulk fields arrive in pieces behind the head; results leave the same way."""

    def __init__(self, expected: Sequence[pb.Bulk]) -> None:
        """`expected`: the streamed bulk fields of the head, in the order of their bytes."""
        self._arrays = [np.empty(bulk.streamed, np.uint8) for bulk in expected]
        self._next = 0  # index of the next array that `read` hands out
        self._results: list[np.ndarray] = []

    @property
    def arrays(self) -> list[np.ndarray]:
        """The received bytes, one array for each field."""
        return self._arrays

    def receive(self, pieces: Iterator[bytes]) -> None:
        """Fill the arrays. Raises InvalidArgument for too few or too many bytes."""
        pending = memoryview(b"")
        received = 0
        for index, array in enumerate(self._arrays):
            filled = 0
            while filled < array.nbytes:
                if not pending.nbytes:
                    piece = next(pieces, None)
                    if piece is None:
                        raise InvalidArgument(
                            f"the stream ended in bulk field {index} after {received} bytes, "
                            f"announced were {sum(item.nbytes for item in self._arrays)}"
                        )
                    pending = memoryview(piece)
                    received += len(piece)
                take = min(pending.nbytes, array.nbytes - filled)
                array[filled : filled + take] = np.frombuffer(pending[:take], np.uint8)
                filled += take
                pending = pending[take:]
        if pending.nbytes or next(pieces, None) is not None:
            raise InvalidArgument(
                f"more than the announced {sum(item.nbytes for item in self._arrays)} bulk bytes "
                "were sent"
            )

    def read(self, bulk: pb.Bulk, dtype: np.dtype, shape: tuple[int, ...], what: str) -> np.ndarray:
        place = bulk.WhichOneof("place")
        if place == "streamed":
            array = self._arrays[self._next]
            self._next += 1
            nbytes = prod(shape) * dtype.itemsize
            if array.nbytes != nbytes:
                raise _wrong_length(what, array.nbytes, nbytes, shape, dtype)
            return array.view(dtype).reshape(shape)
        if place == "arena":
            raise InvalidArgument(f"{what} names an arena: there is none on the gRPC plane")
        return _inline(bulk, place, dtype, shape, what)

    def room(
        self, region: pb.Region | None, dtype: np.dtype, shape: tuple[int, ...], what: str
    ) -> np.ndarray | None:
        if region is not None:
            raise InvalidArgument(f"{what} names an arena: there is none on the gRPC plane")
        return None

    def place(self, array: np.ndarray | None) -> pb.Bulk | None:
        if array is None:
            return None
        self._results.append(np.ascontiguousarray(array))
        return pb.Bulk(streamed=array.nbytes)

    def streamed(self) -> tuple[np.ndarray, ...]:
        return tuple(self._results)


def _inline(
    bulk: pb.Bulk, place: str | None, dtype: np.dtype, shape: tuple[int, ...], what: str
) -> np.ndarray:
    nbytes = prod(shape) * dtype.itemsize
    if place == "inline":
        data = bulk.inline
        if len(data) != nbytes:
            raise _wrong_length(what, len(data), nbytes, shape, dtype)
        return np.frombuffer(data, dtype).reshape(shape).copy()  # kernels want writable arrays
    if place is None and nbytes == 0:
        return np.empty(shape, dtype)
    if place is None:
        raise InvalidArgument(f"{what} is missing: {shape} of {dtype.name}, {nbytes} bytes")
    raise InvalidArgument(f"{what} is streamed: the local plane takes regions of an arena")


def _wrong_length(
    what: str, got: int, wanted: int, shape: tuple[int, ...], dtype: np.dtype
) -> InvalidArgument:
    return InvalidArgument(
        f"{what} has {got} bytes, {shape} of {dtype.name} have {wanted}", field=what
    )


def streamed_fields(message: pb.UpdateRequest | pb.GatherRequest | pb.ScatterRequest
                    | pb.PrefetchRequest) -> list[pb.Bulk]:  # fmt: skip
    """The streamed bulk fields of a head, in the order in which their bytes are sent."""
    if isinstance(message, pb.UpdateRequest):
        bulks = [
            bulk
            for table in message.tables
            for bulk in (table.row_ids, table.grads, table.mask, table.weights)
        ]
    elif isinstance(message, pb.ScatterRequest):
        bulks = [message.row_ids, *message.values]
    else:
        bulks = [message.row_ids]
    return [bulk for bulk in bulks if bulk.WhichOneof("place") == "streamed"]


def pieces(arrays: Sequence[np.ndarray], piece_bytes: int = limits.PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of `arrays` one after the other, in parts of at most `piece_bytes`.

    A part may hold the end of one array and the start of the next.
    """
    held: list[memoryview] = []
    held_bytes = 0
    for array in arrays:
        rest = array.reshape(-1).view(np.uint8).data
        while rest.nbytes:
            take = rest[: piece_bytes - held_bytes]
            held.append(take)
            held_bytes += take.nbytes
            rest = rest[take.nbytes :]
            if held_bytes == piece_bytes:
                yield b"".join(held)
                held, held_bytes = [], 0
    if held:
        yield b"".join(held)
