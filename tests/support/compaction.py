"""A table that is trained beside its numpy model, and what its files and books must be."""

from __future__ import annotations

import numpy as np

from momentd_server.storage import frames
from tests.support.local_engine import AdamModel, batch


class Trainer:
    """Updates a table and its numpy model alike."""

    def __init__(self, engine, table, seed=0) -> None:
        self.engine, self.table = engine, table
        self.model = AdamModel(table.schema.rows, table.schema.width)
        self.rng = np.random.default_rng(seed)

    def update(self, rows) -> None:
        grads = self.rng.standard_normal((rows.size, self.model.width), np.float32)
        self.engine.update([batch(self.table, rows, grads)])
        self.model.update(rows, grads)

    def rewrite(self, times=1.0, low=0, high=None) -> None:
        """Random updates of rows in a range, as many as it has rows, `times` over."""
        high = self.model.rows if high is None else high
        for _ in range(round(times * (high - low) / 3000)):
            self.update(np.unique(self.rng.integers(low, high, 3000)))

    def write_all(self) -> None:
        for start in range(0, self.model.rows, 3000):
            self.update(np.arange(start, min(start + 3000, self.model.rows)))

    def check(self, model=None) -> None:
        check(self.engine, self.table, model or self.model)


def check(engine, table, model) -> None:
    for start in range(0, model.rows, 5000):
        count = min(5000, model.rows - start)
        found = engine.gather(
            id=table.id, generation=table.generation, rows=None, range=(start, count), fields=[],
            outs=None,
        )  # fmt: skip
        assert np.array_equal(found.values[0], model.exp_avg[start : start + count])
        assert np.array_equal(found.values[1], model.exp_avg_sq[start : start + count])


def compact(engine) -> int:
    """By hand until nothing is left to do; returns the number of segments."""
    count = 0
    while engine.compactor.run_once():
        count += 1
    return count


def files(engine) -> dict[int, int]:
    return {
        int(path.stem): path.stat().st_size for _, _, path in engine._store.datadir.segment_files()
    }


def books_are_right(engine) -> None:
    """Every count of live records equals what locations and backings say."""
    with engine._lane:
        _check_books(engine)


def _check_books(engine) -> None:
    for table in engine.tables.all():
        slots = table.location[table.location > 0]
        backing = []
        for place in table.location[table.location < 0]:
            backing.append(engine._words[frames.meta_of(place & frames.ROW_MASK, table.geo) + 2])
        slots = np.concatenate((slots, np.array(backing, np.int64)))
        slots = slots[slots > 0]
        ids, counts = np.unique((slots >> 28) & ((1 << 34) - 1), return_counts=True)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            s: n for s, n in table.live.items() if n
        }
        assert {s for s, n in table.live.items() if n} <= set(table.segments)
