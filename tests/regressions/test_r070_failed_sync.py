"""R70: a failed fsync is final: a second one would report success although data is gone."""

import contextlib
import errno
import os
import signal
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from momentd_server.app import EXIT_STORAGE_FAILED
from momentd_server.storage import files
from momentd_server.storage.failure import StorageFailure
from momentd_wire.errors import DaemonUnavailable, StorageFailed
from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)
from tests.support.planes import LocalClient, schema
from tests.support.real_daemon import RealDaemon


def _fail_file_sync(monkeypatch):
    real = os.fdatasync

    def fail_once(_fd):
        monkeypatch.setattr(os, "fdatasync", real)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail_once)


def _fail_directory_sync(monkeypatch):
    real = files.sync_directory

    def fail_once(_path):
        monkeypatch.setattr(files, "sync_directory", real)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sync_directory", fail_once)


def _ones(rows):
    return np.ones((len(rows), 8), np.float32)


# The folder of table "t" is durable already, so the second failure concerns "other" alone.
@pytest.mark.parametrize(("fail", "durable"), [(_fail_file_sync, 1), (_fail_directory_sync, 2)])
def test_after_one_failed_sync_nothing_is_called_durable_again(
    tmp_path, monkeypatch, fail, durable
):
    engine = start_engine(tmp_path)
    session = open_session(engine)
    table = open_table(engine, session, adam_schema(1000, 8), "t")
    engine.update([batch(table, [1], _ones([1]))])
    engine.flush([])
    other = open_table(engine, session, adam_schema(10, 8), "other")
    for one in (table, other):
        engine.update([batch(one, [2], _ones([2]))])
    fail(monkeypatch)
    with pytest.raises(StorageFailed):
        engine.flush([])
    assert engine._space.header["fsync_failed"][0] == 1
    for refused in (
        lambda: engine.flush([]),
        lambda: engine.update([batch(table, [3], _ones([3]))]),
        lambda: open_table(engine, session, adam_schema(10, 8), "new"),
        lambda: engine.drop_tables(session, ids=[table.id], run=None, force=True),
        lambda: engine.create_snapshot(
            [(table.id, table.generation)], run=None, name=None, pinned=True
        ),
        lambda: engine.clone_table(
            session, id=table.id, generation=table.generation, name=None, label="", run="r"
        ),
    ):
        with pytest.raises(StorageFailed, match="momentd stop --discard"):
            refused()
    # What was applied can be saved elsewhere.
    found = engine.gather(
        id=table.id, generation=table.generation, rows=np.array([1, 2]), range=None, fields=[],
        outs=None,
    )  # fmt: skip
    assert found.step == 2
    assert all(values.any(axis=1).all() for values in found.values)
    # And what is on disk can be looked at.
    assert [step.damages for step in engine.verify(0) if step.damages] == []
    totals = engine.stats().totals
    assert (totals.state, totals.failure) == ("failed", engine.failure)
    with pytest.raises(StorageFailed):
        engine.stop()
    engine.close()
    engine = start_engine(tmp_path)
    assert not engine._catalog.stopped_in_order
    assert {t.name: t.step for t in engine.list_tables()} == {"t": durable, "other": 0}
    engine.stop(discard=True)
    engine.close()


def test_a_failed_commit_is_a_failed_sync_for_segments_too(tmp_path, monkeypatch):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(1000, 8), "t")
    engine.update([batch(table, [1], _ones([1]))])

    def fail(_writes):
        raise StorageFailed("the catalog failed: Input/output error")

    monkeypatch.setattr(engine._catalog._file, "write", fail)
    with pytest.raises(StorageFailed):
        engine.flush([])
    monkeypatch.undo()
    with pytest.raises(StorageFailed, match="catalog"):
        engine.update([batch(table, [1], _ones([1]))])
    assert engine._store.failure.text == engine.failure
    engine.stop(discard=True)
    engine.close()


def test_the_flag_is_in_memory_that_outlives_the_engine(tmp_path):
    engine = start_engine(tmp_path)
    header = engine._space.header
    engine._failure.declare("cannot sync a file")
    told = []
    # What the next engine on the same memory does.
    failure = StorageFailure()
    failure.keep_in(header)
    failure.when_it_fails(lambda: told.append(True))
    assert told == [True]
    with pytest.raises(StorageFailed, match="earlier engine"):
        failure.refuse()
    engine.stop(discard=True)
    engine.close()


# What Python runs at the start of keeper and engine: a disk on which no file can be synced.
_NO_SYNC = """
import errno, os
def fail(fd):
    raise OSError(errno.EIO, "Input/output error")
os.fdatasync = fail
"""


@pytest.fixture
def broken_disk(tmp_path):
    """The environment of a daemon on such a disk."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(_NO_SYNC)
    path = os.pathsep.join([str(patch), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def test_clients_health_status_and_exit_code_say_so(tmp_path, broken_disk):
    daemon = RealDaemon(tmp_path).start(env=broken_disk)
    try:
        with (
            LocalClient(tmp_path / "s", arena_bytes=1 << 20) as client,
            grpc.insecure_channel(f"unix:{tmp_path}/s.grpc") as channel,
        ):
            table = client.open_table(schema=schema(100, 8), name="t")
            client.update(2, client.table_update(table, np.array([1]), _ones([1])))
            with pytest.raises(StorageFailed):
                client.call(flush=pb.FlushRequest())
            with pytest.raises(StorageFailed, match="dmesg"):
                client.update(3, client.table_update(table, np.array([1]), _ones([1])))
            totals = client.call(stats=pb.StatsRequest()).stats.totals
            assert totals.state == "failed"
            assert "momentd stop" in totals.failure
            health = health_pb2_grpc.HealthStub(channel)
            while _health(health) == health_pb2.HealthCheckResponse.SERVING:
                time.sleep(0.05)
    finally:
        code = daemon.end(signal.SIGTERM)
    assert code == EXIT_STORAGE_FAILED
    assert "cannot sync" in daemon.errors
    assert '"event": "stopped"' not in daemon.errors


def test_the_next_engine_on_the_same_memory_refuses_as_well_and_writes_nothing(
    tmp_path, broken_disk
):
    daemon = RealDaemon(tmp_path).start(env=broken_disk)
    try:
        with LocalClient(tmp_path / "s", arena_bytes=1 << 20) as client:
            table = client.open_table(schema=schema(100, 8), name="t")
            client.update(2, client.table_update(table, np.array([1]), _ones([1])))
            with pytest.raises(StorageFailed):
                client.call(flush=pb.FlushRequest())
            catalog = (daemon.data_dir / "catalog" / "data.mdb").read_bytes()
        killed = daemon.kill_engine()
        with _wait_for_client(tmp_path / "s", killed) as client:
            totals = client.call(stats=pb.StatsRequest()).stats.totals
            assert (totals.pid != killed, totals.state) == (True, "failed")
            assert "earlier engine" in totals.failure
            with pytest.raises(StorageFailed, match="earlier engine"):
                client.open_table(schema=schema(100, 8), name="another")
        assert (daemon.data_dir / "catalog" / "data.mdb").read_bytes() == catalog
    finally:
        code = daemon.end(signal.SIGTERM)
    assert code == EXIT_STORAGE_FAILED


def _wait_for_client(path, killed):
    """A client of the engine that follows the killed one."""
    while True:
        with contextlib.suppress(OSError, DaemonUnavailable, EOFError):
            client = LocalClient(path, arena_bytes=1 << 20)
            if client.call(stats=pb.StatsRequest()).stats.totals.pid != killed:
                return client
            client.__exit__(None, None, None)
        time.sleep(0.05)


def _health(stub):
    return stub.Check(health_pb2.HealthCheckRequest()).status
