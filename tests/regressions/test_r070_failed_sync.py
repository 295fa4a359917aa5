"""R70: a failed fsync is final: a second one would report success although data is gone."""

import errno
import os

import numpy as np
import pytest

from momentd_wire.errors import StorageFailed
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def test_after_one_failed_sync_nothing_is_called_durable_again(tmp_path, monkeypatch):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(1000, 8), "t")
    engine.update([batch(table, [1], np.ones((1, 8), np.float32))])
    engine.flush([])
    engine.update([batch(table, [2], np.ones((1, 8), np.float32))])
    real = os.fdatasync

    def fail_once(fd):
        monkeypatch.setattr(os, "fdatasync", real)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail_once)
    with pytest.raises(StorageFailed):
        engine.flush([])
    with pytest.raises(StorageFailed, match="restart"):
        engine.flush([])
    with pytest.raises(StorageFailed):
        engine.stop()
    engine.close()
    engine = start_engine(tmp_path)
    (found,) = engine.list_tables()
    assert found.step == 1  # the last durable state
    engine.stop(discard=True)
    engine.close()
