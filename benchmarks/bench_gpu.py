"""Weights on a GPU: torch's SparseAdam with its moments there too, beside momentd.

There is no goal: what fits the GPU is quicker in it. The figures say by how much, and so when the
memory is worth the time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from .harness import (
    LR,
    MIB,
    Result,
    Row,
    Settings,
    Skipped,
    daemon,
    milliseconds,
    open_optimizer,
    settle,
)
from .workload import Gradients, Shape, fill_state

STEPS = 50
WARM_UP_STEPS = 10
BATCH = 10_000
DIM = 128
# Weights, both moments, and what SparseAdam and a gradient need for a moment.
TORCH_SPACE = 3.2


def run(settings: Settings) -> Result:
    """Needs a CUDA device that holds the weights; SparseAdam is left out where it does not fit."""
    if not torch.cuda.is_available():
        raise Skipped(
            f"torch {torch.__version__} finds no CUDA device; if there is one, torch was built "
            'without CUDA: see README, "Which torch"'
        )
    result = Result("gpu")
    for name, rows in (
        ("1 M x 128", settings.rows(1_000_000)),
        ("10 M x 128", settings.rows(10_000_000)),
    ):
        settings.console.print(f"{name} ...")
        batch = min(BATCH, rows // 8)
        result.rows.append(
            _case(f"{name}, {batch:,} rows", Shape(rows, DIM, batch, batch), settings)
        )
    device = torch.cuda.get_device_properties(0)
    result.notes.append(
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB. Whole step(), the GPU waited for "
        "at both ends of the clock. device MB: what the optimizer adds to the GPU's memory at its "
        "peak, beyond weights and gradient."
    )
    return result


def _case(name: str, shape: Shape, settings: Settings) -> Row:
    weight = nn.Parameter(torch.full((shape.rows, shape.dim), 0.01, device="cuda"))
    numbers: dict[str, float] = {}
    needed = TORCH_SPACE * shape.rows * shape.dim * 4
    if needed < torch.cuda.get_device_properties(0).total_memory:
        optimizer = torch.optim.SparseAdam([weight], lr=LR)
        numbers |= _measure("torch", weight, optimizer, shape, _fill_torch)
        del optimizer
        gc.collect()
        torch.cuda.empty_cache()
    with (
        daemon(settings, int(shape.state_bytes * 1.15) + 128 * MIB) as own,
        open_optimizer(weight, own) as ours,
    ):

        def fill(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
            fill_state(parameter, optimizer)
            settle(own)

        numbers |= _measure("momentd", weight, ours, shape, fill)
    if "torch_ms" in numbers:
        numbers["torch / ours"] = numbers["torch_ms"] / numbers["momentd_ms"]
    return Row(name, numbers)


def _measure(
    system: str,
    weight: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    shape: Shape,
    fill: Callable[[nn.Parameter, torch.optim.Optimizer], None],
) -> dict[str, float]:
    before = torch.cuda.memory_allocated()
    gradients = Gradients(shape)
    fill(weight, optimizer)
    torch.cuda.reset_peak_memory_stats()
    _timed(weight, optimizer, gradients, WARM_UP_STEPS)
    seconds = _timed(weight, optimizer, gradients, STEPS)
    gradient_bytes = shape.grad_bytes + shape.entries * 8
    added = torch.cuda.max_memory_allocated() - before - gradient_bytes
    return {
        f"{system}_ms": statistics.median(seconds) * 1e3,
        f"{system}_p90_ms": milliseconds(seconds)["p90_ms"],
        f"{system}, device MB": added / 1e6,
    }


def _timed(
    weight: nn.Parameter, optimizer: torch.optim.Optimizer, gradients: Gradients, steps: int
) -> list[float]:
    seconds = []
    for _ in range(steps):
        weight.grad = gradients.next().to("cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    weight.grad = None
    return seconds


def _fill_torch(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    _timed(weight, optimizer, Gradients(Shape(weight.shape[0], weight.shape[1], 1, 1)), 1)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][name].fill_(1e-6)
