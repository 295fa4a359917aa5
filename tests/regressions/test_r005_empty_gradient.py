"""R5: a batch of padding only is a legal step without rows; the counter advances."""

import torch
from torch import nn

import momentd
from tests.support.optim import embedding, moments, step_rows, twin


def check(backend, module, run):
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    run(module).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight, before)
    assert optimizer.state[module.weight]["step"] == 1
    assert backend.tables() == 0
    assert not any(moment.any() for moment in moments(optimizer))


def test_only_padding(backend):
    module = embedding(5, 1, padding_idx=0)
    check(backend, module, lambda m: m(torch.tensor([[0, 0]])))


def test_no_ids(backend):
    check(backend, embedding(5, 1), lambda m: m(torch.empty(0, dtype=torch.int64)))


def test_empty_bags(backend):
    bag = nn.EmbeddingBag(5, 1, sparse=True, mode="sum")
    ids = torch.empty(0, dtype=torch.int64)
    check(backend, bag, lambda m: m(ids, torch.tensor([0, 0])))


def test_the_counter_counts_in_the_next_update(backend):
    module, ours, other, theirs = twin(embedding(), lr=0.1)
    for param, optimizer in ((module.weight, ours), (other.weight, theirs)):
        for ids in ([1], [], [], [1]):
            step_rows(optimizer, param, ids, [1.0] * len(ids))
    assert torch.equal(moments(ours)[1], theirs.state[other.weight]["exp_avg_sq"])
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
