"""R16: one bad id refuses the whole batch, by name and position; the next call is served."""

import pytest
import torch

import momentd
from tests.support.optim import embedding, moments, sparse_grad, step_rows


@pytest.mark.parametrize("bad", [10, -1])
def test_the_batch_is_refused_whole(backend, bad):
    module = embedding(10, 4)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    step_rows(optimizer, module.weight, [2], [1.0])
    weights, before = module.weight.detach().clone(), moments(optimizer)
    sparse_grad(module.weight, [2, 5, 3], [1.0, 1.0, 1.0])
    module.weight.grad._indices()[0, 1] = bad
    with pytest.raises(IndexError, match=str(bad)) as caught:
        optimizer.step()
    assert caught.value.details["position"] == "1"
    assert torch.equal(module.weight, weights)
    assert torch.equal(moments(optimizer)[0], before[0])
    assert optimizer.state[module.weight]["step"] == 1
    step_rows(optimizer, module.weight, [2, 3], [1.0, 1.0])
    assert optimizer.state[module.weight]["step"] == 2
