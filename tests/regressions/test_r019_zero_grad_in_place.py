"""R19: a gradient zeroed in place is an empty one; accumulating into it works."""

import torch

from tests.support.optim import embedding, twin


def test_a_step_after_it_moves_no_row(backend):
    module, ours, other, theirs = twin(embedding(), lr=0.1)
    ids = torch.tensor([1, 2, 1])
    for mod, optimizer in ((module, ours), (other, theirs)):
        before = mod.weight.detach().clone()
        mod(ids).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert torch.equal(mod.weight, before)
        mod(ids).pow(2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
    assert ours.state[module.weight]["step"] == theirs.state[other.weight]["step"] == 2
