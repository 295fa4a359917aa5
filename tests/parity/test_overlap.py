"""Look-ahead and steps that are not waited for: the same numbers, and errors at their place."""

import copy
import os
import signal

import pytest
import torch

import momentd
from momentd.errors import CacheTooSmall, StateRolledBack, TableNotFound
from tests.support.optim import embedding
from tests.support.real_daemon import RealDaemon

ROWS, DIM = 120_000, 32  # 31 MB of moments beside 16 MiB of cache


@pytest.fixture
def daemon(tmp_path):
    with RealDaemon(tmp_path, cache="16MiB") as daemon:
        yield daemon


@pytest.fixture(params=["local", "grpc"])
def address(request, daemon):
    return daemon.address if request.param == "local" else f"grpc+{daemon.address}.grpc"


def batches(steps, rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, rows, (5_000,), generator=generator) for _ in range(steps)]


def train(module, optimizer, loader, **how):
    generator = torch.Generator().manual_seed(9)
    for ids in loader:
        values = torch.randn(ids.numel(), DIM, generator=generator)
        module.weight.grad = torch.sparse_coo_tensor(ids[None], values, module.weight.shape)
        optimizer.step(**how)
        # The gradient is copied: it may go, or change, at once.
        module.weight.grad = None
        values.fill_(float("nan"))
    optimizer.synchronize()


def prefetched(daemon):
    with momentd.connect(daemon.address) as client:
        return sum(t.rows_prefetched for t in client.stats().tables)


def test_look_ahead_reads_rows_and_changes_nothing(daemon, address):
    plain, ahead = embedding(ROWS, DIM), embedding(ROWS, DIM)
    work = batches(40)
    one = momentd.SparseAdam(plain.parameters(), lr=0.01, address=address)
    train(plain, one, work)
    two = momentd.SparseAdam(ahead.parameters(), lr=0.01, address=address)
    # Ids that do not exist, padding and duplicates are nobody's trouble here.
    rows_of = {ahead: lambda ids: (ids, torch.tensor([-1, ROWS, 1 << 40]), ids[:10])}
    train(ahead, two, momentd.lookahead(work, rows_of))
    assert prefetched(daemon) > 20_000
    assert torch.equal(plain.weight, ahead.weight)
    for mine, others in zip(
        *(o.full_state_dict()["state"][0].items() for o in (one, two)), strict=True
    ):
        assert mine[0] == others[0]
        assert torch.equal(torch.as_tensor(mine[1]), torch.as_tensor(others[1]))
    one.close()
    two.close()


def test_several_tables_a_module_and_a_table(daemon):
    first, second = embedding(ROWS, DIM), embedding(ROWS, DIM, seed=1)
    optimizer = momentd.SparseAdam([first.weight, second.weight], lr=0.01, address=daemon.address)
    with momentd.connect(daemon.address) as client:
        table = client.open_table("t", rows=ROWS, dim=DIM, rule=momentd.rules.SparseAdam())
        for ids in batches(15, seed=4):
            table.update(ids.numpy(), torch.ones(5_000, DIM).numpy(), lr=0.1)
        keys = {first: lambda b: b, second.weight: lambda b: [b.tolist()], table: lambda b: b}
        for ids in momentd.lookahead(batches(30), keys, depth=3):
            for module in (first, second):
                module.weight.grad = torch.sparse_coo_tensor(
                    ids[None], torch.ones(ids.numel(), DIM), module.weight.shape
                )
            optimizer.step()
    optimizer.close()


def test_steps_that_are_not_waited_for_give_the_same_weights(daemon, address):
    plain, later = embedding(ROWS, DIM), embedding(ROWS, DIM)
    one = momentd.SparseAdam(plain.parameters(), lr=0.01, address=address)
    two = momentd.SparseAdam(later.parameters(), lr=0.01, address=address)
    train(plain, one, batches(20))
    train(later, two, batches(20), wait=False)
    assert torch.equal(plain.weight, later.weight)


def test_what_needs_the_step_completes_it(daemon):
    module = embedding(50, DIM)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.5, address=daemon.address)

    def step():
        module.weight.grad = torch.sparse_coo_tensor([[3]], torch.ones(1, DIM), module.weight.shape)
        optimizer.step(wait=False)

    before = module.weight.detach().clone()
    step()
    optimizer.synchronize()
    assert not torch.equal(before[3], module.weight[3])
    assert torch.equal(before[4:], module.weight[4:])
    for use in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(torch.optim.SparseAdam([module.weight]).state_dict()),
        lambda: copy.deepcopy(optimizer),
        optimizer.__getstate__,
        optimizer.close,
        step,
    ):
        before = module.weight.detach().clone()
        step()
        use()
        assert not torch.equal(before[3], module.weight[3]), use
    optimizer.synchronize()
    before = module.weight.detach().clone()
    optimizer.synchronize()
    assert torch.equal(before, module.weight)


def test_closure_scaler_and_scheduler_work_without_waiting(daemon):
    module = embedding(50, DIM)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.5, address=daemon.address)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def closure():
        optimizer.zero_grad()
        loss = module(torch.tensor([1, 2, 2])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure, wait=False).shape == ()
    scheduler.step()
    closure()
    scaler.step(optimizer, wait=False)
    optimizer.synchronize()
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_an_error_appears_at_synchronize_and_the_optimizer_goes_on(daemon):
    module = embedding(ROWS, DIM)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.5, address=daemon.address)
    before = module.weight.detach().clone()
    many = torch.arange(ROWS)  # more than a quarter of the cache
    module.weight.grad = torch.sparse_coo_tensor(
        many[None], torch.ones(ROWS, DIM), module.weight.shape
    )
    optimizer.step(wait=False)
    with pytest.raises(CacheTooSmall):
        optimizer.synchronize()
    assert torch.equal(before, module.weight)
    train(module, optimizer, batches(2), wait=False)
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_a_restart_of_the_daemon_in_the_middle_of_look_ahead(tmp_path):
    daemon = RealDaemon(tmp_path, cache="16MiB").start()
    try:
        plain, ahead = embedding(ROWS, DIM), embedding(ROWS, DIM)
        work = batches(24)
        one = momentd.SparseAdam(plain.parameters(), lr=0.01, address=daemon.address)
        train(plain, one, work)
        one.close()
        two = momentd.SparseAdam(ahead.parameters(), lr=0.01, address=daemon.address)

        def restarting(loader):
            for number, batch in enumerate(loader):
                if number == 12:
                    daemon.end(signal.SIGTERM)
                    daemon.start()
                yield batch

        loader = momentd.lookahead(work, {ahead.weight: lambda ids: ids})
        train(ahead, two, restarting(loader), wait=False)
        assert torch.equal(plain.weight, ahead.weight)
        two.close()
    finally:
        daemon.end()


def test_a_dead_daemon_is_the_steps_error_only(tmp_path, monkeypatch):
    monkeypatch.setenv("MOMENTD_TIMEOUT", "2")
    daemon = RealDaemon(tmp_path, cache="16MiB").start()
    module = embedding(ROWS, DIM)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.01, address=daemon.address)
    loader = iter(momentd.lookahead(batches(8), {module: lambda ids: ids}))
    train(module, optimizer, [next(loader)])
    daemon.end(signal.SIGKILL)
    for _ in range(4):
        next(loader)  # no error, no waiting
    daemon.start()
    try:
        with pytest.raises((StateRolledBack, TableNotFound)):
            train(module, optimizer, [next(loader)])
    finally:
        daemon.end()


def test_a_forked_child_goes_on_with_a_loader_of_its_own(daemon):
    module = embedding(ROWS, DIM)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.01, address=daemon.address)
    rows_of = {module: lambda ids: ids}
    train(module, optimizer, momentd.lookahead(batches(6), rows_of))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(module, optimizer, momentd.lookahead(batches(6), rows_of))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    train(module, optimizer, momentd.lookahead(batches(6), rows_of))
