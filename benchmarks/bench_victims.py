"""Which rows stay in the cache under Zipf: misses beside a perfect choice and LRU."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

import momentd

from .harness import Result, Row, Settings, daemon

Ids = NDArray[np.int64]

ROWS = 2_000_000
DIM = 8
FRAME_BYTES = 2 * DIM * 4 + 32  # a record and its metadata
DRAWN = 10_000
EXPONENT = 1.05
# A turn-over, as many misses as the cache has rows, takes about 150 batches.
BATCHES = 3_000
COUNTED = 1_000


def run(settings: Settings) -> Result:
    """Narrow rows, so that time is spent on finding and reading rows; needs momentd on our side."""
    rows = settings.rows(ROWS)
    zipf = Zipf(rows, settings.rows(DRAWN))
    with daemon(settings, rows // 10 * FRAME_BYTES) as own:
        if own is None:
            raise ValueError("this benchmark measures the daemon: it cannot run with side=torch")
        with momentd.connect(own.address) as client:
            table = client.open_table("zipf", rows=rows, dim=DIM, rule=momentd.rules.SparseAdam())
            settings.console.print("filling ...")
            for ids in np.array_split(zipf.shuffled, -(-rows // DRAWN)):
                update(table, ids)
            frames = client.stats().tables[0].frames
            lru, hot = LRU(frames), zipf.most_popular(frames)
            settings.console.print(f"training, {frames} frames ...")
            for _ in range(BATCHES):
                ids = zipf.batch()
                update(table, ids)
                lru.use(ids)
            misses = -client.stats().tables[0].misses
            rivals = seen = perfect = 0
            for _ in range(COUNTED):
                ids = zipf.batch()
                update(table, ids)
                rivals += lru.use(ids)
                seen += ids.size
                perfect += int((~hot[ids]).sum())
            misses += client.stats().tables[0].misses
    result = Result("victims")
    result.rows.append(
        Row(
            f"misses / those of the {frames:,} most popular rows",
            {"momentd": misses / perfect, "LRU": rivals / perfect},
            "<= 1.15", reached=misses <= 1.15 * perfect,
        )
    )  # fmt: skip
    points = 100 * (rivals - misses) / seen
    result.rows.append(
        Row(
            "hit ratio",
            {"momentd": 1 - misses / seen, "LRU": 1 - rivals / seen, "perfect": 1 - perfect / seen},
            ">= LRU - 3 points", reached=points >= -3,
        )
    )  # fmt: skip
    result.notes.append(
        f"Zipf {EXPONENT} over {rows:,} rows, {DRAWN:,} ids drawn a batch and made distinct; the "
        f"last {COUNTED:,} of {BATCHES + COUNTED:,} batches."
    )
    return result


def update(table: momentd.Table, ids: Ids) -> None:
    table.update(ids, np.ones((ids.size, DIM), np.float32), lr=1e-3)


class Zipf:
    """Row ids of falling popularity, in no order that shows in the ids."""

    def __init__(self, rows: int, drawn: int) -> None:
        self._rng = np.random.default_rng(0)
        share = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
        self._up_to = np.cumsum(share) / share.sum()
        self._drawn = drawn
        self.shuffled: Ids = self._rng.permutation(rows)

    def batch(self) -> Ids:
        """Distinct ids, ascending."""
        at = np.searchsorted(self._up_to, self._rng.random(self._drawn))
        return np.unique(self.shuffled[np.minimum(at, self.shuffled.size - 1)])

    def most_popular(self, count: int) -> NDArray[np.bool_]:
        """By row: whether it is one of so many."""
        chosen = np.zeros(self.shuffled.size, np.bool_)
        chosen[self.shuffled[:count]] = True
        return chosen


class LRU:
    """The same number of rows, of which the one that was not used for longest goes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: OrderedDict[int, None] = OrderedDict()

    def use(self, ids: Ids) -> int:
        """How many of them were not there."""
        missed = 0
        for row in ids.tolist():
            if row in self._rows:
                self._rows.move_to_end(row)
                continue
            missed += 1
            self._rows[row] = None
            if len(self._rows) > self._size:
                self._rows.popitem(last=False)
        return missed
