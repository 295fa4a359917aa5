"""R24: as in torch a NaN goes into its own row, and into no other."""

import pytest
import torch

import momentd
from tests.support.optim import embedding, sparse_grad, step_rows, twin


def test_one_bad_row_stays_alone(backend):
    module, ours, other, theirs = twin(embedding(100, 4), lr=0.1)
    values = torch.ones(100)
    values[41] = float("nan")
    for param, optimizer in ((module.weight, ours), (other.weight, theirs)):
        step_rows(optimizer, param, range(100), values)
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6, equal_nan=True)
    bad = module.weight.isnan().any(dim=1).nonzero().flatten()
    assert bad.tolist() == [41]


def test_a_norm_check_before_the_step_keeps_it_out(backend):
    module = embedding()
    sparse_grad(module.weight, [1, 2], [1.0, float("nan")])
    with pytest.raises(RuntimeError, match="non-finite"):
        momentd.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
