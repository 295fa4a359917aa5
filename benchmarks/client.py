"""One of several training processes: python -m benchmarks.client '{"address": ..., ...}'

Says "ready" once its state is made, waits for a line, trains for some seconds, prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import momentd

from .workload import Gradients, Shape, fill_state, make_parameter

WARM_UP_STEPS = 5


def run(
    address: str, rows: int, dim: int, distinct: int, seconds: float, number: int
) -> dict[str, Any]:
    shape = Shape(rows, dim, distinct, distinct)
    parameter, gradients = make_parameter(shape), Gradients(shape, seed=number)
    optimizer = momentd.SparseAdam([parameter], lr=1e-3, address=address, run=f"client-{number}")
    fill_state(parameter, optimizer, min(rows, 20_000))
    for _ in range(WARM_UP_STEPS):
        parameter.grad = gradients.next()
        optimizer.step()
    print("ready", flush=True)
    sys.stdin.readline()
    step_ms: list[float] = []
    began = now = time.perf_counter()
    while now - began < seconds:
        parameter.grad = gradients.next()
        before = time.perf_counter()
        optimizer.step()
        now = time.perf_counter()
        step_ms.append((now - before) * 1e3)
    return {"rows": distinct * len(step_ms), "seconds": now - began, "step_ms": step_ms}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
