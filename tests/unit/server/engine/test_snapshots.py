"""Snapshots: one consistent cut, incremental, durable, as it was whatever happens afterwards."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from momentd_server.storage import segments as segments_module
from momentd_wire.errors import (
    CorruptRecord,
    InvalidArgument,
    OutOfSpace,
    SnapshotNotFound,
    StorageFailed,
    TableInUse,
)
from tests.support.compaction import Trainer, books_are_right, check, compact, files
from tests.support.local_engine import adam_schema, open_session, open_table, start_engine

ROWS, WIDTH = 30_000, 64  # 15 MB of records for each table beside 16 MiB of cache
SCHEMA = adam_schema(ROWS, WIDTH)
RECORD_BYTES = 512 + 24


@pytest.fixture
def trainers(engine, session):
    tables = [open_table(engine, session, SCHEMA) for _ in range(2)]
    return [Trainer(engine, table, seed) for seed, table in enumerate(tables)]


def ref(*trainers):
    return [(t.table.id, t.table.generation) for t in trainers]


def create(engine, *trainers, name=None, pinned=False):
    return engine.create_snapshot(ref(*trainers), run=None, name=name, pinned=pinned)


def restored(engine, snapshot_id, name=None, replace=False):
    session = engine.sessions.all()[0] if len(engine.sessions) else open_session(engine)
    return engine.restore_table(
        session, id=snapshot_id, name=name, label=None, run="again", replace=replace
    )


def ids(view):
    return [table.id for table in view.record.tables]


def test_a_restored_table_is_as_it_was_and_goes_its_own_way(engine, trainers):
    for trainer in trainers:
        trainer.rewrite(1)
    view, created, written = create(engine, *trainers)
    assert created
    assert written
    then = [trainer.model.copy() for trainer in trainers]
    for trainer in trainers:
        trainer.rewrite(1)
    for trainer, snapshot_id, model in zip(trainers, ids(view), then, strict=True):
        table = restored(engine, snapshot_id)
        check(engine, table, model)
        other = Trainer(engine, table, seed=9)
        other.model = model.copy()
        other.rewrite(0.5)
        other.check()
        trainer.check()
    books_are_right(engine)


def test_a_cut_is_consistent_over_all_tables_while_they_are_updated(engine, trainers):
    """Each request changes both tables: every snapshot has both after the same number of them."""
    from tests.support.local_engine import AdamModel, batch

    stop, done = threading.Event(), []
    rng = np.random.default_rng(5)
    tables = [trainer.table for trainer in trainers]

    def train() -> None:
        while not stop.is_set():
            rows = [np.unique(rng.integers(0, ROWS, 1500)) for _ in tables]
            grads = [rng.standard_normal((r.size, WIDTH), np.float32) for r in rows]
            engine.update([batch(t, *part) for t, *part in zip(tables, rows, grads, strict=True)])
            done.append((rows, grads))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        views = []
        for wanted in (20, 60, 100):
            while len(done) < wanted:
                thread.join(0.005)
            views.append(create(engine, *trainers)[0])
    finally:
        stop.set()
        thread.join()
    for view in views:
        numbers = {entry.manifest.update_number for entry in view.record.tables}
        assert len(numbers) == 1
        for k, entry in enumerate(view.record.tables):
            model = AdamModel(ROWS, WIDTH)
            for rows, grads in done[: numbers.copy().pop()]:
                model.update(rows[k], grads[k])
            check(engine, restored(engine, entry.id), model)
    books_are_right(engine)


def test_only_what_changed_is_written(engine, trainers):
    trainer = trainers[0]
    trainer.write_all()
    _, _, first = create(engine, trainer)
    assert first <= ROWS * RECORD_BYTES
    trainer.update(np.arange(1000))
    view, created, second = create(engine, trainer)
    assert created
    assert second == 1000 * RECORD_BYTES
    again, created, third = create(engine, trainer)
    assert (again.record.name, created, third) == (view.record.name, False, 0)


def test_equal_states_have_equal_ids_in_other_tables_and_families(engine, session, trainers):
    one, two = trainers
    two.rng = np.random.default_rng(0)
    for trainer in trainers:
        trainer.rewrite(0.3)
    engine.flush([two.table.id])  # written at another time, in other batches
    assert ids(create(engine, one)[0]) == ids(create(engine, two)[0])
    one.update(np.array([7]))
    assert ids(create(engine, one)[0]) != ids(create(engine, two)[0])
    two.rng = np.random.default_rng(0)
    two.rng.bit_generator.state = one.rng.bit_generator.state
    clone = engine.clone_table(
        session, id=one.table.id, generation=one.table.generation, name=None, label="c", run="r"
    )
    assert ids(engine.create_snapshot([(clone.id, clone.generation)], run=None, name=None,
                                      pinned=False)[0]) == ids(create(engine, one)[0])  # fmt: skip


@pytest.mark.parametrize("in_order", [True, False])
def test_snapshots_live_on_after_their_tables_and_a_restart(tmp_path, in_order):
    engine = start_engine(tmp_path)
    trainer = Trainer(engine, open_table(engine, open_session(engine), SCHEMA))
    trainer.write_all()
    view, _, _ = create(engine, trainer, name="mine")
    then = trainer.model.copy()
    trainer.rewrite(2)  # newer batches, some in listed segments
    engine.drop_tables(None, ids=[trainer.table.id], run=None, force=True)
    engine.stop(discard=not in_order)
    engine.close()
    engine = start_engine(tmp_path)
    assert [each.record.name for each in engine.list_snapshots()] == ["mine"]
    table = restored(engine, ids(view)[0])
    check(engine, table, then)
    # A fork of a fork.
    fork = Trainer(engine, table)
    fork.model = then
    fork.rewrite(0.5)
    second, _, _ = create(engine, fork)
    at_second = fork.model.copy()
    fork.rewrite(0.5)
    check(engine, restored(engine, ids(second)[0]), at_second)
    books_are_right(engine)
    engine.stop(discard=True)
    engine.close()


def test_compaction_keeps_what_snapshots_need_and_deleting_gives_it_back(
    engine, trainers, monkeypatch
):
    engine.compactor.stop()
    trainer = trainers[0]
    trainer.write_all()
    view, _, _ = create(engine, trainer)
    then = trainer.model.copy()
    for _ in range(8):
        trainer.rewrite(1)
        compact(engine)
    books_are_right(engine)
    check(engine, restored(engine, ids(view)[0]), then)
    taken = sum(files(engine).values())
    assert taken >= 2 * ROWS * 512 * 0.8
    with engine._lane:
        only = [cut.only.sum() for cut in engine.tables.get(trainer.table.id).kept_cuts]
    assert only[0] > 0
    engine.delete_snapshots([view.record.name])
    with pytest.raises(SnapshotNotFound, match="import"):
        engine.get_snapshot(id=ids(view)[0])
    trainer.rewrite(1)
    compact(engine)
    trainer.check()
    books_are_right(engine)


def test_deleting_leaves_the_files_that_the_table_needs(engine, trainers):
    trainer = trainers[0]
    trainer.write_all()
    first, _, _ = create(engine, trainer)
    engine.delete_snapshots([first.record.name])
    trainer.check()
    second, _, _ = create(engine, trainer)
    trainer.rewrite(0.5)
    third, _, _ = create(engine, trainer)
    then = trainer.model.copy()
    trainer.rewrite(0.5)
    engine.delete_snapshots([second.record.name])
    trainer.check()
    check(engine, restored(engine, ids(third)[0]), then)
    engine.drop_tables(None, ids=[trainer.table.id], run=None, force=True)
    check(engine, restored(engine, ids(third)[0]), then)
    books_are_right(engine)


def test_a_restored_table_that_nobody_changed_has_that_snapshot_already(engine, trainers):
    trainers[0].write_all()
    view, _, _ = create(engine, trainers[0])
    table = restored(engine, ids(view)[0])
    again, created, _ = engine.create_snapshot(
        [(table.id, table.generation)], run=None, name=None, pinned=False
    )
    assert (again.record.name, created) == (view.record.name, False)


def test_a_damaged_file_of_a_snapshot_does_not_stop_compaction(tmp_path):
    engine = start_engine(tmp_path)
    trainer = Trainer(engine, open_table(engine, open_session(engine), SCHEMA, "named"))
    trainer.write_all()
    view, _, _ = create(engine, trainer)
    for _ in range(2):
        trainer.write_all()
        engine.flush([])
    needed = [s for s, n in engine.tables.get(trainer.table.id).live.items() if n]
    cut = engine.tables.all()[0].kept_cuts[0]
    only_its = next(s for s in cut.segments.tolist() if s not in needed)
    path = engine._store.path(engine._store.get(only_its))
    engine.stop()
    engine.close()
    with path.open("r+b") as file:
        file.write(bytes(4096))
    engine = start_engine(tmp_path)
    engine.compactor.stop()
    trainer.engine, trainer.table = engine, engine.get_table(name="named")
    trainer.rewrite(8)
    compact(engine)
    trainer.check()
    (kept,) = engine.tables.kept[engine.tables.all()[0].family]
    engine.snapshots.find_out(engine.tables.all()[0].family)
    assert kept.unreadable
    assert not engine.snapshots.find_out(engine.tables.all()[0].family)
    with pytest.raises(CorruptRecord):
        restored(engine, ids(view)[0])
    engine.delete_snapshots([view.record.name])
    compact(engine)
    trainer.check()
    engine.stop(discard=True)
    engine.close()


def test_a_segment_of_a_cut_is_compacted_with_it(engine, trainers):
    engine.compactor.stop()
    trainer = trainers[0]
    trainer.write_all()
    view, _, _ = create(engine, trainer)
    then = trainer.model.copy()
    trainer.rewrite(3)
    table = engine.tables.get(trainer.table.id)
    cut = table.kept_cuts[0]
    victim = next(s for s in cut.segments.tolist() if not table.segments[s].writable)
    engine.compactor._compact(table.segments[victim])
    assert victim not in cut
    assert victim not in files(engine)
    manifest = engine.get_snapshot(name=view.record.name).record.tables[0].manifest
    assert victim not in [segment for segment, _ in manifest.segments]
    check(engine, restored(engine, ids(view)[0]), then)
    trainer.check()
    books_are_right(engine)


def test_after_a_restart_cuts_are_found_out_and_compaction_goes_on(tmp_path):
    engine = start_engine(tmp_path)
    trainer = Trainer(engine, open_table(engine, open_session(engine), SCHEMA, "named"))
    trainer.write_all()
    view, _, _ = create(engine, trainer)
    then = trainer.model.copy()
    trainer.rewrite(3)
    engine.stop()
    engine.close()
    engine = start_engine(tmp_path)
    engine.compactor.stop()
    family = engine.tables.all()[0].family
    (kept,) = engine.tables.kept[family]
    assert kept.cut.is_unknown
    assert engine.snapshots.find_out(family)
    assert not kept.cut.is_unknown
    assert kept.cut.records().sum() == ROWS
    assert not engine.snapshots.find_out(family)
    check(engine, restored(engine, ids(view)[0]), then)
    engine.stop(discard=True)
    engine.close()


def test_a_write_error_fails_the_snapshot_and_nothing_else(engine, trainers, monkeypatch):
    trainer = trainers[0]
    trainer.update(np.arange(5000))
    real, failing = segments_module.SegmentStore.append, [True]

    def append(self, *args):
        if failing[0]:
            raise StorageFailed("the disk does not want to")
        return real(self, *args)

    monkeypatch.setattr(segments_module.SegmentStore, "append", append)
    with pytest.raises(StorageFailed, match="does not want to"):
        create(engine, trainer)
    assert engine.tables.get(trainer.table.id).snapshot is None
    trainer.update(np.arange(5000))
    failing[0] = False
    view, created, _ = create(engine, trainer)
    assert created
    check(engine, restored(engine, ids(view)[0]), trainer.model)
    assert len(engine.list_snapshots()) == 1


def test_a_named_table_is_replaced_only_if_nobody_uses_it(engine, session):
    trainer = Trainer(engine, open_table(engine, session, SCHEMA, "named"))
    trainer.update(np.arange(100))
    view, _, _ = create(engine, trainer)
    then = trainer.model.copy()
    trainer.update(np.arange(100))
    with pytest.raises(TableInUse, match="exists already"):
        restored(engine, ids(view)[0], "named")
    with pytest.raises(TableInUse, match="is used by"):
        restored(engine, ids(view)[0], "named", replace=True)
    engine.sessions.end(session.id)
    engine.end_session(session.id)
    table = restored(engine, ids(view)[0], "named", replace=True)
    assert table.id != trainer.table.id
    check(engine, table, then)
    assert [t.name for t in engine.list_tables() if t.name] == ["named"]


def test_refusals(engine, trainers, monkeypatch):
    create(engine, trainers[0], name="taken")
    trainers[0].update(np.arange(10))
    with pytest.raises(TableInUse, match="taken"):
        create(engine, trainers[0], name="taken")
    for name in ("", "x" * 101, "line\nbreak"):
        with pytest.raises(InvalidArgument, match="name"):
            create(engine, trainers[0], name=name)
    with pytest.raises(SnapshotNotFound):
        engine.delete_snapshots(["taken", "not there"])
    assert len(engine.list_snapshots()) == 1
    monkeypatch.setattr(type(engine._datadir), "free_bytes", lambda self: 1 << 20)
    with pytest.raises(OutOfSpace, match=r"'test' .*momentd snapshot prune"):
        create(engine, trainers[0])
