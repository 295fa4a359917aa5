"""A trainer of its own process that tells how much memory momentd adds to it.

    python -m benchmarks.trainer '{"address": ..., "rows": ..., "dim": ..., ...}'

Prints JSON: resident bytes with model and gradients but without momentd, and with it.
"""

from __future__ import annotations

import json
import sys

import torch

from .machine import process_memory
from .workload import Gradients, Shape, make_parameter


def resident_bytes() -> int:
    return sum(process_memory("self").values())


def run(address: str, rows: int, dim: int, distinct: int, steps: int) -> dict[str, int]:
    shape = Shape(rows, dim, distinct, distinct)
    parameter = make_parameter(shape)
    gradients = Gradients(shape)
    for _ in range(3):
        # The gradient and the pages that it leaves to malloc are the model's, not the optimizer's.
        parameter.grad = gradients.next()
    # torch loads its compiler, some 60 MB, with the first optimizer of any kind.
    torch.optim.SparseAdam([parameter])
    model = resident_bytes()

    import momentd

    optimizer = momentd.SparseAdam([parameter], lr=1e-3, address=address, run="benchmark")
    most = 0
    for _ in range(steps):
        parameter.grad = gradients.next()
        optimizer.step()
        most = max(most, resident_bytes())
    return {"model_bytes": model, "above_model_bytes": most - model}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
