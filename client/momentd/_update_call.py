"""The request of an update: where its arrays lie, and how it reads on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from momentd._arena import round_up
from momentd._transport import Block, Call, Transport
from momentd_wire import codec
from momentd_wire.errors import InternalError, from_wire
from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from momentd.table import Table

INT64: Final = np.dtype("<i8")
UINT8: Final = np.dtype("u1")
# No row has this id: it marks result rows that nobody has written.
_UNWRITTEN: Final = -1


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """The part of an update that concerns one table.

    `count` rows are sent (duplicates allowed, 0 allowed); `dtype` is the element type of gradients
    and results, that of the table's state. `masked` asks for a mask array. `step` is the number
    bias correction counts (default: the table's counter + 1).
    """

    table: Table
    count: int
    dtype: np.dtype
    hyper: pb.SparseAdamHyper
    masked: bool = False
    step: int | None = None
    expected_update_number: int | None = None
    result: pb.ResultKind = pb.RESULT_KIND_DELTA


@dataclass(frozen=True, slots=True)
class UpdateInput:
    """Writable arrays of one table, to be filled before `PendingUpdate.send`.

    rows: int64 (n,). grads: `dtype` (n, width). mask: uint8 (n, width), or None if not asked for.
    """

    rows: np.ndarray
    grads: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Byte offsets of one table's arrays in the block, and their sizes."""

    rows: int
    grads: int
    mask: int
    out_rows: int
    out_values: int
    grads_bytes: int
    mask_bytes: int
    out_rows_bytes: int
    out_values_bytes: int
    # Distinct rows there may be: min(n, rows of the table), and elements of one result.
    room: int
    out_width: int


class UpdateCall(Call):
    """All tables' inputs lie at the start of the block, then all results."""

    def __init__(self, specs: tuple[UpdateSpec, ...], report_progress: bool) -> None:
        self.specs = specs
        self._report_progress = report_progress
        self._layouts: list[_Layout] = []
        self._input_bytes = 0
        super().__init__(nbytes=self._lay_out())
        self._sequence = pb.Sequence()
        # Every block it was sent from: results are in one of them.
        self._places: list[Block] = []
        self.inputs: tuple[UpdateInput, ...] = ()

    def _lay_out(self) -> int:
        """Assigns offsets; returns the bytes of all."""
        at = 0
        inputs: list[tuple[int, int, int, int, int]] = []
        for spec in self.specs:
            cells = spec.count * spec.table.width
            grads_bytes = cells * spec.dtype.itemsize
            mask_bytes = cells if spec.masked else 0
            grads = at + round_up(spec.count * 8)
            mask = grads + round_up(grads_bytes)
            inputs.append((at, grads, mask, grads_bytes, mask_bytes))
            at = mask + round_up(mask_bytes)
        self._input_bytes = at
        for spec, (rows, grads, mask, grads_bytes, mask_bytes) in zip(
            self.specs, inputs, strict=True
        ):
            room = min(spec.count, spec.table.rows)
            out_width = 0 if spec.result == pb.RESULT_KIND_NONE else spec.table.width
            out_values_bytes = room * out_width * spec.dtype.itemsize
            out_values = at + round_up(room * 8)
            self._layouts.append(
                _Layout(
                    rows, grads, mask, at, out_values, grads_bytes, mask_bytes, room * 8,
                    out_values_bytes, room, out_width,
                )
            )  # fmt: skip
            at = out_values + round_up(out_values_bytes)
        return max(1, at)

    def use(self, block: Block) -> None:
        """Take a block of at least `nbytes` and make the input arrays."""
        self.block = block
        self.inputs = tuple(
            UpdateInput(
                block.array(layout.rows, (spec.count,), INT64),
                block.array(layout.grads, (spec.count, spec.table.width), spec.dtype),
                block.array(layout.mask, (spec.count, spec.table.width), UINT8)
                if spec.masked
                else None,
            )
            for spec, layout in zip(self.specs, self._layouts, strict=True)
        )

    def set_sequence(self, stream: int, number: int) -> None:
        """Identity of the request. Called before it is sent, again with the same values."""
        self._sequence = pb.Sequence(stream=stream, number=number)
        self._mark(self._block())
        self._places = [self._block()]

    def _block(self) -> Block:
        if self.block is None:
            raise InternalError("this update has no memory")
        return self.block

    def _mark(self, block: Block) -> None:
        for layout in self._layouts:
            if layout.room:
                block.array(layout.out_rows, (1,), INT64)[0] = _UNWRITTEN

    # ------------------------------------------------------------------------------------ sending

    def prepare(self, transport: Transport) -> None:
        """See `Call.prepare`."""
        moved = self.block
        super().prepare(transport)
        if self.block is not moved:
            # Counts of a daemon that is gone say nothing about this place.
            self.progress.clear()

    def fill(self, block: Block) -> None:
        """The connection was lost; the old arena is still mapped: copy its inputs over."""
        shape = (self._input_bytes,)
        block.array(0, shape, UINT8)[:] = self._block().array(0, shape, UINT8)
        self._mark(block)
        self._places = [*self._places, block]

    def build(self, block: Block | None) -> pb.Request:
        """See `Call.build`."""
        block = self._block() if block is None else block
        request = pb.Request()
        update = request.update
        update.sequence.CopyFrom(self._sequence)
        update.report_progress = self._report_progress
        for spec, layout in zip(self.specs, self._layouts, strict=True):
            self._add_table(update.tables.add(), spec, layout, block)
        return request

    def _add_table(
        self, part: pb.TableUpdate, spec: UpdateSpec, layout: _Layout, block: Block
    ) -> None:
        part.table.id = spec.table.id
        part.table.generation = spec.table.generation
        if spec.step is not None:
            part.step = spec.step
        if spec.expected_update_number is not None:
            part.expected_update_number = spec.expected_update_number
        part.sparse_adam.CopyFrom(spec.hyper)
        part.result = spec.result
        part.count = spec.count
        part.dtype = codec.to_wire(spec.dtype)
        block.refer(part.row_ids, layout.rows, spec.count * 8)
        block.refer(part.grads, layout.grads, layout.grads_bytes)
        if spec.masked:
            block.refer(part.mask, layout.mask, layout.mask_bytes)
        block.target(part.result_rows, layout.out_rows, layout.out_rows_bytes)
        if spec.result != pb.RESULT_KIND_NONE:
            block.target(part.result_values, layout.out_values, layout.out_values_bytes)

    def sources(self) -> list[np.ndarray]:
        """See `Call.sources`."""
        return [
            array
            for item in self.inputs
            for array in (item.rows, item.grads, item.mask)
            if array is not None
        ]

    # ------------------------------------------------------------------------------------ results

    def sink(self, table: int, field: str) -> np.ndarray | None:
        """See `Call.sink`."""
        rows, values = self._arrays(self._block(), table)
        return {"row_ids": rows, "values": values}.get(field)

    def output(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, values) of one table, with room for all that may come."""
        return self._arrays(self._result_place(), index)

    def outcome(self) -> pb.UpdateReply:
        """The daemon's answer. Raises its error."""
        reply = self.reply
        if reply is None:
            raise InternalError("this update has no outcome")
        if reply.HasField("error"):
            raise from_wire(reply.error)
        return reply.update

    def _arrays(self, block: Block, index: int) -> tuple[np.ndarray, np.ndarray]:
        layout, spec = self._layouts[index], self.specs[index]
        rows = block.array(layout.out_rows, (layout.room,), INT64)
        return rows, block.array(layout.out_values, (layout.room, layout.out_width), spec.dtype)

    def _result_place(self) -> Block:
        """The block that the results are in: the one whose first result row was written.

        After a restart that is not always the last one: the daemon may have answered a repeated
        request from what it stored, having written the results before it stopped.
        """
        if len(self._places) < 2:
            return self._block()
        for block in reversed(self._places):
            for layout in self._layouts:
                if layout.room and block.array(layout.out_rows, (1,), INT64)[0] != _UNWRITTEN:
                    return block
        return self._block()
