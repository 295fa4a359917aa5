"""Disk full, damaged files, restarts: what was acknowledged stays, the rest is an error."""

from __future__ import annotations

import numpy as np
import pytest

from momentd_wire.errors import CorruptRecord, OutOfSpace, TableNotFound
from tests.support.compaction import check
from tests.support.local_engine import (
    AdamModel,
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def _train(engine, table, model, seed, steps=1, count=2000):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.integers(0, model.rows, count)
        grads = rng.standard_normal((count, model.width), np.float32)
        engine.update([batch(table, rows, grads)])
        model.update(rows, grads)


def test_a_full_disk_fails_the_call_and_nothing_else(small_disk):
    engine = start_engine(small_disk)
    session = open_session(engine)
    table = open_table(engine, session, adam_schema(60_000, 128))
    model = AdamModel(60_000, 128)
    filled = small_disk / "ballast"
    filled.write_bytes(bytes(8 << 20))

    def fill():
        for seed in range(100):
            _train(engine, table, model, seed)

    with pytest.raises(OutOfSpace):
        fill()
    # The model was not updated by the failed call: the state is what was acknowledged.
    check(engine, table, model)
    hot = np.unique(engine.update([batch(table, [0], np.zeros((1, 128), np.float32))])[0].out_rows)
    model.update(hot, np.zeros((1, 128), np.float32))
    filled.unlink()
    _train(engine, table, model, 1000)
    check(engine, table, model)
    engine.stop(discard=True)
    engine.close()


def test_a_flipped_bit_on_disk_is_an_error_for_the_rows_concerned_only(engine, session, tmp_path):
    table = open_table(engine, session, adam_schema(20_000, 128))
    model = AdamModel(20_000, 128)
    rows = np.arange(20_000)
    for part in np.split(rows, 10):
        grads = np.ones((part.size, 128), np.float32)
        engine.update([batch(table, part, grads)])
        model.update(part, grads)
    engine.flush([])
    segment = min(tmp_path.rglob("*.seg"))
    with segment.open("r+b") as file:
        file.seek(4096 + 700)
        byte = file.read(1)
        file.seek(4096 + 700)
        file.write(bytes([byte[0] ^ 4]))
    bad = []
    for row in range(20_000):
        try:
            engine.gather(
                id=table.id, generation=table.generation, rows=np.array([row]), range=None,
                fields=["exp_avg"], outs=None,
            )  # fmt: skip
        except CorruptRecord as error:
            bad.append(error.details["row"])
        if bad and row > int(bad[0]) + 100:
            break
    # The damaged record may still have a frame; if it was read, exactly one row was refused.
    assert len(bad) <= 1
    everything = engine.tables.all()[0]
    assert everything.counters.bytes_read > 0


def test_a_damaged_record_fails_an_update_with_nothing_changed(tmp_path):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(1000, 128), "t")
    engine.update([batch(table, np.arange(1000), np.ones((1000, 128), np.float32))])
    engine.stop()
    engine.close()
    segment = min(tmp_path.rglob("*.seg"))
    with segment.open("r+b") as file:
        file.seek(4096 + 17)
        file.write(b"\xff")
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(1000, 128), "t")
    with pytest.raises(CorruptRecord) as caught:
        engine.update([batch(table, np.arange(1000), np.ones((1000, 128), np.float32))])
    bad = int(caught.value.details["row"])
    assert engine.get_table(id=table.id).step == 1
    good = np.setdiff1d(np.arange(1000), [bad])
    engine.update([batch(table, good, np.ones((999, 128), np.float32))])
    # All frames that the failed request had reserved were given back.
    stats = engine.stats().tables[0]
    assert stats.frames_dirty == 999
    engine.stop(discard=True)
    engine.close()


def test_unnamed_tables_end_with_an_unclean_stop_and_named_ones_go_back_to_their_commit(tmp_path):
    engine = start_engine(tmp_path)
    session = open_session(engine)
    named = open_table(engine, session, adam_schema(5000, 32), "named")
    unnamed = open_table(engine, session, adam_schema(5000, 32))
    model = AdamModel(5000, 32)
    _train(engine, named, model, 1)
    engine.flush([named.id, unnamed.id])
    _train(engine, named, model.copy(), 2)
    engine.stop(discard=True)
    engine.close()

    engine = start_engine(tmp_path)
    (found,) = engine.list_tables()
    assert (found.name, found.step) == ("named", 1)
    assert found.generation > named.generation
    check(engine, found, model)
    with pytest.raises(TableNotFound):
        engine.get_table(id=unnamed.id)
    engine.stop(discard=True)
    engine.close()


def test_segments_spilled_after_the_commit_do_not_count_after_a_power_cut(tmp_path):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(30_000, 128), "t")
    model = AdamModel(30_000, 128)
    _train(engine, table, model, 1, steps=3)
    engine.flush([])
    committed = model.copy()
    # Far more than the cache holds: most of this is on disk when the power goes.
    _train(engine, table, model, 2, steps=20)
    assert engine.stats().tables[0].bytes_written > 20_000 * 1024
    engine.stop(discard=True)
    engine.close()
    engine = start_engine(tmp_path)
    (found,) = engine.list_tables()
    check(engine, found, committed)
    # And once more, from the new generation, with rows of both.
    _train(engine, found, committed, 3, steps=10)
    engine.stop()
    engine.close()
    engine = start_engine(tmp_path)
    (found,) = engine.list_tables()
    check(engine, found, committed)
    engine.stop(discard=True)
    engine.close()


def test_an_orderly_stop_is_no_new_timeline_and_a_power_cut_is(tmp_path):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(5000, 32), "t")
    model = AdamModel(5000, 32)
    _train(engine, table, model, 1)
    generations = [table.generation]
    for seed, discard in enumerate((False, False, True, False, True)):
        kept = model.copy()
        if discard:
            _train(engine, table, model, 10 + seed, steps=2)
        engine.stop(discard=discard)
        engine.close()
        engine = start_engine(tmp_path)
        (table,) = engine.list_tables()
        generations.append(table.generation)
        model = kept
        check(engine, table, model)
        _train(engine, table, model, 20 + seed)
        if seed < 4:
            engine.flush([])
    first = generations[0]
    assert generations == [first, first, first, first + 1, first + 1, first + 2]
    engine.stop(discard=True)
    engine.close()
