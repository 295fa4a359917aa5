"""R3: a dense gradient is one error that names the parameter and the remedies; nothing changes."""

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, moments, sparse_grad


def test_a_dense_gradient_changes_nothing_anywhere(backend):
    table, linear = embedding(), nn.Linear(4, 4, bias=False)
    optimizer = momentd.SparseAdam([table.weight, linear.weight])
    sparse_grad(table.weight, [1], [1.0])
    optimizer.step()
    weights, before = table.weight.detach().clone(), moments(optimizer)
    linear(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    text = str(caught.value)
    assert text.startswith(
        "SparseAdam does not support dense gradients, please consider Adam instead"
    )
    for part in ("group 0, index 1", "(4, 4)", "sparse=True", "second, dense optimizer"):
        assert part in text
    assert torch.equal(table.weight, weights)
    for mine, old in zip(moments(optimizer), before, strict=True):
        assert torch.equal(mine, old)
    assert optimizer.state[table.weight]["step"] == 1


def test_a_named_parameter_is_named(fake):
    linear = nn.Linear(4, 4, bias=False)
    linear.weight.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="'weight'"):
        momentd.SparseAdam(linear.named_parameters()).step()
