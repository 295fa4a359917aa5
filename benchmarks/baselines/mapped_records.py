"""Records exp_avg | exp_avg_sq in one file mapping, updated in place: the best that mmap can do.

The daemon's own sorting, arithmetic, software prefetch and threads, without its process boundary
and without the stores that protect an update from a kill; the weights are added to in the same
pass. What is left is the price of the mapping.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from momentd_server import rules
from momentd_server.jit import Pool
from momentd_server.jit.row_protocol import PROGRESS_WORDS
from momentd_server.rules import sparse_adam
from momentd_server.schema import Schema

from .base import FILL_ROWS, FILLED, Baseline
from .in_place import apply_in_place

# A thread is not woken for less.
LEAST_ROWS = 128
NO_WORDS = np.zeros(1, np.uint64)


class MappedRecords(Baseline):
    """float32 weights on the CPU, contiguous."""

    def __init__(self, parameter: nn.Parameter, folder: Path, lr: float = 1e-3) -> None:
        super().__init__(parameter, folder, lr)
        rule = rules.get("sparse_adam")
        self._schema = Schema(self.rows, self.dim, rule.field_specs(self.dim, "float32"), rule.name)
        self._floats = self._schema.record_bytes // 4
        # A file of holes: a row that was never touched has zeros.
        self._records = np.memmap(
            folder / "records.dat", np.float32, "w+", shape=(self.rows * self._floats,)
        )
        self._pool = Pool(len(os.sched_getaffinity(0)), name="mapping-kernel")
        self._scratch = rules.Scratch()
        self._spare = np.zeros((self._pool.threads, 2, -(-self.dim // 32) * 32), np.float32)
        row_bytes = self._schema.record_bytes + 2 * self.dim * 4
        self._ahead_rows = max(1, min(sparse_adam.AHEAD_BYTES // row_bytes, sparse_adam.AHEAD_ROWS))
        self._layout = sparse_adam.layout_of(self._schema, "none")

    def update(self, gradient: Tensor) -> None:
        rows = gradient._indices()[0].numpy()
        plan = rules.plan(rows, self.rows, self._scratch)
        numbers = sparse_adam._numbers(self.hyper(), self.steps, np.dtype(np.float32))
        self._pool.run(
            apply_in_place,
            plan.distinct,
            np.asarray(self._records),
            NO_WORDS,
            plan.unique,
            plan.unique * self._schema.record_bytes,
            np.uint64(0),
            None,
            None,
            np.zeros((1, PROGRESS_WORDS), np.int64),
            plan.unique,
            self.parameter.data.numpy(),
            plan.order,
            plan.starts,
            gradient._values().numpy(),
            self._spare,
            numbers,
            self._layout,
            self._ahead_rows,
            least=LEAST_ROWS,
        )

    def fill(self) -> None:
        part = FILL_ROWS * self._floats
        for start in range(0, len(self._records), part):
            self._records[start : start + part] = FILLED

    def sync(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._pool.close()
        del self._records
