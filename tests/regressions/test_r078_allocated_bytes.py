"""R78: sizes that people are told are those that the disk gave, and a small table stays small."""

import numpy as np

from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def test_a_huge_table_with_few_touched_rows_takes_few_bytes(tmp_path):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(20_000_000, 128), "t")
    rows = np.arange(0, 20_000_000, 20_000)
    engine.update([batch(table, rows, np.ones((rows.size, 128), np.float32))])
    engine.flush([])
    files = list(tmp_path.rglob("*.seg"))
    allocated = sum(file.stat().st_blocks * 512 for file in files)
    assert allocated <= 4 << 20
    assert engine.stats().tables[0].disk_bytes == allocated
    engine.stop(discard=True)
    engine.close()
