"""Cold rows that are read while the trainer computes: how much a loop still waits for the disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import momentd
from examples.own_daemon import OwnDaemon

from .device import FILE_BYTES, random_read_iops
from .harness import Result, Row, Settings, daemon, open_optimizer, settle, stats
from .workload import FILL_ROWS, Gradients, Shape, fill_state, make_parameter

ROWS = 4_000_000
DIM = 128
DEPTH = 2
COMPUTE_S = 0.050
STEPS = 60
WARM_UP_STEPS = 20
# What of the disk a loop may count on, and what it may take beyond that.
DISK_SHARE = 0.8
GOAL = 1.1


def run(settings: Settings) -> Result:
    """Needs momentd on our side, and fio."""
    settings.need_daemon()
    batch = settings.rows(10_000)
    shape = Shape(settings.rows(ROWS), DIM, batch, batch)
    iops = random_read_iops(settings.work_dir, file_bytes=FILE_BYTES // settings.scale)
    parameter = make_parameter(shape)
    result = Result("lookahead")
    with (
        daemon(settings, shape.state_bytes // 10) as own,
        open_optimizer(parameter, own) as optimizer,
    ):
        assert own is not None
        fill_state(parameter, optimizer, settings.rows(FILL_ROWS))
        settle(own)
        for name, compute, ahead in (
            ("waits 50 ms, without look-ahead", time.sleep, False),
            ("waits 50 ms, look-ahead", time.sleep, True),
            ("computes 50 ms on a core, look-ahead", _spin, True),
        ):
            settings.console.print(f"{name} ...")
            gradients = Gradients(shape)
            _loop(parameter, optimizer, gradients, WARM_UP_STEPS, compute, ahead)
            before = _rows_read(own)
            seconds = _loop(parameter, optimizer, gradients, STEPS, compute, ahead)
            read = (_rows_read(own) - before) / STEPS
            result.rows.append(_row(name, seconds, read, iops, judged=ahead))
    result.notes.append(
        f"{shape.rows:,} x {DIM}, uniform, cache a tenth, {batch:,} rows a step, depth {DEPTH}; a "
        f"whole turn of the loop: compute, step, and what is between them. bound: the larger of "
        f"{COMPUTE_S * 1e3:.0f} ms and rows from disk / ({DISK_SHARE:g} x fio's {iops:,.0f} "
        "reads a second)."
    )
    return result


def _loop(
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    steps: int,
    compute: Callable[[float], None],
    ahead: bool,
) -> list[float]:
    """Seconds of each turn."""
    batches: Iterable[Tensor] = (gradients.next() for _ in range(steps))
    if ahead:
        rows_of = {parameter: lambda gradient: gradient._indices()}
        batches = momentd.lookahead(batches, rows_of, DEPTH)
    seconds: list[float] = []
    began = time.perf_counter()
    for gradient in batches:
        compute(COMPUTE_S)
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return seconds


def _spin(seconds: float) -> None:
    """Keeps one core busy, without the interpreter's lock for most of the time."""
    matrix = torch.ones(128, 128)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        matrix = torch.mm(matrix, matrix).clamp_(max=1)


def _rows_read(own: OwnDaemon) -> int:
    totals = stats(own)
    misses = sum(table.misses for table in totals.tables)
    return misses - totals.totals.reads_shared + totals.totals.rows_prefetched


def _row(name: str, seconds: list[float], read: float, iops: float, *, judged: bool) -> Row:
    turn = statistics.fmean(seconds)
    bound = max(COMPUTE_S, read / (DISK_SHARE * iops))
    numbers = {
        "turn_ms": turn * 1e3,
        "median_ms": statistics.median(seconds) * 1e3,
        "bound_ms": bound * 1e3,
        "ratio": turn / bound,
        "rows from disk": read,
    }
    if not judged:
        return Row(name, numbers)
    return Row(name, numbers, f"ratio <= {GOAL:g}", turn / bound <= GOAL)
