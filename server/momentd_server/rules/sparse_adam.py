"""torch.optim.SparseAdam over records `exp_avg | exp_avg_sq`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from momentd_wire.errors import InvalidArgument, UnsupportedFeature

from momentd_server.jit import Pool
from momentd_server.rules.rule import Batch, Records
from momentd_server.schema import FieldSpec, Schema

_DTYPES: Final = ("float32", "float64")


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

    name: Final = "sparse_adam"

    def field_specs(self, width: int, dtype: str) -> tuple[FieldSpec, ...]:
        return (
            FieldSpec("exp_avg", dtype, width),
            FieldSpec("exp_avg_sq", dtype, width),
        )

    def check_schema(self, schema: Schema) -> None:
        raise NotImplementedError

    def check_batch(self, schema: Schema, batch: Batch, hyper: object, step: int) -> None:
        raise NotImplementedError

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
        raise NotImplementedError
