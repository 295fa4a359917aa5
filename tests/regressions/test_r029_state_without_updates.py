"""R29: saving before the first step, or with parameters never updated, loads."""

import copy

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, moments, step_rows, twin


def test_before_the_first_step(backend):
    module, ours, other, theirs = twin(embedding(), lr=0.1)
    ours.load_state_dict(ours.state_dict())
    assert backend.tables() == 0
    for param, optimizer in ((module.weight, ours), (other.weight, theirs)):
        step_rows(optimizer, param, [1], [1.0])
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


def test_one_of_two_tables_never_used(backend):
    model = nn.ModuleList([embedding(seed=1), embedding(seed=2)])
    optimizer = momentd.SparseAdam(model.parameters())
    step_rows(optimizer, model[0].weight, [1], [1.0])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert moments(optimizer)[0][1, 0].item() == pytest.approx(0.1)
    model[0].weight.grad = None
    step_rows(optimizer, model[1].weight, [1], [1.0])
    assert optimizer.state[model[1].weight]["step"] == 1
