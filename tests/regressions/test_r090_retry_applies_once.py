"""R90: a retry whose first attempt was applied must not apply it again, on either plane."""

import numpy as np
import pytest

from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, LocalClient, make_config, serving

ROWS, GRADS = np.arange(4), np.ones((4, 4), np.float32)


def test_a_reply_that_was_lost_is_given_again_on_the_same_session(tmp_path):
    engine = NumpyEngine()
    with (
        serving(make_config(tmp_path), engine),
        LocalClient(tmp_path / "m.sock", arena_bytes=2 << 20) as client,
    ):
        table = client.open_table()
        part = client.table_update(table, ROWS, GRADS)
        sequence = pb.Sequence(stream=1, number=2)
        client.send(update=pb.UpdateRequest(sequence=sequence, tables=[part]))
        client.receive()  # lost: the caller never looks at it
        reply = client.update(2, part)
        assert reply.repeated_request
        assert reply.tables[0].update_number == engine.update_calls == 1


def test_a_deadline_that_passes_before_the_apply_changes_nothing(tmp_path):
    engine = NumpyEngine()
    with (
        serving(make_config(tmp_path), engine),
        GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client,
    ):
        table = client.open_table()
        with pytest.raises(errors.OutOfSequence):
            client.update(4, client.table_update(table, ROWS, GRADS))
        assert engine.update_calls == 0
        assert client.update(2, client.table_update(table, ROWS, GRADS))
        assert engine.update_calls == 1
