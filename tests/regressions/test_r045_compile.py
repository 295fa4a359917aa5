"""R45: step() stays outside torch.compile."""

import torch

from tests.support.optim import embedding, twin


def test_a_compiled_caller_runs_the_step_eagerly(backend):
    module, ours, other, theirs = twin(embedding(), lr=0.1)

    def train(mod, optimizer):
        optimizer.zero_grad()
        mod(torch.tensor([1, 2, 1])).pow(2).sum().backward()
        optimizer.step()

    @torch.compile(backend="eager")
    def compiled_step(optimizer):
        optimizer.step()

    for _ in range(3):
        ours.zero_grad()
        module(torch.tensor([1, 2, 1])).pow(2).sum().backward()
        compiled_step(ours)
        train(other, theirs)
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
