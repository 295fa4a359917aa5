"""What the number of rows costs: the same update in a table of 1 M and in one of 100 M rows.

Both tables have as many rows in the cache, at the same places of the batch; in the large one they
are spread over all of it, so that its 800 MB of locations are read all over.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import numpy as np

import momentd

from .harness import LR, MIB, Result, Row, Settings, daemon, milliseconds, settle, stats

FEW, MANY = 1_000_000, 100_000_000
DIM = 32
BATCH = 10_000
BLOCK = 20
FILL_ROWS = 50_000
GOAL = 1.3


@dataclass
class Side:
    table: momentd.Table
    # Row of the table by place: those that are in the cache.
    rows: np.ndarray
    blocks: list[list[float]] = field(default_factory=list)


def run(settings: Settings) -> Result:
    """Needs momentd on our side."""
    settings.need_daemon()
    few, batch = settings.rows(FEW), min(BATCH, settings.rows(FEW) // 8)
    random = np.random.default_rng(0)
    # Records, metadata and stock of both tables.
    cache_bytes = int(2 * few * (DIM * 8 + 32) * 1.2) + 128 * MIB
    with daemon(settings, cache_bytes) as own:
        assert own is not None
        with momentd.connect(own.address, run="benchmark") as client:
            sides = [_open(client, rows, few) for rows in (few, settings.rows(MANY))]
            settle(own)
            before = _misses(stats(own))
            _block(sides, random, few, batch)
            for side in sides:
                side.blocks.clear()
            for turn in range(settings.repeats):
                _block(sides[:: -1 if turn % 2 else 1], random, few, batch)
            missed = _misses(stats(own)) - before
    small, large = ([second for block in side.blocks for second in block] for side in sides)
    ratio = statistics.median(large) / statistics.median(small)
    of_blocks = [
        statistics.median(b) / statistics.median(a)
        for a, b in zip(sides[0].blocks, sides[1].blocks, strict=True)
    ]
    result = Result("rows")
    result.rows += [
        Row("1 M rows", milliseconds(small)),
        Row("100 M rows", milliseconds(large)),
        Row(
            "100 M / 1 M",
            {
                "ratio": ratio,
                "ratio_least": min(of_blocks),
                "ratio_most": max(of_blocks),
                "misses": missed,
            },
            f"<= {GOAL}",
            ratio <= GOAL,
        ),
    ]
    result.notes.append(
        f"table.update of {batch:,} distinct rows in random order, dim {DIM}, {few:,} rows of each "
        f"table in the cache; blocks of {BLOCK} in turns, the same places in both."
    )
    return result


def _open(client: momentd.Client, rows: int, touched: int) -> Side:
    """A table of `rows` rows of which `touched`, evenly spread, have been updated."""
    table = client.open_table(f"rows-{rows}", rows=rows, dim=DIM, rule=momentd.rules.SparseAdam())
    places = np.arange(touched) * (rows // touched)
    for start in range(0, touched, FILL_ROWS):
        ids = places[start : start + FILL_ROWS]
        table.update(ids, np.full((len(ids), DIM), 1e-3, np.float32), lr=LR)
    return Side(table, places)


def _block(sides: list[Side], random: np.random.Generator, places: int, batch: int) -> None:
    """The same batches for one side, then for the other."""
    batches = [random.choice(places, batch, replace=False) for _ in range(BLOCK)]
    grads = random.standard_normal((batch, DIM), np.float32)
    for side in sides:
        seconds = []
        for chosen in batches:
            rows = side.rows[chosen]
            began = time.perf_counter()
            side.table.update(rows, grads, lr=LR)
            seconds.append(time.perf_counter() - began)
        side.blocks.append(seconds)


def _misses(reply: object) -> int:
    return sum(table.misses for table in reply.tables)  # type: ignore[attr-defined]
