"""R82: gRPC's 4 MiB message limit. 8,192 rows of 128 float32 are exactly 4,194,304 bytes."""

import numpy as np
import pytest

from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, make_config, schema, serving, update_parts

WIDTH = 128


@pytest.fixture
def remote(tmp_path):
    with (
        serving(make_config(tmp_path), NumpyEngine()),
        GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client,
    ):
        yield client


@pytest.mark.parametrize("count", [8_191, 8_192, 8_193])
def test_batches_around_the_limit_are_updated_and_gathered(remote, count):
    table = remote.open_table(schema=schema(rows=10_000, width=WIDTH))
    rows = np.random.default_rng(0).permutation(10_000)[:count]
    grads = np.random.default_rng(1).standard_normal((count, WIDTH)).astype(np.float32)
    reply, [(ids, deltas)] = remote.update(2, remote.table_update(table, rows, grads))
    assert reply.tables[0].rows == count
    assert np.array_equal(ids, np.sort(rows))
    assert deltas.shape == (count, WIDTH)
    [exp_avg] = remote.gather(table, rows, ["exp_avg"])
    assert np.allclose(exp_avg, grads * np.float32(0.1), rtol=1e-6)


@pytest.mark.slow
def test_a_million_rows_in_one_update(remote):
    count = 1_000_000
    table = remote.open_table(schema=schema(rows=count, width=WIDTH))
    rows = np.arange(count)
    grads = np.ones((count, WIDTH), np.float32)
    part, arrays = remote.table_update(table, rows, grads)
    head = pb.UpdateRequest(sequence=pb.Sequence(stream=1, number=2), tables=[part])
    replies = remote.stub.Update(update_parts(head, arrays), metadata=remote.metadata, timeout=110)
    reply = next(replies).head
    assert reply.tables[0].rows == count
    assert sum(len(r.piece.data) for r in replies) == count * (8 + 4 * WIDTH)


def test_a_batch_whose_second_of_five_pieces_is_bad_changes_nothing(remote):
    table = remote.open_table(schema=schema(rows=10_000, width=WIDTH))
    rows, grads = np.arange(8_192), np.ones((8_192, WIDTH), np.float32)
    part, arrays = remote.table_update(table, rows, grads)
    head = pb.UpdateRequest(sequence=pb.Sequence(stream=1, number=2), tables=[part])
    parts = list(update_parts(head, arrays))
    assert len(parts) == 6
    parts[2] = pb.UpdatePart(head=head)
    with pytest.raises(Exception, match="head"):
        remote.stream("Update", iter(parts))
    assert not remote.gather(table, rows, ["exp_avg"])[0].any()
