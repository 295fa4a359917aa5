"""Both planes give the same bytes, for every kind of update, gather and scatter."""

import numpy as np
import pytest

from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.planes import schema, update_parts


def batch(seed, *, n=300, rows=200, width=4, dtype="float32"):
    rng = np.random.default_rng(seed)
    return rng.integers(0, rows, n), rng.standard_normal((n, width)).astype(dtype)


@pytest.fixture
def tables(local, remote):
    wanted = schema(rows=200, width=4)
    return local.open_table(schema=wanted), remote.open_table(schema=wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_updates_with_duplicates_give_the_same_bytes(local, remote, dtype):
    wanted = schema(rows=200, width=4, dtype=dtype)
    here, there = local.open_table(schema=wanted), remote.open_table(schema=wanted)
    for number in range(2, 6):
        rows, grads = batch(number, dtype=dtype)
        part = local.table_update(here, rows, grads)
        reply = local.update(number, part)
        reply_there, [(rows_there, values_there)] = remote.update(
            number, remote.table_update(there, rows, grads)
        )
        rows_here, values_here = local.results(part, reply.tables[0], 4)
        assert rows_here.tobytes() == rows_there.tobytes()
        assert values_here.tobytes() == values_there.tobytes()
        assert reply.tables[0].step == reply_there.tables[0].step == number - 1
        assert reply.tables[0].update_number == reply_there.tables[0].update_number


def test_masks_and_new_values_give_the_same_bytes(local, remote, tables):
    here, there = tables
    rows, grads = batch(1)
    mask = (np.random.default_rng(2).random(grads.shape) < 0.5).astype(np.uint8)
    weights = np.repeat(rows[:, None], 4, axis=1).astype(np.float32)
    extra = {"mask": mask, "weights": weights, "result": pb.RESULT_KIND_VALUE, "step": 7}
    part = local.table_update(here, rows, grads, **extra)
    reply = local.update(2, part)
    _, [(_, values_there)] = remote.update(2, remote.table_update(there, rows, grads, **extra))
    _, values_here = local.results(part, reply.tables[0], 4)
    assert values_here.tobytes() == values_there.tobytes()
    assert reply.tables[0].step == 7


def test_gathers_give_the_same_bytes_in_the_order_asked_for(local, remote, tables):
    here, there = tables
    rows, grads = batch(3)
    local.update(2, local.table_update(here, rows, grads))
    remote.update(2, remote.table_update(there, rows, grads))
    wanted = np.array([7, 3, 3, 199, 0])
    for fields in (("exp_avg_sq", "exp_avg"), ("exp_avg",)):
        values_here = local.gather(here, wanted, fields)
        values_there = remote.gather(there, wanted, fields)
        assert [v.tobytes() for v in values_here] == [v.tobytes() for v in values_there]
        assert values_here[0][1].tobytes() == values_here[0][2].tobytes()


def test_what_one_plane_scatters_the_other_gathers(local, remote):
    name = "shared"
    here = local.open_table(name=name, schema=schema(rows=200, width=4))
    there = remote.open_table(name=name, schema=schema(rows=200, width=4))
    assert here == there
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    rows = np.array([9, 1, 5])
    head = pb.ScatterRequest(
        sequence=pb.Sequence(stream=1, number=2), table=there.table, fields=["exp_avg"], count=3,
        step=12, row_ids=pb.Bulk(streamed=24), values=[pb.Bulk(streamed=values.nbytes)],
    )  # fmt: skip
    parts = [pb.ScatterPart(head=head)]
    parts.append(pb.ScatterPart(piece=pb.Piece(data=rows.tobytes() + values.tobytes())))
    reply = remote.call("Scatter", iter(parts))
    assert reply.step == 12
    assert local.gather(here, rows, ["exp_avg"])[0].tobytes() == values.tobytes()
    assert not local.gather(here, rows, ["exp_avg_sq"])[0].any()


def test_a_scatter_of_a_range_through_the_arena(local):
    table = local.open_table(schema=schema(rows=200, width=4))
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    request = pb.ScatterRequest(
        sequence=pb.Sequence(stream=1, number=2), table=table.table, fields=["exp_avg"],
        range=pb.RowRange(start=20, count=10), values=[pb.Bulk(arena=local.put(values))],
    )  # fmt: skip
    local.call(scatter=request)
    assert np.array_equal(local.gather(table, np.arange(20, 30), ["exp_avg"])[0], values)


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
def test_the_cut_of_the_pieces_does_not_matter(remote, tables, piece_bytes):
    _, there = tables
    rows, grads = batch(5, n=5)
    part, arrays = remote.table_update(there, rows, grads)
    head = pb.UpdateRequest(sequence=pb.Sequence(stream=1, number=2), tables=[part])
    reply, data = remote.stream("Update", update_parts(head, arrays, piece_bytes))
    assert reply.tables[0].rows == len(np.unique(rows))
    assert data[: 8 * reply.tables[0].rows] == np.unique(rows).tobytes()


def test_two_tables_in_one_update_on_both_planes(local, remote):
    small, wide = schema(rows=50, width=2), schema(rows=60, width=8, dtype="float64")
    here = [local.open_table(1, schema=small), local.open_table(2, schema=wide)]
    there = [remote.open_table(1, schema=small), remote.open_table(2, schema=wide)]
    one, two = batch(1, rows=50, width=2), batch(2, n=77, rows=60, width=8, dtype="float64")
    parts = [
        local.table_update(here[0], *one),
        local.table_update(here[1], *two, keep=True),
    ]
    reply = local.update(3, *parts)
    _, values = remote.update(
        3, remote.table_update(there[0], *one), remote.table_update(there[1], *two)
    )
    for part, result, width, (rows, there_values) in zip(
        parts, reply.tables, (2, 8), values, strict=True
    ):
        here_rows, here_values = local.results(part, result, width)
        assert here_rows.tobytes() == rows.tobytes()
        assert here_values.tobytes() == there_values.tobytes()


def test_an_empty_batch_counts_as_a_step(local, remote, tables):
    here, there = tables
    rows, grads = np.empty(0, np.int64), np.empty((0, 4), np.float32)
    reply = local.update(2, local.table_update(here, rows, grads))
    reply_there, _ = remote.update(2, remote.table_update(there, rows, grads))
    assert reply.tables[0].step == reply_there.tables[0].step == 1
    assert reply.tables[0].rows == reply_there.tables[0].rows == 0
