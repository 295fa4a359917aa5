"""The order of a batch: sent rows -> distinct rows, ascending, and who contributes to each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from momentd_server.jit import mutable_alias, register_warmup
from momentd_server.rules import radix
from momentd_wire.errors import InvalidArgument, RowOutOfRange


@dataclass(frozen=True, slots=True)
class Plan:
    """Row ids of a batch in order. Views of the scratch: valid until its next use.

    `unique`  int64 (m,): the distinct rows, strictly ascending
    `order`   int64 (n,): positions in the batch, sorted by row, equal rows by position
    `starts`  int64 (m + 1,): row `unique[u]` was sent at `order[starts[u]:starts[u + 1]]`
    """

    unique: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def sent(self) -> int:
        """n, rows as sent."""
        return len(self.order)

    @property
    def distinct(self) -> int:
        """m, rows without duplicates."""
        return len(self.unique)


class Scratch:
    """Memory for one plan, kept between batches; grows to the largest. Not thread-safe."""

    def __init__(self) -> None:
        self._capacity = 0
        self.histogram = np.empty(1 << radix.DIGIT_BITS, np.uint64)
        self.reserve(1024)

    def reserve(self, rows: int) -> None:
        """Make room for a batch of so many rows."""
        if rows <= self._capacity:
            return
        self._capacity = 1 << (rows - 1).bit_length()
        self.private = np.empty(self._capacity, np.int64)
        self.words = np.empty(self._capacity, np.uint64)
        self.spare = np.empty(self._capacity, np.uint64)
        self.order = np.empty(self._capacity, np.int64)
        self.unique = np.empty(self._capacity, np.int64)
        self.starts = np.empty(self._capacity + 1, np.int64)
        self.identity = np.arange(self._capacity + 1, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._capacity * 7 * 8 + self.histogram.nbytes


def plan(rows: NDArray[np.int64], table_rows: int, scratch: Scratch) -> Plan:
    """Copy, check, sort and deduplicate the row ids of a batch.

    `rows`: int64 (n,), C-contiguous, in memory that others may change while we read: each id is
    read once, into a private copy, and only the copy is checked and used.

    Raises InvalidArgument for another dtype or shape, RowOutOfRange for an id outside
    [0, table_rows), naming the first one and its position.
    """
    _check_rows(rows)
    count = len(rows)
    scratch.reserve(count)
    distinct = radix.arrange(
        mutable_alias(rows),
        table_rows,
        scratch.private,
        scratch.words,
        scratch.spare,
        scratch.order,
        scratch.unique,
        scratch.starts,
        scratch.histogram,
    )
    if distinct == radix.OUT_OF_RANGE:
        raise _out_of_range(scratch.private[:count], table_rows)
    if distinct == radix.ASCENDING:
        identity = scratch.identity
        return Plan(scratch.private[:count], identity[:count], identity[: count + 1])
    if distinct == radix.TOO_WIDE:
        distinct = _arrange_wide(count, scratch)
    return Plan(scratch.unique[:distinct], scratch.order[:count], scratch.starts[: distinct + 1])


def _arrange_wide(count: int, scratch: Scratch) -> int:
    """Sort a batch whose row ids and positions need more than 64 bits together."""
    private = scratch.private[:count]
    order = scratch.order[:count]
    order[:] = np.argsort(private, kind="stable")
    return radix.deduplicate_pairs(private[order], order, scratch.unique, scratch.starts)


def _check_rows(rows: NDArray[np.int64]) -> None:
    flags = rows.flags
    if rows.dtype != np.int64 or rows.ndim != 1 or not (flags.c_contiguous and flags.aligned):
        raise InvalidArgument(
            f"row ids must be a contiguous, aligned int64 vector, not {rows.dtype.name} of shape "
            f"{rows.shape}",
            argument="row_ids",
        )


def _out_of_range(private: NDArray[np.int64], table_rows: int) -> RowOutOfRange:
    position = int(np.flatnonzero((private < 0) | (private >= table_rows))[0])
    row = int(private[position])
    return RowOutOfRange(
        f"row id {row} at position {position} is outside [0, {table_rows}); nothing was changed",
        row=row,
        position=position,
        rows=table_rows,
    )


@register_warmup
def _warm_up() -> None:
    scratch = Scratch()
    plan(np.array([1, 1], np.int64), 2, scratch)
    scratch.private[:2] = 1
    _arrange_wide(2, scratch)
