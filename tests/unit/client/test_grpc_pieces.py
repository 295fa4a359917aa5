"""Cutting bulk bytes into pieces and putting them together again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from momentd._transport import grpc
from momentd_wire.errors import InternalError


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 60))
def test_pieces_are_full_but_the_last_and_come_together_again(sizes, piece_bytes):
    sources = [np.arange(size, dtype=np.uint8) for size in sizes]
    parts = list(grpc.pieces(sources, piece_bytes))
    assert all(len(part) == piece_bytes for part in parts[:-1])
    assert all(parts)
    sinks = [np.zeros(size, np.uint8) for size in sizes]
    waiting = list(sinks)
    for part in parts:
        grpc._scatter(memoryview(part), waiting)
    for source, sink in zip(sources, sinks, strict=True):
        np.testing.assert_array_equal(source, sink)


def test_more_bytes_than_announced_are_an_error():
    with pytest.raises(InternalError):
        grpc._scatter(memoryview(b"abc"), [np.zeros(2, np.uint8)])
