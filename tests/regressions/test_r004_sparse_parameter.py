"""R4: a parameter that is itself sparse is refused at construction, by position."""

import pytest
import torch

import momentd


@pytest.mark.parametrize("grouped", [False, True])
def test_sparse_parameters_are_refused_by_position(fake, grouped):
    params = [torch.zeros(3, 2).to_sparse().requires_grad_()]
    with pytest.raises(ValueError, match=r"\[0, 0\].*requires dense parameter tensors"):
        momentd.SparseAdam([{"params": params}] if grouped else params)
    assert fake.log == []
