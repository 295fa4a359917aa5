"""Rows and values as users pass them."""

import numpy as np
import pytest
import torch

from momentd import _arrays
from momentd_wire.errors import InvalidArgument

F4 = np.dtype(np.float32)


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2, 2],
        np.array([1, 2, 2], np.int32),
        np.array([1, 2, 2], np.uint8),
        np.array([1, 9, 2, 9, 2, 9])[::2],
        torch.tensor([1, 2, 2]),
        torch.tensor([1, 2, 2], dtype=torch.int32),
    ],
)
def test_ids_become_int64(rows):
    ids = _arrays.row_ids(rows)
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 2, 2]
    assert ids.flags.c_contiguous


@pytest.mark.parametrize(
    "rows", [[1.0], [[1]], 3, ["a"], [True], torch.tensor([1.0]), torch.tensor([True])]
)
def test_what_is_no_list_of_integers_is_refused(rows):
    with pytest.raises(InvalidArgument, match="1-D array of integers"):
        _arrays.row_ids(rows)


def test_no_rows_are_rows():
    assert _arrays.row_ids([]).tolist() == []


@pytest.mark.parametrize(
    ("rows", "start", "count"),
    [
        (None, 0, 10),
        (range(3, 7), 3, 4),
        (range(7, 3), 7, 0),
        (slice(None), 0, 10),
        (slice(-3, None), 7, 3),
        (slice(2, 99), 2, 8),
    ],
)
def test_ranges_and_slices_need_no_ids(rows, start, count):
    selection = _arrays.select(rows, 10)
    assert selection.ids is None
    assert (selection.start, selection.count) == (start, count)


@pytest.mark.parametrize("rows", [range(0, 10, 2), range(5, 11), range(-1, 3), slice(0, 9, 3)])
def test_other_ranges_are_refused(rows):
    with pytest.raises(InvalidArgument):
        _arrays.select(rows, 10)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        [[0, 1, 2], [3, 4, 5]],
        torch.arange(6.0).reshape(2, 3).bfloat16(),
        torch.arange(6.0).reshape(3, 2).T.contiguous().T.reshape(2, 3),
    ],
)
def test_values_become_the_fields_type(value):
    array = _arrays.values("x", value, (2, 3), F4)
    assert array.dtype == F4
    assert array.ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_values_of_width_one_may_be_flat():
    assert _arrays.values("x", [1, 2], (2, 1), F4).shape == (2, 1)


@pytest.mark.parametrize(
    "value", [np.zeros((3, 2)), np.zeros(6), [["a"] * 3] * 2, np.zeros((2, 3)) * 1j]
)
def test_values_of_another_shape_or_kind_are_refused_by_name(value):
    with pytest.raises(InvalidArgument, match="exp_avg"):
        _arrays.values("exp_avg", value, (2, 3), F4)


def test_results_are_what_was_passed():
    array = np.ones(3, np.float32)
    assert _arrays.like([1], array) is array
    assert isinstance(_arrays.like(torch.tensor([1]), array), torch.Tensor)
