"""The cache is shared fairly between tables and runs, and nobody starves."""

import threading

import numpy as np
import pytest

from momentd_server.engine import sharing
from momentd_wire.errors import CacheTooSmall
from tests.support.local_engine import (
    AdamModel,
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def update(engine, view, rows):
    grads = np.ones((len(rows), view.schema.width), np.float32)
    return engine.update([batch(view, rows, grads)])


def open_in_run(engine, session, run, schema):
    view, _ = engine.open_table(
        session, name=None, label="t", schema=schema, run=run, mode="open_or_create"
    )
    return view


def slabs(engine, view):
    return engine.tables.get(view.id).slabs.size


def fill(engine, view, rng):
    for _ in range(10):
        update(engine, view, rng.integers(0, view.schema.rows, 3000))


def test_a_small_table_keeps_its_rows_beside_a_large_one_and_the_other_way_round(engine, session):
    rng = np.random.default_rng(0)
    large = open_table(engine, session, adam_schema(100_000, 128))
    fill(engine, large, rng)
    small = open_table(engine, session, adam_schema(4000, 128))  # three slabs of the seven
    for _ in range(60):
        update(engine, large, rng.integers(0, 100_000, 1500))
        update(engine, small, rng.integers(0, 4000, 600))
    counters = engine.tables.get(small.id).counters
    misses = counters.misses
    for _ in range(20):
        update(engine, large, rng.integers(0, 100_000, 1500))
        update(engine, small, rng.integers(0, 4000, 600))
    assert counters.misses - misses < 0.3 * 20 * 600
    assert slabs(engine, small) <= 4
    assert slabs(engine, large) >= 3


def test_runs_have_equal_shares_whatever_their_number_of_tables(engine, session):
    rng = np.random.default_rng(0)
    many = [open_in_run(engine, session, "many", adam_schema(50_000, 128)) for _ in range(3)]
    one = open_in_run(engine, session, "one", adam_schema(50_000, 128))
    for _ in range(60):
        for view in many:
            update(engine, view, rng.integers(0, 50_000, 800))
        update(engine, one, rng.integers(0, 50_000, 800))
    # Seven slabs: half of them, but for what rounds.
    assert slabs(engine, one) >= 3
    assert all(slabs(engine, view) >= 1 for view in many)


def test_an_idle_table_gives_its_slabs_only_to_who_wants_them(engine, session, monkeypatch):
    monkeypatch.setattr(sharing, "IDLE_S", 0.0)
    rng = np.random.default_rng(0)
    idle = open_table(engine, session, adam_schema(60_000, 128))
    fill(engine, idle, rng)
    kept = slabs(engine, idle)
    busy = open_table(engine, session, adam_schema(60_000, 128))
    rows = rng.permutation(60_000)
    update(engine, busy, rows[:500])
    update(engine, busy, rows[:500])
    assert slabs(engine, idle) >= kept - 1
    for k in range(60):
        update(engine, busy, rows[1000 * (k % 60) :][:1000])
    assert slabs(engine, busy) >= kept - 1
    update(engine, idle, rows[:500])


def test_many_tables_of_one_request_under_pressure(engine, session):
    # Together they fill the cache's slabs, each with a rest of one.
    rng = np.random.default_rng(0)
    widths = [128, 128, 96, 64, 32]
    views = [open_table(engine, session, adam_schema(20_000, width)) for width in widths]
    models = [AdamModel(20_000, width) for width in widths]
    for _ in range(20):
        batches = []
        for view, model in zip(views, models, strict=True):
            rows = rng.integers(0, 20_000, 600)
            grads = rng.standard_normal((600, model.width), np.float32)
            batches.append(batch(view, rows, grads))
            model.update(rows, grads)
        engine.update(batches)
    for view, model in zip(views, models, strict=True):
        found = engine.gather(
            id=view.id, generation=view.generation, rows=np.arange(20_000), range=None, fields=[],
            outs=None,
        )  # fmt: skip
        assert np.array_equal(found.values[0], model.exp_avg)
    for table in engine.tables.all():
        assert (table.promised, table.leaving) == (0, {}) or engine.stats().totals.slabs_free == 0


def test_requests_that_each_need_half_of_the_slabs_end(engine, session):
    views = [open_table(engine, session, adam_schema(40_000, 128)) for _ in range(3)]
    errors = []

    def train(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(12):
                pair = [views[k] for k in rng.permutation(3)[:2]]
                rows = np.unique(rng.integers(0, 40_000, 1700))
                grads = np.ones((rows.size, 128), np.float32)
                engine.update([batch(view, rows, grads) for view in pair])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []


def test_more_tables_than_slabs_name_a_cache_that_is_enough(tmp_path, engine, session):
    def request(views):
        return [batch(view, [1], np.ones((1, 8), np.float32)) for view in views]

    views = [open_table(engine, session, adam_schema(100, 8)) for _ in range(12)]
    with pytest.raises(CacheTooSmall) as refusal:
        engine.update(request(views))
    engine.stop(discard=True)
    path = tmp_path / "larger"
    path.mkdir()
    larger = start_engine(path, cache_mib=int(refusal.value.details["needed_bytes"]) >> 20)
    session = open_session(larger)
    views = [open_table(larger, session, adam_schema(100, 8)) for _ in range(12)]
    assert len(larger.update(request(views))) == 12
    larger.stop(discard=True)
    larger.close()


def test_a_flush_goes_on_if_slabs_come_or_go_while_it_looks(engine, session, monkeypatch):
    table = open_table(engine, session, adam_schema(2000, 128), "t")
    update(engine, table, np.arange(2000))
    spiller, real = engine.tables.spiller, engine.tables.spiller._turn
    turns = []

    def turn(internal, batch, age):
        turns.append(age)
        if len(turns) == 1:
            # As when a slab joins or leaves: the turn ends, and has found nothing.
            internal.slabs = internal.slabs.copy()
            return False
        return real(internal, batch, age)

    monkeypatch.setattr(spiller, "_turn", turn)
    engine.flush([table.id])
    assert len(turns) > 1
    assert engine.tables.get(table.id).dirty == 0
