"""The optimizer over a real daemon whose cache holds a part of the state."""

import copy
import gc

import pytest
import torch

import momentd
from momentd.optim import base
from tests.support.optim import embedding, moments, wait_for_drops
from tests.support.served import ServedProcess

ROWS, DIM = 150_000, 32  # 38 MB of moments


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    process = ServedProcess(tmp_path_factory.mktemp("served"), cache="24MiB")
    yield process
    process.close()


@pytest.fixture
def daemon(process, monkeypatch):
    monkeypatch.setattr(base, "connect", process.connect)
    return process


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (8_000,), generator=generator)
        yield ids, torch.randn(8_000, DIM, generator=generator)


def train(optimizer, param, work):
    for ids, values in work:
        param.grad = torch.sparse_coo_tensor(ids[None], values, param.shape)
        optimizer.step()


def test_rows_spilled_and_read_back_many_times_follow_torch(daemon):
    module = embedding(ROWS, DIM)
    other = copy.deepcopy(module)
    ours = momentd.SparseAdam(module.parameters(), lr=0.01)
    theirs = torch.optim.SparseAdam(other.parameters(), lr=0.01)
    train(ours, module.weight, batches(60))
    train(theirs, other.weight, batches(60))
    state = theirs.state[other.weight]
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
    exp_avg, exp_avg_sq = moments(ours)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=2e-6, atol=1e-30)
    largest = state["exp_avg"].abs().amax(dim=1, keepdim=True)
    assert bool(((exp_avg - state["exp_avg"]).abs() <= 2e-6 * largest).all())
    totals = daemon.totals()
    assert totals.bytes_read > 10e6
    assert totals.cache_used_bytes <= totals.cache_bytes


def test_saved_loaded_copied_and_plain_runs_agree_in_every_bit(daemon):
    plain = embedding(ROWS, DIM)
    loaded, copied = copy.deepcopy(plain), copy.deepcopy(plain)
    first = momentd.SparseAdam(plain.parameters(), lr=0.01)
    train(first, plain.weight, batches(8))
    second = momentd.SparseAdam(loaded.parameters())
    second.load_state_dict(first.state_dict())
    third = copy.deepcopy(first)
    for module, optimizer in ((loaded, second), (copied, third)):
        with torch.no_grad():
            module.weight.copy_(plain.weight)
            optimizer.param_groups[0]["params"][0].copy_(plain.weight)
    for optimizer in (first, second, third):
        train(optimizer, optimizer.param_groups[0]["params"][0], batches(4, seed=1))
    for optimizer in (second, third):
        assert torch.equal(optimizer.param_groups[0]["params"][0], plain.weight)
        assert torch.equal(moments(optimizer)[0], moments(first)[0])


def test_fifty_optimizers_built_stepped_and_dropped_leave_nothing(daemon):
    gc.collect()
    wait_for_drops()
    before, tables = daemon.totals(), daemon.tables()
    for seed in range(50):
        module = embedding(2_000, 8)
        optimizer = momentd.SparseAdam(module.parameters())
        module(torch.randint(0, 2_000, (500,))).sum().backward()
        optimizer.step()
        assert optimizer.state[module.weight]["step"] == 1, seed
    del optimizer
    wait_for_drops()
    after = daemon.totals()
    assert daemon.tables() == tables
    assert after.disk_bytes <= before.disk_bytes
    assert after.slabs - after.slabs_free <= before.slabs - before.slabs_free
    assert after.location_bytes <= before.location_bytes
