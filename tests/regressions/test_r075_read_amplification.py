"""R75: a cold row costs the blocks that hold it, not a read-ahead window of 128 KiB."""

from pathlib import Path

import numpy as np

from momentd_server.storage import files
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_random_cold_rows_read_little_more_than_their_blocks(tmp_path):
    engine = start_engine(tmp_path)
    if not files.takes_direct_io(tmp_path):
        engine.stop(discard=True)
        engine.close()
        return
    table = open_table(engine, open_session(engine), adam_schema(60_000, 128), "t")
    for start in range(0, 60_000, 2000):
        rows = np.arange(start, start + 2000)
        engine.update([batch(table, rows, np.ones((2000, 128), np.float32))])
    engine.flush([])
    rows = np.random.default_rng(0).permutation(60_000)[:3000]
    internal = engine.tables.get(table.id)
    cold = int((internal.location[rows] > 0).sum())
    before = _read_bytes()
    engine.gather(
        id=table.id, generation=table.generation, rows=rows, range=None, fields=["exp_avg"],
        outs=None,
    )  # fmt: skip
    assert cold > 1000
    # A record of 1 KiB lies in one or two blocks of 4 KiB.
    assert _read_bytes() - before <= cold * 8192 * 1.2
    engine.stop(discard=True)
    engine.close()
