"""clip_grad_norm_ over sparse and dense gradients."""

import math

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, sparse_grad


def mixed(seed=0):
    """Two sparse gradients with duplicates, one element-sparse, one dense, one absent."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.zeros(6, 3)) for _ in range(5)]
    for param in params[:2]:
        ids = torch.randint(0, 6, (8,), generator=generator)
        values = torch.randn(8, 3, generator=generator)
        param.grad = torch.sparse_coo_tensor(ids[None], values, (6, 3))
    ids = torch.tensor([[0, 0, 5], [1, 1, 2]])
    params[2].grad = torch.sparse_coo_tensor(ids, torch.tensor([1.0, 2.0, -3.0]), (6, 3))
    params[3].grad = torch.randn(6, 3, generator=generator)
    return params


def densified(params):
    """Stand-ins for torch's own function."""
    out = []
    for param in params:
        dense = nn.Parameter(param.detach().clone())
        if param.grad is not None:
            dense.grad = param.grad.to_dense().clone()
        out.append(dense)
    return out


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_it_equals_torch_on_the_dense_gradients(norm_type, max_norm):
    ours, theirs = mixed(), densified(mixed())
    total = momentd.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, float(norm_type))
    torch.testing.assert_close(total, expected)
    for mine, other in zip(ours, theirs, strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.to_dense(), other.grad)


def test_entries_are_kept_and_scaled():
    (param, *_) = mixed()
    entries = param.grad._nnz()
    momentd.clip_grad_norm_(param, 0.1)
    assert param.grad._nnz() == entries
    assert not param.grad.is_coalesced()


def test_infinite_norm_of_an_empty_gradient_is_zero():
    module = embedding()
    sparse_grad(module.weight, [], [])
    assert momentd.clip_grad_norm_(module.parameters(), 1.0, math.inf) == 0
    assert momentd.clip_grad_norm_(module.parameters(), 1.0) == 0


def test_no_gradients_at_all():
    assert momentd.clip_grad_norm_(embedding().parameters(), 1.0) == 0
    assert momentd.clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_norms_raise_when_asked_and_change_nothing(bad):
    params = mixed()
    params[3].grad[0, 0] = bad
    before = params[0].grad._values().clone()
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        momentd.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.equal(params[0].grad._values(), before)
    assert not momentd.clip_grad_norm_(params, 1.0).isfinite()


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_a_norm_type_that_is_none(norm_type):
    with pytest.raises(ValueError, match="norm_type must be > 0"):
        momentd.clip_grad_norm_(mixed(), 1.0, norm_type)


def test_half_precision_norms_are_taken_in_float32():
    module = embedding(dtype=torch.float16)
    sparse_grad(module.weight, [1, 1], [300.0, 300.0])
    total = momentd.clip_grad_norm_(module.parameters(), 1.0)
    assert total.item() == pytest.approx(1200.0)
    assert total.dtype == torch.float32


def test_csr_gradients_are_scaled_in_place():
    param = nn.Parameter(torch.zeros(3, 3))
    dense = torch.tensor([[0.0, 3, 0], [0, 0, 0], [4, 0, 0]])
    grad = dense.to_sparse_csr()

    class Holder:
        pass

    holder = Holder()
    holder.grad = grad
    assert momentd.clip_grad_norm_([holder], 1.0) == 5
    torch.testing.assert_close(grad.to_dense(), dense / 5)
    assert param.grad is None
