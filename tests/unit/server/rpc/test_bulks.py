"""Bulk arrays: cut into pieces and put together again, whatever the cuts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from momentd_server.rpc.bulks import StreamBulks, pieces, streamed_fields
from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb

lengths = st.lists(st.integers(0, 50), max_size=5)


def arrays_of(sizes):
    rng = np.random.default_rng(sum(sizes))
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


@given(lengths, st.integers(1, 60))
def test_pieces_hold_all_bytes_in_order_and_only_the_last_is_short(sizes, piece_bytes):
    arrays = arrays_of(sizes)
    parts = list(pieces(arrays, piece_bytes))
    assert b"".join(parts) == b"".join(a.tobytes() for a in arrays)
    assert all(len(part) == piece_bytes for part in parts[:-1])
    assert all(parts)


@given(lengths, st.integers(1, 60))
def test_received_pieces_give_the_arrays_back(sizes, piece_bytes):
    arrays = arrays_of(sizes)
    bulks = StreamBulks([pb.Bulk(streamed=size) for size in sizes])
    bulks.receive(pieces(arrays, piece_bytes))
    for array, size in zip(arrays, sizes, strict=True):
        got = bulks.read(pb.Bulk(streamed=size), np.dtype("u1"), (size,), "x")
        assert np.array_equal(got, array)


@given(lengths.filter(any), st.integers(1, 60), st.data())
def test_a_stream_that_is_cut_short_is_refused(sizes, piece_bytes, data):
    parts = list(pieces(arrays_of(sizes), piece_bytes))
    kept = data.draw(st.integers(0, len(parts) - 1))
    bulks = StreamBulks([pb.Bulk(streamed=size) for size in sizes])
    with pytest.raises(errors.InvalidArgument, match="ended"):
        bulks.receive(iter(parts[:kept]))


def test_fields_are_streamed_in_the_order_of_their_numbers():
    table = pb.TableUpdate(
        weights=pb.Bulk(streamed=4), row_ids=pb.Bulk(streamed=1), mask=pb.Bulk(streamed=3),
        grads=pb.Bulk(streamed=2),
    )  # fmt: skip
    update = pb.UpdateRequest(tables=[table, pb.TableUpdate(grads=pb.Bulk(inline=b"x"))])
    assert [bulk.streamed for bulk in streamed_fields(update)] == [1, 2, 3, 4]
    scatter = pb.ScatterRequest(row_ids=pb.Bulk(streamed=1), values=[pb.Bulk(streamed=2)])
    assert [bulk.streamed for bulk in streamed_fields(scatter)] == [1, 2]
    assert streamed_fields(pb.GatherRequest(row_ids=pb.Bulk(inline=b""))) == []


def test_short_arrays_may_stand_in_place():
    bulks = StreamBulks([])
    rows = np.arange(3)
    got = bulks.read(pb.Bulk(inline=rows.tobytes()), rows.dtype, (3,), "row_ids")
    assert np.array_equal(got, rows)
    with pytest.raises(errors.InvalidArgument, match="row_ids has 24 bytes"):
        bulks.read(pb.Bulk(inline=rows.tobytes()), rows.dtype, (4,), "row_ids")
    with pytest.raises(errors.InvalidArgument, match="missing"):
        bulks.read(pb.Bulk(), rows.dtype, (4,), "row_ids")
