"""The optimizer against torch.optim.SparseAdam over long random schedules.

Bounds as documented: weights within 1e-6 + 1e-6 |w|; exp_avg_sq within 2e-6 relative; exp_avg
within 2e-6 of the row's largest entry; both moments bit-equal without duplicates. float64 within
1e-12.
"""

import copy

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, moments

ROWS, DIM = 400, 8


def schedule(steps, duplicates, seed=0):
    """Yield (ids, values) of each step; some are empty."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        count = 0 if number % 97 == 5 else int(torch.randint(1, 60, (), generator=generator))
        if duplicates:
            ids = torch.randint(0, ROWS, (count,), generator=generator)
        else:
            ids = torch.randperm(ROWS, generator=generator)[:count]
        scale = 10.0 ** torch.randint(-4, 2, (), generator=generator)
        yield ids, torch.randn(count, DIM, generator=generator, dtype=torch.float64) * scale


def run(optimizer, param, work, every=None):
    for number, (ids, values) in enumerate(work):
        optimizer.param_groups[0]["lr"] = 0.01 * (0.2 + (number % 50) / 60)
        optimizer.param_groups[0]["betas"] = (0.8 + (number % 7) / 40, 0.999)
        param.grad = torch.sparse_coo_tensor(ids[None], values.to(param.dtype), param.shape)
        optimizer.step()
        if every is not None and number % 200 == 150:
            every(optimizer)


def pair(dtype, **kwargs):
    module = embedding(ROWS, DIM, dtype)
    other = copy.deepcopy(module)
    return (
        (momentd.SparseAdam(module.parameters(), lr=0.01, **kwargs), module.weight),
        (torch.optim.SparseAdam(other.parameters(), lr=0.01, **kwargs), other.weight),
    )


@pytest.mark.parametrize("maximize", [False, True])
def test_a_thousand_steps_with_duplicates_stay_within_the_bounds(backend, maximize):
    ours, theirs = pair(torch.float32, maximize=maximize)
    for each in (ours, theirs):
        run(*each, schedule(1000, duplicates=True))
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    exp_avg, exp_avg_sq = moments(ours[0])
    state = theirs[0].state[theirs[1]]
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=2e-6, atol=1e-30)
    largest = state["exp_avg"].abs().amax(dim=1, keepdim=True)
    assert bool(((exp_avg - state["exp_avg"]).abs() <= 2e-6 * largest).all())
    assert ours[0].state[ours[1]]["step"] == state["step"] == 1000


def test_moments_are_bit_equal_without_duplicates(backend):
    ours, theirs = pair(torch.float32)
    for each in (ours, theirs):
        run(*each, schedule(300, duplicates=False))
    state = theirs[0].state[theirs[1]]
    for mine, name in zip(moments(ours[0]), ("exp_avg", "exp_avg_sq"), strict=True):
        assert torch.equal(mine, state[name]), name
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


def test_float64(backend):
    ours, theirs = pair(torch.float64)
    for each in (ours, theirs):
        run(*each, schedule(300, duplicates=True))
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-12)
    for mine, name in zip(moments(ours[0]), ("exp_avg", "exp_avg_sq"), strict=True):
        torch.testing.assert_close(mine, theirs[0].state[theirs[1]][name], rtol=1e-12, atol=1e-12)


def test_our_error_against_float64_is_at_most_twice_torchs(backend):
    """Each starts from the same float32 weights; the reference works in float64 throughout."""
    ours, theirs = pair(torch.float32)
    exact = nn.Parameter(ours[1].detach().double())
    reference = (torch.optim.SparseAdam([exact], lr=0.01), exact)
    for each in (ours, theirs, reference):
        run(*each, schedule(300, duplicates=True))
    error = [
        (weight.detach().double() - exact).abs().max().item() for weight in (ours[1], theirs[1])
    ]
    assert error[0] <= 2 * error[1] + 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_follow_float32_moments(backend, dtype):
    """Against the float32 rule on the same gradients, with the sum rounded once to the weight."""
    ours, _ = pair(dtype)
    weight = ours[1].detach().clone()
    shadow = nn.Parameter(torch.zeros(ROWS, DIM))
    reference = torch.optim.SparseAdam([shadow], lr=0.01)

    for ids, exact in schedule(100, duplicates=False):
        values = exact.to(dtype)
        ours[1].grad = torch.sparse_coo_tensor(ids[None], values, (ROWS, DIM))
        ours[0].step()
        with torch.no_grad():
            shadow.zero_()
        shadow.grad = torch.sparse_coo_tensor(ids[None], values.float(), (ROWS, DIM))
        reference.step()
        weight = (weight.float() + shadow.detach()).to(dtype)
    different = (ours[1].detach() != weight).float().mean().item()
    # The last bit of a delta decides a tie now and then.
    assert different < 0.01
    torch.testing.assert_close(ours[1].detach(), weight, rtol=0.02, atol=0.01)
    assert moments(ours[0])[0].dtype == torch.float32


def test_saving_and_loading_in_between_changes_no_bit(backend):
    (plain, weight), _ = pair(torch.float32)
    (saved, other), _ = pair(torch.float32)
    run(plain, weight, schedule(400, duplicates=True))

    def reload(optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    run(saved, other, schedule(400, duplicates=True), every=reload)
    assert torch.equal(weight, other)
    assert backend.tables() == 2


def test_element_sparse_gradients_follow_torch(backend):
    start = torch.randn(30, 4, generator=torch.Generator().manual_seed(3))
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        momentd.SparseAdam([weights[0]], lr=0.01),
        torch.optim.SparseAdam([weights[1]], lr=0.01),
    ]
    generator = torch.Generator().manual_seed(4)
    for _ in range(200):
        count = int(torch.randint(0, 40, (), generator=generator))
        where = torch.stack(
            [
                torch.randint(0, 30, (count,), generator=generator),
                torch.randint(0, 4, (count,), generator=generator),
            ]
        )
        values = torch.randn(count, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.sparse_coo_tensor(where, values, (30, 4))
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-6)


def test_embedding_bags_train_alike(backend):
    torch.manual_seed(0)
    for mode in ("sum", "mean"):
        bag = nn.EmbeddingBag(50, 4, mode=mode, sparse=True)
        other = copy.deepcopy(bag)
        pairs = [
            (bag, momentd.SparseAdam(bag.parameters(), lr=0.01)),
            (other, torch.optim.SparseAdam(other.parameters(), lr=0.01)),
        ]
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, 50, (12,), generator=generator)
            offsets = torch.tensor([0, 0, 5, 11])
            factors = torch.rand(12, generator=generator) if mode == "sum" else None
            for module, optimizer in pairs:
                optimizer.zero_grad()
                module(ids, offsets, per_sample_weights=factors).pow(2).sum().backward()
                optimizer.step()
        torch.testing.assert_close(bag.weight, other.weight, rtol=1e-6, atol=1e-6)
