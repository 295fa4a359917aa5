"""torch.optim.SparseAdam over records `exp_avg | exp_avg_sq`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from momentd_server.jit import Pool, mutable_alias, register_warmup
from momentd_server.jit.row_protocol import PROGRESS_WORDS
from momentd_server.rules import adam_kernels as kernels
from momentd_server.rules.batch import Scratch, plan
from momentd_server.rules.rule import STEP_LIMIT, Batch, Floats, Records, ResultKind
from momentd_server.schema import FieldSpec, Schema
from momentd_wire.errors import InvalidArgument, UnsupportedFeature

_DTYPES: Final = ("float32", "float64")

# Software prefetch, measured: far enough to hide a miss, not so far that lines are lost again.
AHEAD_BYTES, AHEAD_ROWS, REACH_BYTES = 8192, 16, 512
# A thread's part of less than this is done sooner than another thread is woken.
_LEAST_BYTES: Final = 128 * 1024


@dataclass(frozen=True, slots=True)
class SparseAdamHyper:
    """Hyper-parameters of one update. Raises InvalidArgument for values that torch refuses.

    lr == 0 is allowed (schedulers pass through it): moments advance, weights stay.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_number("lr", self.lr, 0.0, math.inf)
        _check_number("beta1", self.beta1, 0.0, 1.0)
        _check_number("beta2", self.beta2, 0.0, 1.0)
        _check_number("eps", self.eps, 0.0, math.inf)

    def step_size(self, step: int) -> float:
        """lr with both bias corrections of update number `step` (from 1), as torch orders them."""
        correction1 = 1 - self.beta1**step
        correction2 = 1 - self.beta2**step
        return self.lr * math.sqrt(correction2) / correction1


def _check_number(name: str, value: float, low: float, high: float) -> None:
    """low <= value < high; false for NaN."""
    if not low <= value < high:
        raise InvalidArgument(
            f"{name} must be in [{low:g}, {high:g}), not {value!r}", argument=name
        )


class SparseAdam:
    """The rule "sparse_adam": one fused pass over the records of a batch's distinct rows."""

    name: ClassVar[str] = "sparse_adam"
    hyper_type: ClassVar[type[SparseAdamHyper]] = SparseAdamHyper

    def field_specs(self, width: int, dtype: str) -> tuple[FieldSpec, ...]:
        return (
            FieldSpec("exp_avg", dtype, width),
            FieldSpec("exp_avg_sq", dtype, width),
        )

    def check_schema(self, schema: Schema) -> None:
        dtype = schema.state_dtype.name
        if dtype not in _DTYPES:
            raise UnsupportedFeature(
                f"sparse_adam keeps its state as {' or '.join(_DTYPES)}, not {dtype}", dtype=dtype
            )
        wanted = [
            (spec.name, spec.dtype, spec.width) for spec in self.field_specs(schema.width, dtype)
        ]
        given = [(spec.name, spec.dtype, spec.width) for spec in schema.fields]
        if schema.width < 1 or given != wanted:
            raise InvalidArgument(
                f"a table of {schema.width} elements a row with rule sparse_adam needs the fields "
                f"{wanted}, not {given}",
                argument="schema",
            )

    def check_batch(self, schema: Schema, batch: Batch, hyper: object, step: int) -> None:
        _hyper(hyper)
        if not 1 <= step < STEP_LIMIT:
            raise InvalidArgument(
                f"step counts from 1 and stays below {STEP_LIMIT}, it cannot be {step}",
                argument="step",
            )
        if batch.result == "value" and batch.weights is None:
            raise InvalidArgument(
                "result 'value' needs the rows of the weight: send them, or ask for 'delta'",
                argument="weights",
            )
        batch.check(schema)

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
        schema = records.schema
        undo = records.undo
        if undo is not None and len(undo) < pool.threads:
            raise ValueError(f"{pool.threads} threads need as many undo rows, not {len(undo)}")
        dtype = schema.state_dtype
        nothing = _NOTHING[dtype]
        factors = nothing[0] if batch.out_factors is None else batch.out_factors
        args = (
            start,
            records.space.view(dtype),
            records.words,
            records.frame_index,
            records.frame_offset,
            np.uint64(records.word),
            None if undo is None else undo.view(dtype),
            records.progress,
            batch.plan.order,
            batch.plan.starts,
            mutable_alias(batch.grads),
            nothing if batch.weights is None else mutable_alias(batch.weights),
            nothing if batch.out_values is None else batch.out_values,
            factors,
            _spare(pool.threads, schema),
            _numbers(_hyper(hyper), step, dtype),
            layout_of(schema, batch.result),
        )
        least = max(1, _LEAST_BYTES // (schema.record_bytes + 64))
        if batch.mask is None:
            pool.run(kernels.apply_dense, stop - start, *args, least=least)
        else:
            mask = mutable_alias(batch.mask)
            pool.run(kernels.apply_masked, stop - start, *args, mask, least=least)


def _hyper(hyper: object) -> SparseAdamHyper:
    if not isinstance(hyper, SparseAdamHyper):
        raise InvalidArgument(
            f"sparse_adam needs its own hyper-parameters, not {type(hyper).__name__}",
            argument="hyper",
        )
    return hyper


def _numbers(hyper: SparseAdamHyper, step: int, dtype: np.dtype[Any]) -> Floats:
    """The scalars of an update: computed in float64, rounded once, as torch does with scalars."""
    numbers = np.zeros(6, np.float64)
    numbers[kernels.GAIN_AVG] = 1 - hyper.beta1
    numbers[kernels.GAIN_SQ] = 1 - hyper.beta2
    numbers[kernels.EPS] = hyper.eps
    numbers[kernels.STEP] = -hyper.step_size(step)
    numbers[kernels.SIGN] = -1.0 if hyper.maximize else 1.0
    return numbers.astype(dtype)


@lru_cache(maxsize=1024)
def layout_of(schema: Schema, result: ResultKind) -> NDArray[np.int64]:
    """Where the fields lie, in elements, and how far ahead to fetch."""
    item_bytes = schema.state_dtype.itemsize
    row_bytes = schema.record_bytes + schema.width * item_bytes
    layout = np.zeros(7, np.int64)
    layout[kernels.ITEM_SHIFT] = item_bytes.bit_length() - 1
    layout[kernels.AVG_AT] = schema.offsets[0] // item_bytes
    layout[kernels.SQ_AT] = schema.offsets[1] // item_bytes
    layout[kernels.AHEAD] = min(max(AHEAD_BYTES // row_bytes, 1), AHEAD_ROWS)
    layout[kernels.RECORD_REACH] = min(schema.record_bytes, REACH_BYTES) // item_bytes
    layout[kernels.GRAD_REACH] = min(schema.width, REACH_BYTES // item_bytes)
    layout[kernels.RESULT] = {
        "delta": kernels.DELTA,
        "value": kernels.VALUE,
        "none": kernels.NONE,
    }[result]
    return layout


def _spare(threads: int, schema: Schema) -> Floats:
    """Three rows a thread, each on its own cache lines. Not initialised."""
    padded = -(-schema.width // 32) * 32
    return np.empty((threads, 3, padded), schema.state_dtype)


_NOTHING: Final = {np.dtype(name): np.empty((1, 0), name) for name in _DTYPES}


@register_warmup
def _warm_up() -> None:
    for dtype in _DTYPES:
        for mask in (None, np.ones((2, 1), np.uint8)):
            _apply_once(dtype, mask)


def _apply_once(dtype: str, mask: NDArray[np.uint8] | None) -> None:
    """Run the kernels of a dtype on one row, given twice."""
    rule = SparseAdam()
    schema = Schema(2, 1, rule.field_specs(1, dtype), rule.name)
    records = Records(
        space=np.zeros(schema.record_bytes, np.uint8),
        words=np.zeros(1, np.uint64),
        frame_index=np.zeros(1, np.int64),
        frame_offset=np.zeros(1, np.int64),
        word=1,
        undo=np.zeros((1, schema.record_bytes), np.uint8),
        progress=np.zeros((1, PROGRESS_WORDS), np.int64),
        schema=schema,
    )
    order = plan(np.zeros(2, np.int64), 2, Scratch())
    batch = Batch(order, np.zeros((2, 1), dtype), mask, out_values=np.zeros((1, 1), dtype))
    pool = Pool(1)
    rule.apply(pool, records, batch, SparseAdamHyper(lr=0.1), 1, 0, 1)
    pool.close()
