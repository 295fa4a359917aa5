"""The check of a running engine: it finds what is damaged, and is in nobody's way."""

import threading

import numpy as np
import pytest

from momentd_server.engine import verify as online
from momentd_server.storage.damage import Counts
from momentd_wire.errors import CorruptRecord, DaemonUnavailable
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)
from tests.support.segments import flip_bit

ROWS, WIDTH = 4000, 64


@pytest.fixture
def engine(tmp_path):
    """After a start: all rows of two tables are on disk, none in a frame."""
    engine = start_engine(tmp_path)
    for table in open_both(engine):
        update(engine, table, np.arange(ROWS))
    engine.stop()
    engine.close()
    engine = start_engine(tmp_path)
    yield engine
    engine.stop(discard=True)
    engine.close()


@pytest.fixture
def tables(engine):
    return open_both(engine)


def open_both(engine):
    session = open_session(engine)
    return [open_table(engine, session, adam_schema(ROWS, WIDTH), name) for name in ("a", "b")]


def update(engine, table, rows):
    engine.update([batch(table, rows, np.ones((len(rows), WIDTH), np.float32))])


def check(engine, bytes_per_s=0):
    """(damages, counts) of a whole check."""
    steps = list(engine.verify(bytes_per_s))
    assert [step.counts is not None for step in steps] == [False] * (len(steps) - 1) + [True]
    done = [step.bytes_done for step in steps]
    assert done == sorted(done)
    assert done[-1] == steps[-1].bytes_total
    return [damage for step in steps for damage in step.damages], steps[-1].counts


def segment_of(engine, table):
    (segment,) = engine.tables.get(table.id).segments.values()
    return segment, engine._store.path(segment)


def test_a_good_store_is_said_to_be_one_and_all_locations_are_compared(engine):
    damages, counts = check(engine)
    assert damages == []
    assert (counts.tables, counts.segments) == (2, 2)
    assert counts.records == counts.locations == 2 * ROWS


def test_a_flipped_record_is_found_and_concerns_only_its_row_of_its_table(engine, tables):
    first, second = tables
    _, path = segment_of(engine, first)
    flip_bit(path, 4096 + 5)  # of the first record of the first batch
    (damage,) = check(engine)[0]
    assert (damage.path, damage.offset, damage.tables) == (str(path), 4096, (first.id,))
    (row,) = damage.rows
    # The row is an error, never data; the daemon, its other rows and the other table live on.
    with pytest.raises(CorruptRecord, match=str(row)):
        engine.gather(
            id=first.id, generation=first.generation, rows=np.array([row]), range=None, fields=[],
            outs=None,
        )  # fmt: skip
    with pytest.raises(CorruptRecord):
        update(engine, first, np.array([row, (row + 1) % ROWS]))
    update(engine, first, np.array([(row + 1) % ROWS]))
    update(engine, second, np.arange(ROWS))
    assert engine.stats().totals.state == "serving"


def test_a_location_whose_check_is_another_is_found(engine, tables):
    table = engine.tables.get(tables[0].id)
    on_disk = int(np.flatnonzero(table.location > 0)[0])
    table.check[on_disk] ^= 1
    (damage,) = check(engine)[0]
    assert (damage.tables, damage.rows) == ((table.id,), (on_disk,))
    assert "another check in memory" in damage.what


def test_a_damaged_catalog_is_found(engine):
    path = engine._datadir.catalog_path / "data.mdb"
    at = path.read_bytes().index(b'"name":"a"')
    offsets = []
    data = path.read_bytes()
    while at >= 0:
        offsets.append(at)
        at = data.find(b'"name":"a"', at + 1)
    for (
        offset
    ) in offsets:  # the pages of earlier commits as well: which one counts is LMDB's affair
        flip_bit(path, offset + 8)
    (damage,) = check(engine)[0]
    assert damage.path == str(path)


def test_it_goes_on_while_tables_are_updated_flushed_and_dropped(engine, tables):
    session = open_session(engine)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            extra = open_table(engine, session, adam_schema(ROWS, WIDTH))
            for table in (*tables, extra):
                update(engine, table, np.arange(0, ROWS, 3))
            engine.flush([tables[0].id])
            engine.drop_tables(session, ids=[extra.id], run=None, force=True)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        found = [check(engine)[0] for _ in range(15)]
    finally:
        stop.set()
        worker.join()
    assert found == [[]] * 15


def test_a_stop_ends_it_soon_however_slowly_it_reads(engine, tables, monkeypatch):
    steps = engine.verify(1)  # a byte a second
    next(steps)
    errors = []
    reading = threading.Event()
    throttle = online.OnlineCheck._throttle

    def throttled(self, began_s, read):
        reading.set()
        throttle(self, began_s, read)

    monkeypatch.setattr(online.OnlineCheck, "_throttle", throttled)

    def read_on():
        try:
            next(steps)
        except DaemonUnavailable as error:
            errors.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    reading.wait()
    engine.stop()
    reader.join()
    assert len(errors) == 1


def test_tables_that_could_not_be_brought_back_are_checked_too(tmp_path):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(100, 8), "t")
    engine.update([batch(table, np.arange(100), np.ones((100, 8), np.float32))])
    engine.flush([])
    segment, path = segment_of(engine, table)
    fill = segment.fill
    engine.stop()
    engine.close()
    flip_bit(path, fill - 1)
    engine = start_engine(tmp_path)
    damages, counts = check(engine)
    assert [damage.path for damage in damages] == [str(path)]
    assert isinstance(counts, Counts)
    engine.stop(discard=True)
    engine.close()


def test_a_file_that_only_a_snapshot_needs_is_checked_and_the_snapshot_named(engine, tables):
    first, _ = tables
    engine.create_snapshot([(first.id, first.generation)], run=None, name="then", pinned=True)
    _, path = segment_of(engine, first)
    engine.drop_tables(None, ids=[first.id], run=None, force=True)
    assert check(engine)[0] == []
    flip_bit(path, 4096 + 5)
    (damage,) = check(engine)[0]
    assert (damage.path, damage.tables, damage.snapshots) == (str(path), (), ("then",))
