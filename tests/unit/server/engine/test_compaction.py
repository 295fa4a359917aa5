"""Compaction: little more disk than is needed, every record as it was, every file given back."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from momentd_server.engine import compaction
from momentd_server.storage import segments as segments_module
from momentd_wire.errors import OutOfSpace, StorageFailed
from tests.support.compaction import Trainer, books_are_right, check, compact, files
from tests.support.disks import small_file_system
from tests.support.local_engine import adam_schema, open_session, open_table, start_engine

ROWS, WIDTH = 60_000, 128  # 60 MB of records beside 16 MiB of cache
RECORD_BYTES = 1024 + 24
SLACK = 2 * (16 << 20) + (16 << 20) + (8 << 20)  # slack, the open segment, a batch


@pytest.fixture
def by_hand(monkeypatch):
    """No compaction but by `run_once`."""
    monkeypatch.setattr(compaction.Compactor, "start", lambda self: None)


@pytest.fixture
def trainer(engine, session):
    return Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH)))


def test_the_disk_holds_at_most_twice_what_is_needed_and_the_records_stay(engine, trainer):
    trainer.write_all()
    for _ in range(6):
        trainer.rewrite()
    engine.compactor.stop()
    compact(engine)
    table = engine.tables.get(trainer.table.id)
    assert table.counters.segments_compacted > 3
    assert sum(files(engine).values()) <= 2 * ROWS * RECORD_BYTES + SLACK
    assert set(files(engine)) >= set(table.segments)
    books_are_right(engine)
    trainer.check()


def test_a_segment_that_nothing_needs_is_given_back(by_hand, engine, trainer):
    trainer.write_all()
    first = min(files(engine))
    for _ in range(3):
        trainer.write_all()
    assert first not in files(engine)
    assert sum(files(engine).values()) < 3 * ROWS * RECORD_BYTES
    books_are_right(engine)
    trainer.check()


def test_files_go_away_while_readers_overlap(by_hand, engine, trainer):
    trainer.write_all()
    table = engine.tables.get(trainer.table.id)
    with engine._lane:
        before = table.retirement.begin_read()
    first = min(table.segments)
    trainer.write_all()
    with engine._lane:
        after = table.retirement.begin_read()
    trainer.write_all()
    # Readers are in flight all the time: those of later do not matter to the file.
    assert first in files(engine)
    with engine._lane:
        table.retirement.end_read(before)
    engine.tables.spiller.release_unneeded(table)
    assert first not in files(engine)
    with engine._lane:
        table.retirement.end_read(after)


def test_clones_that_diverge_share_what_is_copied(by_hand, engine, session, trainer):
    trainer.write_all()
    twin = engine.clone_table(
        session, id=trainer.table.id, generation=trainer.table.generation, name=None, label="c",
        run="test",
    )  # fmt: skip
    other = Trainer(engine, twin, seed=1)
    other.model = trainer.model.copy()
    for _ in range(8):
        trainer.rewrite(high=ROWS // 2)
        other.rewrite(low=ROWS // 2)
    assert compact(engine) > 2
    books_are_right(engine)
    trainer.check()
    other.check()
    engine.drop_tables(session, ids=[trainer.table.id], run=None, force=False)
    other.rewrite()
    compact(engine)
    books_are_right(engine)
    other.check()
    engine.drop_tables(session, ids=[twin.id], run=None, force=False)
    compact(engine)
    assert files(engine) == {}


@pytest.mark.usefixtures("by_hand")
def test_a_kill_after_compaction_leaves_the_last_flush(tmp_path):
    engine = start_engine(tmp_path, disk_ratio=1.3)
    schema = adam_schema(ROWS, WIDTH)
    trainer = Trainer(engine, open_table(engine, open_session(engine), schema, "named"))
    trainer.write_all()
    trainer.rewrite()
    engine.flush([])
    flushed = trainer.model.copy()
    for _ in range(3):
        trainer.rewrite(1, high=ROWS // 2)
    table = engine.tables.get(trainer.table.id)
    listed = {segment for segment, _ in table.record.manifest.segments}
    for _ in range(3):
        trainer.rewrite(1, high=ROWS // 2)
    assert compact(engine) > 2
    # The committed state lives in other files by now.
    assert {segment for segment, _ in table.record.manifest.segments} != listed
    books_are_right(engine)
    trainer.check()
    engine.stop(discard=True)
    engine.close()

    engine = start_engine(tmp_path, disk_ratio=1.3)
    table = open_table(engine, open_session(engine), schema, "named")
    again = Trainer(engine, table, seed=2)
    again.model = flushed.copy()
    again.check()
    books_are_right(engine)
    for _ in range(6):
        again.rewrite()
    assert compact(engine) > 2
    again.check()
    engine.stop(discard=True)
    engine.close()

    engine = start_engine(tmp_path, disk_ratio=1.3)
    check(engine, open_table(engine, open_session(engine), schema, "named"), flushed)
    engine.stop(discard=True)
    engine.close()


@pytest.mark.usefixtures("by_hand")
def test_a_flush_in_the_middle_of_a_segment(tmp_path):
    engine = start_engine(tmp_path, disk_ratio=1.3)
    schema = adam_schema(ROWS, WIDTH)
    trainer = Trainer(engine, open_table(engine, open_session(engine), schema, "named"))
    trainer.write_all()
    engine.flush([])
    for _ in range(6):
        trainer.rewrite(high=ROWS // 2)
    compactor, real = engine.compactor, engine.compactor._move_some
    flushes = []

    def move_and_flush(job, at):
        done = real(job, at)
        if len(flushes) < 3:
            engine.tables.moving.release()
            try:
                engine.flush([])
            finally:
                engine.tables.moving.acquire()
            flushes.append(trainer.model.copy())
            trainer.update(np.arange(len(flushes) * 1000, ROWS, 50))
        return done

    compactor._move_some = move_and_flush
    assert compact(engine) > 2
    assert len(flushes) == 3
    books_are_right(engine)
    trainer.check()
    engine.stop(discard=True)
    engine.close()
    engine = start_engine(tmp_path, disk_ratio=1.3)
    check(engine, open_table(engine, open_session(engine), schema, "named"), flushes[-1])
    engine.stop(discard=True)
    engine.close()


def test_updates_and_reads_at_the_same_time(engine, session, trainer):
    trainer.write_all()
    stop = threading.Event()
    seen = []

    def read() -> None:
        rng = np.random.default_rng(5)
        while not stop.is_set():
            rows = rng.integers(0, ROWS, 500)
            found = engine.gather(
                id=trainer.table.id, generation=trainer.table.generation, rows=rows, range=None,
                fields=["exp_avg_sq"], outs=None,
            )  # fmt: skip
            seen.append(bool((found.values[0] > 0).all()))

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        for _ in range(6):
            trainer.rewrite()
        stop.set()
        for reader in readers:
            reader.result(60)
    assert seen
    assert all(seen)
    engine.compactor.stop()
    compact(engine)
    assert sum(files(engine).values()) <= 2 * ROWS * RECORD_BYTES + SLACK
    trainer.check()


def test_batches_larger_than_those_of_compaction(by_hand, engine, trainer, monkeypatch):
    trainer.write_all()
    for _ in range(3):
        trainer.rewrite()
    monkeypatch.setattr(compaction, "BATCH_BYTES", 256 << 10)
    assert compact(engine) > 1
    books_are_right(engine)
    trainer.check()


def test_a_read_error_keeps_its_segment_and_no_other(by_hand, engine, trainer, caplog):
    trainer.write_all()
    for _ in range(3):
        trainer.rewrite()
    chosen = engine.compactor._choose()
    assert chosen is not None
    victim = chosen[1]
    path = engine._store.path(victim)
    with path.open("r+b") as file:
        trailer = next(iter(engine._store.read_trailers(victim)))
        file.seek(trailer.first_offset)
        file.write(os.urandom(trailer.rows.size * 1024))
    table = engine.tables.get(trainer.table.id)
    assert compact(engine) > 1
    assert victim.id in table.segments
    assert f"segment {victim.id}" in caplog.text
    assert "until the next start" in caplog.text
    books_are_right(engine)


@pytest.mark.parametrize("error", [OutOfSpace, StorageFailed])
def test_a_failed_write_changes_nothing_and_is_tried_again(
    by_hand, engine, trainer, monkeypatch, error
):
    trainer.write_all()
    for _ in range(3):
        trainer.rewrite()
    real, failing = segments_module.SegmentStore.append, [True]

    def append(self, segment, *args):
        if failing[0]:
            raise error("the output cannot be written")
        return real(self, segment, *args)

    monkeypatch.setattr(segments_module.SegmentStore, "append", append)
    with pytest.raises(error):
        compact(engine)
    # It is not the fault of the segment that is read.
    assert not engine.compactor._left_alone
    failing[0] = False
    books_are_right(engine)
    trainer.check()
    assert compact(engine) > 1
    trainer.check()


def test_a_failed_commit_leaves_the_committed_state(by_hand, tmp_path, monkeypatch):
    engine = start_engine(tmp_path)
    schema = adam_schema(ROWS, WIDTH)
    trainer = Trainer(engine, open_table(engine, open_session(engine), schema, "named"))
    trainer.write_all()
    engine.flush([])
    flushed = trainer.model.copy()
    for _ in range(6):
        trainer.rewrite(high=ROWS // 2)
    monkeypatch.setattr(
        engine._catalog, "commit", lambda changes: (_ for _ in ()).throw(StorageFailed("no"))
    )
    table = engine.tables.get(trainer.table.id)
    # One that the committed state needs: the rest is compacted without a commit.
    victim = next(s for s in table.cut.segments.tolist() if table.cut.only_here(s))
    with pytest.raises(StorageFailed):
        engine.compactor._compact(table.segments[victim])
    assert victim in table.cut
    monkeypatch.undo()
    trainer.check()
    engine.stop(discard=True)
    engine.close()
    engine = start_engine(tmp_path)
    check(engine, open_table(engine, open_session(engine), schema, "named"), flushed)
    engine.stop(discard=True)
    engine.close()


def test_a_stop_ends_compaction_within_one_batch(engine, trainer):
    trainer.write_all()
    for _ in range(4):
        trainer.rewrite()
    engine.compactor.stop()
    books_are_right(engine)
    trainer.check()


@pytest.mark.root
@pytest.mark.parametrize("name", [None, "named"])
def test_compaction_makes_room_on_a_disk_that_is_nearly_full(tmp_path, name):
    """Of a disk half is needed: before twice that is reached it would be full."""
    with small_file_system(tmp_path / "disk", 96) as where:
        engine = start_engine(where)
        session = open_session(engine)
        table = open_table(engine, session, adam_schema(45_000, WIDTH), name)
        trainer = Trainer(engine, table)
        trainer.write_all()
        for _ in range(4):
            trainer.rewrite()
        assert engine.tables.get(table.id).counters.segments_compacted > 1
        books_are_right(engine)
        trainer.check()
        trainer.rewrite(0.3)
        engine.stop()  # which writes all of the cache
        engine.close()
        engine = start_engine(where)
        again = engine.tables.get(table.id)
        check(engine, again.view(1 << 20), trainer.model)
        engine.stop(discard=True)
        engine.close()
