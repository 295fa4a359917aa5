"""Records in plain memory, for rules without an engine, and a float64 loop to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from momentd_server import rules
from momentd_server.jit import Pool
from momentd_server.jit.row_protocol import PROGRESS_WORDS
from momentd_server.schema import Schema

DIRTY = 2


@dataclass
class Memory:
    """All rows of a table, scattered over frames: row r is in frame `frame_of[r]`."""

    schema: Schema
    space: np.ndarray
    words: np.ndarray
    frame_of: np.ndarray
    undo: np.ndarray
    progress: np.ndarray

    @classmethod
    def zeros(cls, rows: int, width: int, dtype: str = "float32", *, workers: int = 4) -> Memory:
        rule = rules.get("sparse_adam")
        schema = Schema(rows, width, rule.field_specs(width, dtype), rule.name)
        return cls(
            schema,
            np.zeros(rows * schema.record_bytes, np.uint8),
            np.zeros(rows, np.uint64),
            np.random.default_rng(rows).permutation(rows),
            np.zeros((workers, schema.record_bytes), np.uint8),
            np.zeros((workers, PROGRESS_WORDS), np.int64),
        )

    def records(self, plan: rules.Plan, number: int) -> rules.Records:
        frames = self.frame_of[plan.unique]
        return rules.Records(
            space=self.space,
            words=self.words,
            frame_index=frames,
            frame_offset=frames * self.schema.record_bytes,
            word=number << 8 | DIRTY,
            undo=self.undo,
            progress=self.progress,
            schema=self.schema,
        )

    def field(self, number: int) -> np.ndarray:
        """A copy of field `number` of all rows, in order of rows: (rows, width)."""
        spec, offset = self.schema.fields[number], self.schema.offsets[number]
        records = self.space.reshape(self.schema.rows, -1)[self.frame_of]
        return records[:, offset : offset + spec.nbytes].copy().view(spec.dtype)

    def update(
        self,
        pool: Pool,
        rows: np.ndarray,
        grads: np.ndarray,
        hyper: rules.SparseAdamHyper,
        step: int,
        *,
        chunk: int | None = None,
        **more: object,
    ) -> tuple[np.ndarray, np.ndarray]:
        """One update; returns the distinct rows and their results, NaN where none was written."""
        rule = rules.get(self.schema.rule)
        plan = rules.plan(np.asarray(rows, np.int64), self.schema.rows, rules.Scratch())
        out = np.full((plan.distinct, self.schema.width), np.nan, self.schema.state_dtype)
        batch = rules.Batch(plan, grads, out_values=out, **more)
        rule.check_batch(self.schema, batch, hyper, step)
        records = self.records(plan, step)
        size = chunk or max(plan.distinct, 1)
        for start in range(0, plan.distinct, size):
            stop = min(start + size, plan.distinct)
            rule.apply(pool, records, batch, hyper, step, start, stop)
        return plan.unique, out


def reference(avg, sq, rows, grads, hyper, step, mask=None):
    """SparseAdam by the book, in float64, element by element; changes avg and sq in place.

    Returns {row: delta (width,)} with 0 where no gradient has an element.
    """
    sign = -1.0 if hyper.maximize else 1.0
    correction1, correction2 = 1 - hyper.beta1**step, 1 - hyper.beta2**step
    step_size = hyper.lr * math.sqrt(correction2) / correction1
    deltas = {}
    for row in sorted({int(row) for row in rows}):
        deltas[row] = np.zeros(avg.shape[1])
        positions = [i for i, other in enumerate(rows) if other == row]
        for j in range(avg.shape[1]):
            here = [i for i in positions if mask is None or mask[i, j]]
            if not here:
                continue
            g = sign * sum(float(grads[i, j]) for i in here)
            avg[row, j] = hyper.beta1 * avg[row, j] + (1 - hyper.beta1) * g
            sq[row, j] = hyper.beta2 * sq[row, j] + (1 - hyper.beta2) * g * g
            deltas[row][j] = -step_size * avg[row, j] / (math.sqrt(sq[row, j]) + hyper.eps)
    return deltas
