"""Memory for plans is shared by whoever needs it, and given back."""

import threading

import numpy as np

from momentd_server import rules
from momentd_server.engine.scratch import Scratches
from tests.support.local_engine import adam_schema, batch, open_table


def test_requests_one_after_the_other_use_the_same_memory():
    scratches = Scratches()
    with scratches.lend(2) as first:
        rules.plan(np.arange(5000), 5000, first[0])
    with scratches.lend(2) as second:
        assert second == first
        with scratches.lend(1) as other:
            assert other[0] not in first


def test_a_connection_that_ended_or_idles_holds_none(engine, session, monkeypatch):
    table = open_table(engine, session, adam_schema(100_000, 2))
    rows = np.arange(50_000)

    def train():
        engine.update([batch(table, rows, np.ones((rows.size, 2), np.float32))])

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine._scratches.nbytes >= 56 * rows.size
    engine.tidy()
    assert engine._scratches.nbytes >= 56 * rows.size
    monkeypatch.setattr("momentd_server.engine.scratch._KEPT_S", -1.0)
    engine.tidy()
    assert engine._scratches.nbytes == 0
