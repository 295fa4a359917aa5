"""R28: loading never casts moments, and steps stay ints."""

import io

import pytest
import torch

import momentd
from tests.support.optim import embedding


@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("checkpoint", ["snapshot", "full"])
def test_three_cycles_keep_every_bit(backend, checkpoint, dtype, state):
    module = embedding(dtype=dtype)
    value = torch.full((10, 4), 0.1234567, dtype=state)
    optimizer = momentd.SparseAdam(module.parameters(), checkpoint=checkpoint)
    saved = {
        "state": {0: {"step": 7, "exp_avg": value, "exp_avg_sq": value * 2}},
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    for _ in range(3):
        optimizer.load_state_dict(saved)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    assert type(saved["state"][0]["step"]) is int
    entry = optimizer.full_state_dict()["state"][0]
    assert torch.equal(entry["exp_avg"], value)
    assert entry["exp_avg"].dtype == state
    assert type(entry["step"]) is int
    assert type(optimizer.state[module.weight]["step"]) is int
