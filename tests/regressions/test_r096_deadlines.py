"""R96: calls without a deadline pile up. A caller's deadline ends its wait and its server work."""

import threading
import time

import grpc
import numpy as np
import pytest

from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, make_config, serving, update_parts


def test_a_deadline_holds_and_the_batch_is_known_by_its_number(tmp_path):
    engine = NumpyEngine()
    rows, grads = np.arange(4), np.ones((4, 4), np.float32)
    leave = threading.Event()
    engine.before_update = lambda: leave.wait(20) and None
    with (
        serving(make_config(tmp_path), engine) as daemon,
        GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client,
    ):
        table = client.open_table()
        part, arrays = client.table_update(table, rows, grads)
        head = pb.UpdateRequest(sequence=pb.Sequence(stream=1, number=2), tables=[part])
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            client.stream("Update", update_parts(head, arrays), timeout=0.5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.4 < time.monotonic() - began < 1.5
        leave.set()
        reply, _ = client.update(2, (part, arrays))
        assert reply.repeated_request
        assert reply.tables[0].step == 1
        deadline = time.monotonic() + 5
        while daemon._grpc.transfers._active:
            assert time.monotonic() < deadline
            time.sleep(0.01)
