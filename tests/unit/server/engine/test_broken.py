"""A damaged file breaks its table, not the daemon."""

from __future__ import annotations

import numpy as np
import pytest

from momentd_wire.errors import CorruptRecord
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


@pytest.fixture
def damaged(tmp_path):
    """Two named tables; the segment of the first lost its end after an orderly stop."""
    engine = start_engine(tmp_path)
    session = open_session(engine)
    schema = adam_schema(1000, 32)
    tables = [open_table(engine, session, schema, name) for name in ("a", "b")]
    for table in tables:
        engine.update([batch(table, np.arange(1000), np.ones((1000, 32), np.float32))])
    engine.stop()
    engine.close()
    first = min(tmp_path.rglob("*.seg"), key=lambda path: int(path.parent.name, 16))
    with first.open("r+b") as file:
        file.truncate(8192)
    return tmp_path


def test_the_others_are_served_and_the_broken_one_says_what_to_do(damaged):
    engine = start_engine(damaged)
    session = open_session(engine)
    schema = adam_schema(1000, 32)
    broken = next(t.table for t in engine.stats().tables if t.broken)
    whole = open_table(engine, session, schema, "b" if broken.name == "a" else "a")
    engine.update([batch(whole, [1], np.ones((1, 32), np.float32))])
    assert engine.get_table(id=whole.id).step == 2
    for use in (
        lambda: open_table(engine, session, schema, broken.name),
        lambda: engine.update([batch(broken, [1], np.ones((1, 32), np.float32))]),
        lambda: engine.flush([broken.id]),
        lambda: engine.clone_table(
            session, id=broken.id, generation=broken.generation, name=None, label="", run="r"
        ),
    ):
        with pytest.raises(CorruptRecord, match="momentd runs drop test"):
            use()
    engine.stop()
    engine.close()

    engine = start_engine(damaged)
    session = open_session(engine)
    assert [t.broken for t in engine.stats().tables].count(True) == 1
    assert engine.drop_tables(session, ids=[broken.id], run=None, force=False) == 1
    fresh = open_table(engine, session, schema, broken.name)
    engine.update([batch(fresh, [1], np.ones((1, 32), np.float32))])
    engine.stop()
    engine.close()
    engine = start_engine(damaged)
    assert [t.broken for t in engine.stats().tables] == [False, False]
    engine.stop(discard=True)
    engine.close()
