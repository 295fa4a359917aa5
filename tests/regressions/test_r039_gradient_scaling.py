"""R39: a step that GradScaler skips reaches no daemon; duplicates overflow together."""

import torch

import momentd
from tests.support.optim import embedding, sparse_grad, step_rows, twin


def test_an_overflow_of_the_sum_skips_the_step(fake):
    module = embedding(5, 1)
    optimizer = momentd.SparseAdam(module.parameters())
    before = module.weight.detach().clone()
    # What the scaler does with 16-bit gradients: it looks at summed values.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    module.weight.grad = torch.sparse_coo_tensor([[3, 3]], torch.tensor([[3e38], [3e38]]), (5, 1))
    module.weight.grad = module.weight.grad.coalesce()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(module.weight, before)
    assert not optimizer.state
    assert scaler.get_scale() == 2.0
    assert fake.log == []


def test_a_scaled_run_equals_the_unscaled_one(backend):
    module, scaled, other, plain = twin(embedding(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for value in (1.0, -2.0, 0.5):
        scaler.scale(torch.ones(()))
        sparse_grad(module.weight, [1, 1], [256 * value, 256.0])
        scaler.step(scaled)
        scaler.update()
        step_rows(plain, other.weight, [1, 1], [value, 1.0])
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
