"""Deltas go into weights of any dtype and layout, rounded once."""

import numpy as np
import pytest
import torch

from momentd._apply import add_rows

ROWS = np.array([1, 4, 6])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 3, 2)])
def test_weights_get_their_delta_rounded_once(dtype, state, shape):
    weight = torch.randn(shape).to(dtype)
    before = weight.double().clone()
    deltas = (torch.randn(3, *shape[1:]).double() * 1e-2).numpy().astype(state)
    add_rows(weight, ROWS, deltas.reshape(3, -1))
    expected = before.clone()
    wide = torch.promote_types(dtype, torch.from_numpy(deltas).dtype)
    expected[ROWS] = (before[ROWS].to(wide) + torch.from_numpy(deltas).to(wide)).double()
    assert torch.equal(weight.double(), expected.to(dtype).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_weights(dtype):
    base = torch.randn(6, 8, 2).to(dtype)
    weight = base[:, :, 0].t()
    expected, other = weight.clone(), base[:, :, 1].clone()
    deltas = np.ones((3, 6), np.float32)
    add_rows(weight, ROWS, deltas)
    expected[ROWS] = (expected[ROWS].float() + 1).to(dtype)
    assert torch.equal(base[:, :, 0].t(), expected)
    assert torch.equal(base[:, :, 1], other)


def test_a_weight_without_dimensions():
    weight = torch.tensor(2.0, dtype=torch.bfloat16)
    add_rows(weight, np.array([0]), np.array([[0.5]], np.float32))
    assert weight.item() == 2.5


def test_no_rows_change_nothing():
    weight = torch.ones(3, 2)
    add_rows(weight, np.empty(0, np.int64), np.empty((0, 2), np.float32))
    assert torch.equal(weight, torch.ones(3, 2))
