"""A training process of these tests: python tests/torture/trainer.py '{"kind": ..., ...}'"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch

import momentd
from momentd.errors import MomentdError, OutOfSpace, StateRolledBack


def beside_torch(
    address: str, rows: int, batch: int, seconds: float, seed: int
) -> dict[str, object]:
    """Trains the same weights with momentd and with SparseAdam in memory; what they differ by."""
    generator = torch.Generator().manual_seed(seed)
    ours = torch.nn.Parameter(torch.randn(rows, 128, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    one = momentd.SparseAdam([ours], lr=0.01, address=address)
    two = torch.optim.SparseAdam([theirs], lr=0.01)
    steps, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        ids = torch.randint(0, rows, (batch,), generator=generator).unique()
        values = torch.randn(ids.numel(), 128, generator=generator)
        for parameter, optimizer in ((ours, one), (theirs, two)):
            parameter.grad = torch.sparse_coo_tensor(ids[None], values, parameter.shape)
            optimizer.step()
        steps += 1
    states = [one.full_state_dict()["state"][0], two.state_dict()["state"][0]]
    return {
        "steps": steps,
        "weights_differ_by": float((ours - theirs).detach().abs().max()),
        "rows_that_differ": sum(
            int((states[0][name] != states[1][name]).any(dim=1).sum())
            for name in ("exp_avg", "exp_avg_sq")
        ),
    }


def numbered(address: str, name: str, rows: int, dim: int, batch: int, seconds: float) -> None:
    """Updates that depend on their number alone, so that whoever counts them knows the state."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            with momentd.connect(address, run=name) as client:
                table = client.open_table(name, rows=rows, dim=dim, rule=momentd.rules.SparseAdam())
                while time.monotonic() < ends:
                    number = table.refresh().update_number
                    ids, grads = update_of(name, number, rows, dim, batch)
                    table.update(ids, grads, lr=0.1)
                    if number % 40 == 39:
                        table.flush()
        except (OutOfSpace, StateRolledBack):
            time.sleep(0.1)
        except MomentdError as error:
            # Of a daemon that is being killed and started again nothing else is expected.
            print(f"{name}: {error!r}", file=sys.stderr)
            time.sleep(0.2)


def update_of(
    name: str, number: int, rows: int, dim: int, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([number, *name.encode()])
    ids = np.unique(random.integers(0, rows, batch))
    return ids, random.standard_normal((ids.size, dim), np.float32)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.enable()
    told = json.loads(sys.argv[1])
    kind = {"beside_torch": beside_torch, "numbered": numbered}[told.pop("kind")]
    print(json.dumps(kind(**told)), flush=True)
