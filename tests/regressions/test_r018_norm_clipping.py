"""R18: the norm is that of summed rows, together with dense gradients."""

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, sparse_grad


def test_duplicates_count_once(fake):
    module = embedding(5, 1)
    sparse_grad(module.weight, [3, 3], [1.0, 1.0])
    assert momentd.clip_grad_norm_(module.parameters(), 1.0).item() == pytest.approx(2.0)
    grad = module.weight.grad
    assert grad._values().flatten().tolist() == pytest.approx([0.5, 0.5], rel=1e-5)
    assert grad.coalesce().values().item() == pytest.approx(1.0, rel=1e-5)


def test_sparse_and_dense_together(fake):
    module, dense = embedding(5, 1), nn.Parameter(torch.zeros(1))
    sparse_grad(module.weight, [3, 3], [1.0, 1.0])
    dense.grad = torch.tensor([3.0])
    total = momentd.clip_grad_norm_([module.weight, dense], 1.0)
    assert total.item() == pytest.approx(13**0.5)
