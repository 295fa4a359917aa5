"""R34: a state dict has plain types and tensors only."""

import io

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, moments, step_rows

PLAIN = (str, int, float, bool, type(None))


def check_plain(value):
    if type(value) in (dict, list, tuple):
        for item in value.items() if isinstance(value, dict) else value:
            check_plain(item)
    else:
        assert type(value) in PLAIN or type(value) is torch.Tensor, type(value)


@pytest.mark.parametrize("checkpoint", ["snapshot", "full"])
def test_it_loads_with_weights_only(backend, checkpoint):
    model = nn.ModuleDict({"a": embedding()})
    optimizer = momentd.SparseAdam(model.named_parameters(), checkpoint=checkpoint)
    step_rows(optimizer, model["a"].weight, [1], [1.0])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    saved = optimizer.state_dict()
    check_plain(saved)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = momentd.SparseAdam([("a.weight", embedding().weight)])
    other.load_state_dict(loaded)
    for ours, theirs in zip(moments(other), moments(optimizer), strict=True):
        assert torch.equal(ours, theirs)
