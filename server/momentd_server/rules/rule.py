"""What a rule is: the arithmetic of one update over the records of a batch's distinct rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from momentd_server.jit import Pool
from momentd_server.rules.batch import Plan
from momentd_server.schema import FieldSpec, Schema
from momentd_wire.errors import InvalidArgument

ResultKind = Literal["delta", "value", "none"]
Floats: TypeAlias = "NDArray[np.float32] | NDArray[np.float64]"

# Steps stay below: counters of 64 bits then have room for all updates that will ever be.
STEP_LIMIT: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Records:
    """Where the m distinct rows of a batch lie in memory, and what protects them from a kill.

    `space`        uint8 (any,), 8-byte aligned, a multiple of 8 bytes: all memory of frames
    `words`        uint64 (frames,): the state word of each frame
    `frame_index`  int64 (m,): index into `words`, by distinct row
    `frame_offset` int64 (m,): byte offset in `space` of the record, a multiple of 8
    `word`         the state word that marks a frame as changed by this update
    `undo`         uint8 (workers, record_bytes): the old record of the row in work, by worker;
                   None: the update is not protected (memory that nobody inherits)
    `progress`     int64 (workers, 8): see jit/row_protocol.py
    """

    space: NDArray[np.uint8]
    words: NDArray[np.uint64]
    frame_index: NDArray[np.int64]
    frame_offset: NDArray[np.int64]
    word: int
    undo: NDArray[np.uint8] | None
    progress: NDArray[np.int64]
    schema: Schema


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one update and the place of its results. n sent rows, m distinct ones.

    `grads`        (n, width) of the state's dtype, C-contiguous; may be read-only
    `mask`         uint8 (n, width), nonzero where the gradient has an element; None: everywhere
    `weights`      (n, width) of the state's dtype; duplicates carry equal rows
    `out_values`   (>= m, width) of the state's dtype: deltas or values, in order of `plan.unique`
    `out_factors`  (>= m,) of the state's dtype: weight := factor * weight + delta
    """

    plan: Plan
    grads: Floats
    mask: NDArray[np.uint8] | None = None
    weights: Floats | None = None
    out_values: Floats | None = None
    out_factors: Floats | None = None
    result: ResultKind = "delta"

    def check(self, schema: Schema) -> None:
        """Raise InvalidArgument unless all shapes and dtypes are as documented.

        To be called before a row is changed: `Rule.apply` relies on it and checks nothing.
        """
        sent, distinct, width = self.plan.sent, self.plan.distinct, schema.width
        dtype = schema.state_dtype
        _check_array("grads", self.grads, (sent, width), dtype)
        if self.mask is not None:
            _check_array("mask", self.mask, (sent, width), np.dtype(np.uint8))
        if self.weights is not None:
            _check_array("weights", self.weights, (sent, width), dtype)
        if self.result != "none" and self.out_values is None:
            raise InvalidArgument(f"result {self.result!r} needs a place for the values")
        if self.out_values is not None:
            shape = (max(distinct, len(self.out_values)), width)
            _check_array("out_values", self.out_values, shape, dtype, writeable=True)
        if self.out_factors is not None:
            shape = (max(distinct, len(self.out_factors)),)
            _check_array("out_factors", self.out_factors, shape, dtype, writeable=True)


def _check_array(
    name: str,
    array: NDArray[Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    writeable: bool = False,
) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise InvalidArgument(
            f"{name} must be {dtype.name} of shape {shape}, not {array.dtype.name} of shape "
            f"{array.shape}",
            argument=name,
        )
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and (flags.writeable or not writeable)):
        need = "C-contiguous, aligned" + (" and writeable" if writeable else "")
        raise InvalidArgument(f"{name} must be {need}", argument=name)


class Rule(Protocol):
    """One kind of update. Stateless: everything that it knows is in its arguments."""

    name: ClassVar[str]
    """As in the schema of a table, e.g. "sparse_adam"."""
    hyper_type: ClassVar[Callable[..., Any]]
    """A dataclass of plain values, with slots: the hyper-parameters of one update."""

    def field_specs(self, width: int, dtype: str) -> tuple[FieldSpec, ...]:
        """The fields of a record for rows of `width` elements whose state is of `dtype`."""
        ...

    def check_schema(self, schema: Schema) -> None:
        """Raise InvalidArgument or UnsupportedFeature unless the rule can work on such records."""
        ...

    def check_batch(self, schema: Schema, batch: Batch, hyper: object, step: int) -> None:
        """Raise InvalidArgument unless `apply` can do this; changes nothing."""
        ...

    def apply(
        self,
        pool: Pool,
        records: Records,
        batch: Batch,
        hyper: object,
        step: int,
        start: int,
        stop: int,
    ) -> None:
        """Update distinct rows [start, stop) of the batch and write their results.

        `step` counts from 1 and includes this update. Cannot fail for a batch that `check_batch`
        accepts. The bits written do not depend on the pool, nor on how [0, m) is cut into calls.
        """
        ...
