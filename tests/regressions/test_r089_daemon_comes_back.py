"""R89: a daemon that is stopped and started again is found again, with the same state."""

import threading
import time

import pytest
import torch
from torch import nn

import momentd
from tests.support.real_daemon import RealDaemon


def _train(optimizer_of, steps, at_step=lambda _k: None):
    torch.manual_seed(0)
    embedding = nn.Embedding(5000, 16, sparse=True)
    optimizer = optimizer_of(embedding)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        at_step(k)
        ids = torch.randint(0, 5000, (300,), generator=generator)
        optimizer.zero_grad()
        embedding(ids).square().sum().backward()
        optimizer.step()
    return embedding.weight.detach().clone()


@pytest.mark.parametrize("plane", ["unix:{0}", "grpc+unix:{0}.grpc"])
def test_training_goes_on_over_a_restart_and_ends_with_the_same_bits(tmp_path, plane):
    daemon = RealDaemon(tmp_path).start()
    address = plane.format(daemon.address.removeprefix("unix:"))
    whole = _train(lambda e: momentd.SparseAdam(e.parameters(), lr=0.01, address=address), 30)

    def restart(k):
        if k in {10, 20}:
            assert daemon.end() == 0
            threading.Thread(target=lambda: (time.sleep(1.0), daemon.start())).start()

    broken = _train(
        lambda e: momentd.SparseAdam(e.parameters(), lr=0.01, address=address), 30, restart
    )
    assert torch.equal(whole, broken)
    daemon.end()
