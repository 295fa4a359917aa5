"""R21: the error says why a sparse table got a dense gradient."""

import pytest
import torch

import momentd
from tests.support.optim import embedding


@pytest.mark.parametrize("kind", ["penalty", "tied"])
def test_the_cause_is_named(fake, kind):
    module = embedding()
    looked_up = module(torch.tensor([1, 2]))
    extra = module.weight.norm() if kind == "penalty" else (looked_up @ module.weight.t()).sum()
    (looked_up.sum() + extra).backward()
    optimizer = momentd.SparseAdam(module.parameters())
    with pytest.raises(RuntimeError, match="also used outside the lookup") as caught:
        optimizer.step()
    assert "tied" in str(caught.value)
    assert "penalty" in str(caught.value)
    assert fake.log == []
