"""Requests about rows that are not updates: gather, scatter, prefetch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd._arena import round_up
from momentd._control import NumberedCall
from momentd._transport import Block, Call
from momentd_wire import codec
from momentd_wire.v1 import momentd_pb2 as pb

INT64: Final = np.dtype("<i8")
UINT8: Final = np.dtype("u1")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows: ids (int64, any order), or [start, start + count)."""

    ids: np.ndarray | None
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that the ids take in a block."""
        return 0 if self.ids is None else round_up(self.count * 8)

    def part(self, start: int, stop: int) -> Selection:
        """Positions [start, stop) of this selection."""
        ids = None if self.ids is None else self.ids[start:stop]
        return Selection(ids, self.start + start, stop - start)

    def write(self, block: Block) -> None:
        """Put the ids at the start of a block."""
        if self.ids is not None:
            block.array(0, (self.count,), INT64)[:] = self.ids


class GatherCall(Call):
    """Ids at the start of the block, then the fields."""

    def __init__(self, table: pb.TableRef, fields: list[pb.FieldSpec], rows: Selection) -> None:
        self._table = table
        self._fields = fields
        self._rows = rows
        self._shapes = [(rows.count, field.width) for field in fields]
        self._dtypes = [codec.to_numpy(field.dtype) for field in fields]
        self._offsets, nbytes = _offsets(rows.nbytes, self._shapes, self._dtypes)
        super().__init__(nbytes=max(1, nbytes))

    def fill(self, block: Block) -> None:
        """See `Call.fill`."""
        self._rows.write(block)

    def build(self, block: Block | None) -> pb.Request:
        """See `Call.build`."""
        assert block is not None
        rows = self._rows
        request = pb.Request()
        gather = request.gather
        gather.table.CopyFrom(self._table)
        gather.fields.extend(field.name for field in self._fields)
        if rows.ids is None:
            gather.range.start, gather.range.count = rows.start, rows.count
        else:
            gather.count = rows.count
            block.refer(gather.row_ids, 0, rows.count * 8)
        for offset, shape, dtype in zip(self._offsets, self._shapes, self._dtypes, strict=True):
            block.target_in(gather.result_values, offset, shape[0] * shape[1] * dtype.itemsize)
        return request

    def sources(self) -> list[np.ndarray]:
        """See `Call.sources`."""
        return [] if self._rows.ids is None else [self._rows.ids]

    def sink(self, table: int, field: str) -> np.ndarray | None:
        """See `Call.sink`."""
        del field
        return self.values()[table]

    def values(self) -> list[np.ndarray]:
        """The fields, (n, width) each: views of the block."""
        block = self.block
        assert block is not None
        places = zip(self._offsets, self._shapes, self._dtypes, strict=True)
        return [block.array(offset, shape, dtype) for offset, shape, dtype in places]


class ScatterCall(NumberedCall):
    """Ids at the start of the block, then the fields."""

    def __init__(
        self,
        table: pb.TableRef,
        values: dict[str, np.ndarray],
        rows: Selection,
        step: int | None,
    ) -> None:
        self._table = table
        self._values = values
        self._rows = rows
        self._step = step
        shapes = [value.shape for value in values.values()]
        dtypes = [value.dtype for value in values.values()]
        self._offsets, nbytes = _offsets(rows.nbytes, shapes, dtypes)
        super().__init__(nbytes=max(1, nbytes))

    def fill(self, block: Block) -> None:
        """See `Call.fill`."""
        self._rows.write(block)
        for offset, value in zip(self._offsets, self._values.values(), strict=True):
            block.array(offset, value.shape, value.dtype)[...] = value

    def build(self, block: Block | None) -> pb.Request:
        """See `Call.build`."""
        assert block is not None
        rows = self._rows
        request = pb.Request()
        scatter = request.scatter
        scatter.sequence.CopyFrom(self.sequence)
        scatter.table.CopyFrom(self._table)
        scatter.fields.extend(self._values)
        if rows.ids is None:
            scatter.range.start, scatter.range.count = rows.start, rows.count
        else:
            scatter.count = rows.count
            block.refer(scatter.row_ids, 0, rows.count * 8)
        if self._step is not None:
            scatter.step = self._step
        for offset, value in zip(self._offsets, self._values.values(), strict=True):
            block.refer(scatter.values.add(), offset, value.nbytes)
        return request

    def sources(self) -> list[np.ndarray]:
        """See `Call.sources`."""
        ids = [] if self._rows.ids is None else [self._rows.ids]
        return [*ids, *self._values.values()]


class PrefetchCall(Call):
    """Ids at the start of the block."""

    def __init__(self, table: pb.TableRef, rows: Selection) -> None:
        self._table = table
        self._rows = rows
        super().__init__(nbytes=max(1, rows.nbytes))

    def fill(self, block: Block) -> None:
        """See `Call.fill`."""
        self._rows.write(block)

    def build(self, block: Block | None) -> pb.Request:
        """See `Call.build`."""
        assert block is not None
        request = pb.Request()
        request.prefetch.table.CopyFrom(self._table)
        request.prefetch.count = self._rows.count
        block.refer(request.prefetch.row_ids, 0, self._rows.count * 8)
        return request

    def sources(self) -> list[np.ndarray]:
        """See `Call.sources`."""
        return [] if self._rows.ids is None else [self._rows.ids]


def _offsets(
    start: int, shapes: list[tuple[int, ...]], dtypes: list[np.dtype]
) -> tuple[list[int], int]:
    """Where arrays lie one after the other from `start`, and where they end."""
    offsets: list[int] = []
    at = start
    for shape, dtype in zip(shapes, dtypes, strict=True):
        offsets.append(at)
        at += round_up(int(np.prod(shape)) * dtype.itemsize)
    return offsets, at
