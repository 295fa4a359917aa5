"""R10: epsilon is added to the uncorrected root, as in SparseAdam and not as in Adam."""

import pytest
import torch

import momentd
from tests.support.optim import embedding, step_rows


def test_a_tiny_gradient_tells_the_two_apart(backend):
    module = embedding(2, 1)
    with torch.no_grad():
        module.weight.zero_()
    optimizer = momentd.SparseAdam(module.parameters(), lr=1.0)
    step_rows(optimizer, module.weight, [1], [1e-8])
    assert module.weight[1].item() == pytest.approx(-0.0306534, rel=1e-5)
