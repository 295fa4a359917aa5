"""R14: EmbeddingBag works as far as torch has sparse gradients for it."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import twin


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ragged_bags_with_repeated_ids_follow_torch(backend, mode):
    torch.manual_seed(0)
    module, ours, other, theirs = twin(nn.EmbeddingBag(20, 4, mode=mode, sparse=True), lr=0.05)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 20, (9,), generator=generator)
        weights = torch.rand(9, generator=generator) if mode == "sum" else None
        for bag, optimizer in ((module, ours), (other, theirs)):
            optimizer.zero_grad()
            bag(ids, torch.tensor([0, 0, 4]), per_sample_weights=weights).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


def test_max_is_torchs_own_error_and_no_daemon_is_reached(fake):
    bag = nn.EmbeddingBag(5, 2, mode="max", sparse=True)
    momentd.SparseAdam(bag.parameters())
    with pytest.raises(ValueError, match="max mode does not support sparse weights"):
        bag(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
    assert fake.log == []


def test_a_frozen_bag_makes_no_state(backend):
    bag = nn.EmbeddingBag(5, 2, mode="sum", sparse=True)
    bag.weight.requires_grad_(False)
    factors = torch.rand(3, requires_grad=True)
    optimizer = momentd.SparseAdam(bag.parameters())
    # Versions of torch differ here; either way nothing is ours to keep.
    with suppress(RuntimeError):
        bag(torch.tensor([1, 2, 1]), torch.tensor([0]), per_sample_weights=factors).sum().backward()
    optimizer.step()
    assert not optimizer.state
    assert backend.tables() == 0
