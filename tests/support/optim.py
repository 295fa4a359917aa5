"""Fixtures and small models for tests of optimizers."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import momentd
from momentd.optim import base
from tests.support.fake_session import FakeDaemon

# torch warns where this was never said; and what tests build should be checked.
torch.sparse.check_sparse_tensor_invariants.enable()
# Small tensors: waiting for a second thread costs more than it does, on a busy machine much more.
torch.set_num_threads(1)


@pytest.fixture
def fake(monkeypatch) -> FakeDaemon:
    """Optimizers made in this test reach this daemon."""
    daemon = FakeDaemon()
    monkeypatch.setattr(base, "connect", daemon.session)
    return daemon


def embedding(rows=10, dim=4, dtype=torch.float32, seed=0, **kwargs) -> nn.Embedding:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    module = nn.Embedding(rows, dim, sparse=True, dtype=dtype, **kwargs)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def sparse_grad(param, ids, values) -> None:
    """Give a parameter a row-sparse gradient; values broadcast over the rest of the shape."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    rest = (1,) * (param.dim() - 1)
    values = torch.as_tensor(values, dtype=param.dtype).reshape(-1, *rest)
    values = values.expand(ids.numel(), *param.shape[1:]).contiguous()
    param.grad = torch.sparse_coo_tensor(ids[None], values, param.shape, check_invariants=True)


def step_rows(optimizer, param, ids, values) -> None:
    sparse_grad(param, ids, values)
    optimizer.step()


def twin(module: nn.Module, **kwargs):
    """(ours, its optimizer, a copy, torch's optimizer of the copy) with equal arguments."""
    other = copy.deepcopy(module)
    ours = momentd.SparseAdam(module.parameters(), **kwargs)
    kwargs = {
        k: v for k, v in kwargs.items() if k not in {"address", "run", "state_dtype", "checkpoint"}
    }
    return module, ours, other, torch.optim.SparseAdam(other.parameters(), **kwargs)


def moments(optimizer, param=None):
    """(exp_avg, exp_avg_sq) of a parameter, the first one by default."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    index = 0 if param is None else next(i for i, p in enumerate(params) if p is param)
    entry = optimizer.full_state_dict()["state"][index]
    return entry["exp_avg"], entry["exp_avg_sq"]


class FakeBackend:
    """The second implementation of the client port."""

    def __init__(self) -> None:
        self.daemon = FakeDaemon()

    def connect(self, address, run):
        return self.daemon.session(address, run)

    def tables(self) -> int:
        wait_for_drops()
        return len(self.daemon.tables)

    def close(self) -> None:
        pass


class ServedBackend:
    """The momentd client and a daemon in this process, over one of the planes."""

    def __init__(self, path, plane: str) -> None:
        from momentd._session import Session
        from tests.support.momentd_daemon import RestartableDaemon

        self.daemon = RestartableDaemon(path)
        self.daemon.start()
        self.address = getattr(self.daemon, plane)
        self.session = Session(self.address, "test")

    def connect(self, address, run):
        return self.session

    def tables(self) -> int:
        wait_for_drops()
        with momentd.connect(self.address) as client:
            return len(client.list_tables())

    def close(self) -> None:
        wait_for_drops()
        self.session.close()
        self.daemon.stop()


@pytest.fixture(params=["fake", "local", "grpc"])
def backend(request, tmp_path, monkeypatch):
    """Optimizers made in this test reach it, whichever implementation it is."""
    made = FakeBackend() if request.param == "fake" else ServedBackend(tmp_path, request.param)
    monkeypatch.setattr(base, "connect", made.connect)
    yield made
    made.close()


def wait_for_drops() -> None:
    """Tables of collected optimizers are dropped by threads."""
    for thread in threading.enumerate():
        if thread.name == "momentd-drop":
            thread.join(10)
