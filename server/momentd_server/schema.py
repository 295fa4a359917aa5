"""What a table is: rows, width, the fields of a record, the rule. No I/O, no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

RECORD_ALIGN: Final = 8
MAX_RECORD_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a record: `width` elements of `dtype`, each `initial` until first touched."""

    name: str
    dtype: str
    width: int
    initial: float = 0.0

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.width


@dataclass(frozen=True)
class Schema:
    """Rows [0, rows), elements per parameter row, fields in record order, name of the rule."""

    rows: int
    width: int
    fields: tuple[FieldSpec, ...]
    rule: str

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field within a record; fields lie side by side, 8-byte aligned."""
        offsets: list[int] = []
        at = 0
        for field in self.fields:
            offsets.append(at)
            at = _round_up(at + field.nbytes)
        return tuple(offsets)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record, a multiple of 8."""
        return _round_up(self.offsets[-1] + self.fields[-1].nbytes)

    @cached_property
    def state_dtype(self) -> np.dtype:
        """Element type of the arithmetic: that of the first field."""
        return np.dtype(self.fields[0].dtype)

    @cached_property
    def initial_record(self) -> np.ndarray:
        """The bytes of a record that was never touched: uint8, (record_bytes,)."""
        record = np.zeros(self.record_bytes, np.uint8)
        for field, offset in zip(self.fields, self.offsets, strict=True):
            record[offset : offset + field.nbytes].view(field.dtype)[:] = field.initial
        return record


def _round_up(nbytes: int) -> int:
    return -(-nbytes // RECORD_ALIGN) * RECORD_ALIGN
