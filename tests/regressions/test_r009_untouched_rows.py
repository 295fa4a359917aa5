"""R9: lazy as torch.optim.SparseAdam is, in golden numbers; untouched rows keep their bits."""

import pytest
import torch

import momentd
from tests.support.optim import embedding, step_rows


def test_one_counter_for_all_rows_and_no_decay_without_touch(backend):
    module = embedding(6, 1)
    with torch.no_grad():
        module.weight[:2] = 0.0
    before = module.weight.detach().clone()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    for row in (0, 1, 0):
        step_rows(optimizer, module.weight, [row], [1.0])
    # Dense Adam: -0.2488061; one counter for each row: -0.2.
    assert module.weight[0].item() == pytest.approx(-0.1858462, abs=1e-6)
    assert torch.equal(module.weight[2:], before[2:])


def test_a_row_first_touched_late_moves_by_the_shared_counter(backend):
    module = embedding(2, 1)
    with torch.no_grad():
        module.weight.zero_()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    zeros = torch.zeros(2, 1)
    group = optimizer.state_dict()["param_groups"]
    entry = {"step": 999, "exp_avg": zeros, "exp_avg_sq": zeros}
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": group})
    step_rows(optimizer, module.weight, [1], [1.0])
    assert module.weight[1].item() == pytest.approx(-0.25146, rel=1e-4)
