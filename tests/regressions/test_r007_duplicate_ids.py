"""R7: duplicate ids are summed once, before anything is squared."""

import pytest
import torch

import momentd
from tests.support.optim import embedding, moments, step_rows


def test_two_entries_of_one_row(backend):
    module = embedding(5, 1)
    with torch.no_grad():
        module.weight.zero_()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    step_rows(optimizer, module.weight, [3, 3], [1.0, 3.0])
    exp_avg, exp_avg_sq = moments(optimizer)
    assert exp_avg[3].item() == pytest.approx(0.4)
    assert exp_avg_sq[3].item() == pytest.approx(0.016)
    assert module.weight[3].item() == pytest.approx(-0.09999999, rel=1e-6)


def test_two_lookups_in_one_forward(backend):
    module = embedding(5, 1)
    with torch.no_grad():
        module.weight.zero_()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    ids = torch.tensor([3])
    (module(ids).sum() + 3 * module(ids).sum()).backward()
    optimizer.step()
    assert moments(optimizer)[1][3].item() == pytest.approx(0.016)
