"""R83: large tensors over gRPC. Many callers at once are queued, small calls are not delayed."""

import threading
import time
from dataclasses import replace

import numpy as np

from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, make_config, schema, serving

WIDTH = 128
ROWS = 40_000  # 20 MiB of one field: two of them fit the bound, three do not


def test_sixteen_large_gathers_at_once_are_queued_within_the_bound(tmp_path):
    config = replace(make_config(tmp_path), grpc_bytes=48 << 20)
    target = f"unix:{tmp_path}/m.sock.grpc"
    engine = NumpyEngine()
    with serving(config, engine) as daemon, GrpcClient(target) as client:
        table = client.open_table(schema=schema(rows=ROWS, width=WIDTH))
        used = []
        engine.before_gather = lambda: used.append(daemon._grpc.transfers.large.used_bytes)
        callers = [_Caller(target, table) for _ in range(16)]
        for caller in callers:
            caller.start()
        small_s = []
        while any(caller.is_alive() for caller in callers):
            began = time.monotonic()
            client.gather(table, np.arange(10))
            small_s.append(time.monotonic() - began)
        for caller in callers:
            caller.join()
    assert all(caller.rows == ROWS for caller in callers)
    assert 0 < max(used) <= 48 << 20
    assert max(small_s) < 1.0


class _Caller(threading.Thread):
    def __init__(self, target, table):
        super().__init__()
        self._target, self._table = target, table
        self.rows = 0

    def run(self):
        with GrpcClient(self._target) as client:
            [values] = client.gather(self._table, np.arange(ROWS), ["exp_avg"])
            self.rows = len(values)
