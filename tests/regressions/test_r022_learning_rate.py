"""R22: lr is read at every step; 0 is legal there."""

import pytest
import torch

import momentd
from tests.support.optim import embedding, moments, sparse_grad, step_rows


def test_a_schedulers_lr_is_used(backend):
    module = embedding(2, 1)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    moved = []
    for _ in range(3):
        before = module.weight[0].item()
        step_rows(optimizer, module.weight, [0], [1.0])
        scheduler.step()
        moved.append(before - module.weight[0].item())
    assert moved == pytest.approx([0.1, 0.01, 0.001], abs=1e-6)


def test_zero_moves_moments_and_not_weights(backend):
    module = embedding(2, 1)
    before = module.weight.detach().clone()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0)
    step_rows(optimizer, module.weight, [0], [1.0])
    assert torch.equal(module.weight, before)
    assert moments(optimizer)[0][0].item() == pytest.approx(0.1)


def test_each_group_has_its_own(backend):
    one, two = embedding(2, 1, seed=1), embedding(2, 1, seed=2)
    optimizer = momentd.SparseAdam(
        [{"params": one.weight, "lr": 0.1}, {"params": two.weight, "lr": 0.3}]
    )
    before = [one.weight[0].item(), two.weight[0].item()]
    for module in (one, two):
        sparse_grad(module.weight, [0], [1.0])
    optimizer.step()
    moved = [old - m.weight[0].item() for old, m in zip(before, (one, two), strict=True)]
    assert moved == pytest.approx([0.1, 0.3], abs=1e-6)
