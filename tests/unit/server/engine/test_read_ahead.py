"""Rows that are read once for all who want them, and rows that are read before they are wanted."""

import threading
import time

import numpy as np
import pytest

from momentd_wire.errors import StorageFailed
from tests.support.local_engine import AdamModel, adam_schema, batch, open_table

ROWS, WIDTH = 40_000, 128  # 40 MB of records; the cache has 16


class Disk:
    """The engine's reads: they can be held back, made to fail, and are counted by row."""

    def __init__(self, engine, monkeypatch) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.may_go.set()
        self.rows: list[int] = []
        self.failures = 0
        self._read = engine._readers.read
        monkeypatch.setattr(engine._readers, "read", self.read)

    def hold(self) -> None:
        self.may_go.clear()
        while self.begun.acquire(blocking=False):
            continue

    def read(self, fds, offsets, record_bytes, rows, *rest):
        self.rows += rows.tolist()
        self.begun.release()
        assert self.may_go.wait(30)
        status = self._read(fds, offsets, record_bytes, rows, *rest)
        if self.failures:
            self.failures -= 1
            status[:] = 5  # EIO
        return status


@pytest.fixture
def disk(engine, monkeypatch):
    return Disk(engine, monkeypatch)


@pytest.fixture
def table(engine, session):
    view = open_table(engine, session, adam_schema(ROWS, WIDTH))
    fill(engine, view)
    return view


@pytest.fixture
def model():
    model = AdamModel(ROWS, WIDTH)
    for start in range(0, ROWS, 2000):
        model.update(np.arange(start, start + 2000), grads(2000))
    return model


def fill(engine, view):
    for start in range(0, ROWS, 2000):
        engine.update([batch(view, np.arange(start, start + 2000), grads(2000))])


def grads(rows):
    return np.ones((rows, WIDTH), np.float32)


def cold(engine, view, count, skip=0):
    """Rows that are on disk only."""
    return np.flatnonzero(engine.tables.get(view.id).location > 0)[skip:][:count]


def update(engine, view, rows):
    return engine.update([batch(view, rows, grads(len(rows)))])


def in_background(call, *args):
    result = []

    def run():
        try:
            result.append(call(*args))
        except Exception as error:  # the test looks at it
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def wait_until(condition):
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to pass within 30 s")


def are_here(internal, rows):
    return bool((internal.location[rows] < 0).all())


def all_moments(engine, view):
    found = engine.gather(
        id=view.id, generation=view.generation, rows=np.arange(ROWS), range=None, fields=[],
        outs=None,
    )  # fmt: skip
    return found.values


def prefetch(engine, view, rows):
    return engine.prefetch(id=view.id, generation=view.generation, rows=rows)


def test_two_requests_read_a_row_once(engine, table, model, disk):
    rows = cold(engine, table, 1500)
    internal = engine.tables.get(table.id)
    disk.hold()
    disk.rows.clear()
    first, one = in_background(update, engine, table, rows[:1000])
    assert disk.begun.acquire(timeout=30)
    second, two = in_background(update, engine, table, rows[500:])
    assert disk.begun.acquire(timeout=30)
    disk.may_go.set()
    first.join()
    second.join()
    assert sorted(disk.rows) == rows.tolist()
    assert internal.counters.reads_shared == 500
    assert {r[0].update_number for r in (one[0], two[0])} == {21, 22}
    model.update(rows[:1000], grads(1000))
    model.update(rows[500:], grads(1000))
    assert np.array_equal(all_moments(engine, table)[0], model.exp_avg)


def test_a_request_for_few_rows_does_not_wait_for_a_long_flight(engine, table, disk, monkeypatch):
    monkeypatch.setattr("momentd_server.engine.flight.SHORT", 500)
    rows = cold(engine, table, 1000)
    disk.hold()
    long, _ = in_background(update, engine, table, rows)
    assert disk.begun.acquire(timeout=30)
    disk.rows.clear()
    few, result = in_background(update, engine, table, rows[:10])
    assert disk.begun.acquire(timeout=30)
    assert disk.rows == rows[:10].tolist()
    disk.may_go.set()
    few.join()
    long.join()
    assert result[0][0].rows == 10


def test_who_waited_for_a_read_that_failed_reads_for_himself(engine, table, disk):
    rows = cold(engine, table, 1000)
    disk.hold()
    disk.failures = 1
    first, one = in_background(update, engine, table, rows)
    assert disk.begun.acquire(timeout=30)
    second, two = in_background(update, engine, table, rows)
    wait_until(lambda: engine.tables.get(table.id).counters.reads_shared == 1000)
    disk.may_go.set()
    first.join()
    second.join()
    assert isinstance(one[0], StorageFailed)
    assert two[0][0].rows == 1000


def test_requests_over_two_tables_that_share_both_ways_end(engine, session, table, disk):
    other = open_table(engine, session, adam_schema(ROWS, WIDTH))
    fill(engine, other)
    rng = np.random.default_rng(0)
    errors = []

    def train(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            pair = [table, other] if rng.random() < 0.5 else [other, table]
            rows = np.unique(rng.integers(0, 3000, 600))
            outcomes = engine.update([batch(view, rows, grads(rows.size)) for view in pair])
            if [outcome.rows for outcome in outcomes] != [rows.size] * 2:
                errors.append("rows are missing")
            # Pushes the others out again.
            rows = rng.permutation(np.arange(3000, ROWS))[:2500]
            update(engine, pair[0], rows)

    threads = [in_background(train, seed) for seed in rng.integers(0, 1000, 4)]
    for thread, _ in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors
    assert [result for _, result in threads] == [[None]] * 4
    for view in (table, other):
        internal = engine.tables.get(view.id)
        assert internal.flights == []
        assert not internal.retirement.reads


def test_prefetched_rows_cost_a_step_no_read(engine, table, model, disk):
    rows = cold(engine, table, 2000)
    internal = engine.tables.get(table.id)
    assert prefetch(engine, table, rows) == 2000
    wait_until(lambda: are_here(internal, rows))
    assert internal.counters.rows_prefetched == 2000
    assert internal.fresh == 2000
    disk.rows.clear()
    misses = internal.counters.misses
    update(engine, table, rows)
    assert disk.rows == []
    assert internal.counters.misses == misses
    assert internal.fresh == 0
    model.update(rows, grads(2000))
    assert np.array_equal(all_moments(engine, table)[0], model.exp_avg)


def test_a_step_waits_for_the_prefetch_of_its_own_rows(engine, table, disk):
    rows = cold(engine, table, 1000)
    disk.hold()
    disk.rows.clear()
    prefetch(engine, table, rows)
    assert disk.begun.acquire(timeout=30)
    thread, result = in_background(update, engine, table, rows)
    wait_until(lambda: engine.tables.get(table.id).counters.reads_shared == 1000)
    disk.may_go.set()
    thread.join()
    assert result[0][0].rows == 1000
    assert sorted(disk.rows) == rows.tolist()


def test_read_ahead_takes_no_more_than_a_quarter_of_the_cache(engine, table):
    internal = engine.tables.get(table.id)
    rows = cold(engine, table, 12_000)
    most = engine.info.request_record_bytes // internal.frame_bytes
    for start in range(0, 12_000, 2000):
        prefetch(engine, table, rows[start : start + 2000])
    wait_until(lambda: internal.counters.rows_prefetched >= most - 2000)
    for _ in range(20):
        assert internal.fresh <= most
        time.sleep(0.01)


def test_what_was_never_used_makes_room_for_other_read_ahead(engine, table, monkeypatch):
    monkeypatch.setattr("momentd_server.engine.prefetch._PATIENCE_S", 0.2)
    internal = engine.tables.get(table.id)
    rows = cold(engine, table, 8000)
    prefetch(engine, table, rows[:6000])
    wait_until(lambda: internal.fresh == 0 and internal.counters.rows_prefetched > 1000)
    wanted = cold(engine, table, 500)
    prefetch(engine, table, wanted)
    wait_until(lambda: are_here(internal, wanted))


def test_a_long_wish_is_brought_in_parts(engine, table, disk, monkeypatch):
    monkeypatch.setattr("momentd_server.engine.touch.SHORT", 300)
    sizes = []
    publish = engine._toucher._publish
    monkeypatch.setattr(
        engine._toucher, "_publish",
        lambda fetch, pins: sizes.append(fetch.rows.size) or publish(fetch, pins),
    )  # fmt: skip
    rows = cold(engine, table, 1000)
    prefetch(engine, table, rows)
    wait_until(lambda: are_here(engine.tables.get(table.id), rows))
    assert sizes == [300, 300, 300, 100]


def test_a_prefetch_that_fails_changes_nothing(engine, table, model, disk):
    rows = cold(engine, table, 500)
    disk.failures = 1
    prefetch(engine, table, rows)
    wait_until(lambda: disk.failures == 0)
    update(engine, table, rows)
    model.update(rows, grads(500))
    assert np.array_equal(all_moments(engine, table)[0], model.exp_avg)


def test_a_table_can_be_dropped_while_rows_of_it_are_wished_for(engine, session, table, disk):
    rows = cold(engine, table, 3000)
    disk.hold()
    for start in range(0, 3000, 300):
        prefetch(engine, table, rows[start : start + 300])
    assert disk.begun.acquire(timeout=30)
    thread, result = in_background(
        lambda: engine.drop_tables(session, ids=[table.id], run=None, force=True)
    )
    disk.may_go.set()
    thread.join()
    assert result == [1]
    assert engine.stats().totals.slabs_free == engine.stats().totals.slabs


def test_the_prefetcher_outlives_a_table_that_is_gone(engine, session, table):
    gone = open_table(engine, session, adam_schema(ROWS, WIDTH))
    fill(engine, gone)
    prefetch(engine, gone, cold(engine, gone, 100))
    engine.drop_tables(session, ids=[gone.id], run=None, force=True)
    rows = cold(engine, table, 100)
    prefetch(engine, table, rows)
    wait_until(lambda: are_here(engine.tables.get(table.id), rows))
