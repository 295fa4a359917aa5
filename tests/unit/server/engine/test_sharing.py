"""Several tables and threads under one budget; nothing stays behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from momentd_server.storage.space import SLAB_BYTES
from tests.support.local_engine import (
    AdamModel,
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def test_tables_of_any_record_size_share_a_budget_far_below_their_state(engine, session):
    widths = (4, 33, 128, 768)  # records of 32 B to 6 KiB
    tables = [open_table(engine, session, adam_schema(40_000, w)) for w in widths]
    models = [AdamModel(40_000, w) for w in widths]
    rng = np.random.default_rng(0)
    for _ in range(12):
        for table, model in zip(tables, models, strict=True):
            rows = rng.integers(0, 40_000, 400)
            grads = rng.standard_normal((400, model.width), np.float32)
            engine.update([batch(table, rows, grads)])
            model.update(rows, grads)
    for table, model in zip(tables, models, strict=True):
        rows = rng.integers(0, 40_000, 3000)
        found = engine.gather(
            id=table.id, generation=table.generation, rows=rows, range=None, fields=[], outs=None
        )
        assert np.array_equal(found.values[0], model.exp_avg[rows])
    totals = engine.stats().totals
    assert totals.cache_used_bytes <= totals.cache_bytes
    assert totals.space_bytes <= totals.cache_bytes + totals.location_bytes + 8 * SLAB_BYTES


def test_a_new_table_gets_slabs_from_one_that_fills_the_cache(engine, session):
    big = open_table(engine, session, adam_schema(100_000, 128))
    model = AdamModel(100_000, 128)
    rng = np.random.default_rng(1)

    def update(table, model, count):
        rows = rng.integers(0, model.rows, count)
        grads = rng.standard_normal((count, model.width), np.float32)
        engine.update([batch(table, rows, grads)])
        model.update(rows, grads)

    for _ in range(12):
        update(big, model, 3000)
    assert engine.stats().totals.slabs_free == 0
    small = open_table(engine, session, adam_schema(100_000, 128))
    small_model = AdamModel(100_000, 128)
    for _ in range(6):
        update(small, small_model, 3000)
        update(big, model, 3000)
    by_id = {t.table.id: t for t in engine.stats().tables}
    assert by_id[small.id].frames > 0
    for table, expected in ((big, model), (small, small_model)):
        rows = rng.integers(0, 100_000, 3000)
        found = engine.gather(
            id=table.id, generation=table.generation, rows=rows, range=None, fields=[], outs=None
        )
        assert np.array_equal(found.values[1], expected.exp_avg_sq[rows])


def test_threads_on_tables_of_their_own_and_on_a_shared_one(engine):
    shared = open_table(engine, open_session(engine), adam_schema(20_000, 64), "shared")
    failures = []

    def train(seed):
        try:
            session = open_session(engine)
            own = open_table(engine, session, adam_schema(20_000, 128))
            model = AdamModel(20_000, 128)
            rng = np.random.default_rng(seed)
            for _ in range(15):
                rows = rng.integers(0, 20_000, 800)
                grads = rng.standard_normal((800, 128), np.float32)
                engine.update(
                    [
                        batch(own, rows, grads),
                        batch(shared, rows, np.ones((800, 64), np.float32)),
                    ]
                )
                model.update(rows, grads)
            found = engine.gather(
                id=own.id, generation=own.generation, rows=np.arange(3000), range=None, fields=[],
                outs=None,
            )  # fmt: skip
            assert np.array_equal(found.values[0], model.exp_avg[:3000])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert engine.get_table(name="shared").step == 60


def test_results_do_not_depend_on_threads_or_cache_size(tmp_path):
    results = []
    for k, (threads, cache_mib) in enumerate(((1, 16), (2, 64), (3, 16))):
        path = tmp_path / str(k)
        path.mkdir()
        engine = start_engine(path, threads=threads, cache_mib=cache_mib)
        table = open_table(engine, open_session(engine), adam_schema(30_000, 96))
        rng = np.random.default_rng(7)
        deltas = []
        for _ in range(15):
            rows = rng.integers(0, 30_000, 3500)
            grads = rng.standard_normal((3500, 96), np.float32)
            (outcome,) = engine.update([batch(table, rows, grads)])
            deltas.append(outcome.out_values.tobytes())
        results.append(deltas)
        engine.stop(discard=True)
        engine.close()
    assert results[0] == results[1] == results[2]


def test_fifty_tables_made_used_and_dropped_leave_nothing(engine, tmp_path):
    before = engine.stats().totals
    for seed in range(50):
        session = open_session(engine)
        table = open_table(engine, session, adam_schema(50_000, 128))
        rows = np.random.default_rng(seed).integers(0, 50_000, 3000)
        for _ in range(2):
            engine.update([batch(table, rows, np.ones((3000, 128), np.float32))])
        engine.sessions.end(session.id)
        engine.end_session(session.id)
    after = engine.stats().totals
    assert engine.list_tables() == []
    assert after.slabs_free == before.slabs_free
    assert (after.frames, after.frames_dirty, after.segments) == (0, 0, 0)
    assert list(tmp_path.rglob("*.seg")) == []
    assert after.space_bytes <= after.cache_bytes + 4 * SLAB_BYTES


def test_a_drop_waits_for_requests_in_work(engine, session):
    table = open_table(engine, session, adam_schema(50_000, 128))
    stop = threading.Event()
    errors = []

    def train():
        rng = np.random.default_rng(0)
        while not stop.is_set():
            rows = rng.integers(0, 50_000, 2000)
            try:
                engine.update([batch(table, rows, np.ones((2000, 128), np.float32))])
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=train)
    thread.start()
    engine.drop_tables(session, ids=[table.id], run=None, force=True)
    stop.set()
    thread.join()
    assert [type(error).__name__ for error in errors] in ([], ["TableNotFound"])
    assert engine.stats().totals.slabs_free == engine.stats().totals.slabs


def test_a_clone_shares_files_until_both_are_dropped(engine, session, tmp_path):
    source = open_table(engine, session, adam_schema(5000, 64))
    model = AdamModel(5000, 64)
    engine.update([batch(source, np.arange(3000), np.ones((3000, 64), np.float32))])
    model.update(np.arange(3000), np.ones((3000, 64), np.float32))
    clone = engine.clone_table(
        session, id=source.id, generation=source.generation, name=None, label="", run="r"
    )
    files = set(tmp_path.rglob("*.seg"))
    engine.drop_tables(session, ids=[source.id], run=None, force=False)
    assert set(tmp_path.rglob("*.seg")) == files
    found = engine.gather(
        id=clone.id, generation=clone.generation, rows=np.arange(5000), range=None, fields=[],
        outs=None,
    )  # fmt: skip
    assert np.array_equal(found.values[0], model.exp_avg)
    assert found.step == 1
    engine.drop_tables(session, ids=[clone.id], run=None, force=False)
    assert list(tmp_path.rglob("*.seg")) == []


def test_prefetched_rows_are_hits(engine, session):
    table = open_table(engine, session, adam_schema(60_000, 128))
    for start in range(0, 60_000, 3000):
        rows = np.arange(start, start + 3000)
        engine.update([batch(table, rows, np.ones((3000, 128), np.float32))])
    rows = np.arange(500)
    reading = engine.prefetch(id=table.id, generation=table.generation, rows=rows)
    assert 0 < reading <= 500
    deadline = threading.Event()
    internal = engine.tables.get(table.id)
    for _ in range(200):
        if all(internal.location[rows[:reading]] < 0):
            break
        deadline.wait(0.02)
    misses = internal.counters.misses
    engine.update([batch(table, rows[:reading], np.ones((reading, 128), np.float32))])
    assert internal.counters.misses == misses


def test_space_stays_within_its_bound_while_everything_is_touched(engine, session):
    table = open_table(engine, session, adam_schema(60_000, 128))
    for start in range(0, 60_000, 2000):
        rows = np.arange(start, start + 2000)
        engine.update([batch(table, rows, np.ones((2000, 128), np.float32))])
        totals = engine.stats().totals
        assert totals.space_bytes <= totals.cache_bytes + 12 * 60_000 + 6 * SLAB_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_deltas_are_the_rule_s(engine, session, dtype):
    table = open_table(engine, session, adam_schema(10, 2, dtype))
    grads = np.array([[1.0, 1.0], [3.0, 3.0]], dtype)
    (outcome,) = engine.update([batch(table, [3, 3], grads)])
    found = engine.gather(
        id=table.id, generation=table.generation, rows=np.array([3]), range=None, fields=[],
        outs=None,
    )  # fmt: skip
    assert np.allclose(found.values[0], 0.4)
    assert np.allclose(found.values[1], 0.016)
    assert np.allclose(outcome.out_values, -0.01, rtol=1e-6)
