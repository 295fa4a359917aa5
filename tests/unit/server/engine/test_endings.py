"""Tables that end while something else happens to them: nothing stays, nothing comes back."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from momentd_server.engine.cache import SlabStock
from momentd_server.storage.space import SLAB_BYTES, Space
from momentd_wire.errors import OutOfMemory, SessionNotFound, StorageFailed, TableNotFound
from tests.support.local_engine import adam_schema, batch, open_session, open_table, start_engine


def _touch(engine, table, rows=100):
    engine.update([batch(table, np.arange(rows), np.ones((rows, 8), np.float32))])


def _drop(engine, *tables):
    return engine.drop_tables(None, ids=[table.id for table in tables], run=None, force=True)


def test_a_table_dropped_during_its_flush_does_not_come_back(tmp_path, monkeypatch):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(100, 8), "t")
    _touch(engine, table)
    in_sync, go_on, real = threading.Event(), threading.Event(), os.fdatasync

    def slow_disk(fd):
        in_sync.set()
        assert go_on.wait(10)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow_disk)
    with ThreadPoolExecutor(2) as threads:
        flush = threads.submit(engine.flush, [table.id])
        assert in_sync.wait(10)
        drop = threads.submit(_drop, engine, table)
        # Long enough for a drop that does not wait; one that waits is here as well.
        threading.Event().wait(0.2)
        go_on.set()
        flush.result(10)
        drop.result(10)
    assert engine.list_tables() == []
    engine.stop()
    engine.close()
    engine = start_engine(tmp_path)
    assert engine.list_tables() == []
    engine.stop()
    engine.close()


def test_two_drops_of_the_same_table_drop_all_the_others_too(engine, session):
    both, other = (open_table(engine, session, adam_schema(100, 8)) for _ in range(2))
    in_work = engine.tables.enter(both.id, both.generation)
    with ThreadPoolExecutor(2) as threads:
        drops = [threads.submit(_drop, engine, *ts) for ts in ([both], [both, other])]
        threading.Event().wait(0.2)
        in_work.gate.leave()
        assert [drop.exception(10) for drop in drops] == [None, None]
    assert engine.list_tables() == []


def test_a_session_that_ended_gets_no_table_any_more(engine, session):
    source = open_table(engine, session, adam_schema(100, 8), "t")
    engine.sessions.end(session.id)
    engine.end_session(session.id)
    where = {"id": source.id, "generation": source.generation}
    with pytest.raises(SessionNotFound):
        open_table(engine, session, adam_schema(100, 8))
    with pytest.raises(SessionNotFound):
        engine.clone_table(session, **where, name=None, label="", run="")
    assert [table.id for table in engine.list_tables()] == [source.id]


def test_a_table_that_cannot_be_written_does_not_keep_others_from_being_flushed(tmp_path):
    engine = start_engine(tmp_path)
    session = open_session(engine)
    bad, good = (open_table(engine, session, adam_schema(100, 8), name) for name in ("bad", "good"))
    _touch(engine, bad)
    _touch(engine, good)
    in_the_way = tmp_path / "data" / "families" / str(engine.tables.get(bad.id).family)
    in_the_way.write_bytes(b"")
    with pytest.raises(StorageFailed):
        engine.stop()
    engine.close()
    in_the_way.unlink()
    engine = start_engine(tmp_path)
    assert {table.name: table.update_number for table in engine.list_tables()} == {
        "bad": 0,
        "good": 1,
    }
    engine.stop()
    engine.close()


def test_a_flush_of_everything_skips_what_is_dropped_meanwhile(engine, session):
    table = open_table(engine, session, adam_schema(100, 8))
    in_work = engine.tables.enter(table.id, table.generation)
    with ThreadPoolExecutor(2) as threads:
        drop = threads.submit(_drop, engine, table)
        threading.Event().wait(0.1)
        flush = threads.submit(engine.flush, [])
        threading.Event().wait(0.1)
        in_work.gate.leave()
        drop.result(10)
        assert flush.exception(10) is None
    with pytest.raises(TableNotFound):
        engine.flush([table.id])


def test_a_kernel_without_memory_costs_one_slab_a_try(monkeypatch):
    space = Space.create(4000 * SLAB_BYTES, engine_epoch=1)
    stock = SlabStock(space)
    slabs = stock.total

    def refuse(slab):
        raise OutOfMemory("no memory")

    monkeypatch.setattr(space, "populate_slab", refuse)
    assert stock.take() is None
    assert stock.total == slabs - 1
    monkeypatch.undo()
    assert stock.take() is not None
    space.close()
